// What is asked of a site on demand: when, and what is taken of the answers.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { SiteQueries } from "../../src/kernel/queries";
import { MockKernel } from "../helpers/kernel";
import { units } from "../helpers/messages";

describe("Looks", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  it("has one request under way, and the newest wish follows it", () => {
    const kernel = new MockKernel();
    const looks = new SiteQueries(kernel);
    looks.request("units", "a");
    looks.request("units", "b");
    looks.request("units", "c");
    looks.request("code", "c");
    expect(kernel.asked).toEqual([{ type: "look", what: "units", site: "a", axis: -1 }, { type: "look", what: "code", site: "c", axis: -1 }]);
    looks.receive(...units(4, "a"));
    expect(looks.units.value, "nobody wants it any more").toBeNull();
    kernel.settles[0](null);
    expect(kernel.asked[2]).toEqual({ type: "look", what: "units", site: "c", axis: -1 });
    looks.receive(...units(4, "c"));
    expect(looks.units.value?.site).toBe("c");
  });

  it("looks again at the same site only a while after the answer, longer after a long one", () => {
    const kernel = new MockKernel();
    const looks = new SiteQueries(kernel);
    looks.request("units", "a");
    looks.request("units", "a");
    vi.advanceTimersByTime(1000);
    kernel.settles[0](null);
    vi.advanceTimersByTime(3999);
    expect(kernel.asked).toHaveLength(1);
    vi.advanceTimersByTime(2);
    expect(kernel.asked).toHaveLength(2);
    kernel.settles[1](null);
    looks.request("units", "b");
    expect(kernel.asked, "another site at once").toHaveLength(3);
    kernel.settles[2](null);
    looks.request("units", "b");
    looks.forget("units");
    vi.advanceTimersByTime(60_000);
    expect(kernel.asked, "not for a panel that is gone").toHaveLength(3);
  });

  it("keeps what was seen beside the text of what is wrong now", () => {
    const kernel = new MockKernel();
    const looks = new SiteQueries(kernel);
    looks.request("units", "a");
    looks.receive(...units(4, "a"));
    kernel.settles[0](null);
    looks.request("units", "a");
    vi.advanceTimersByTime(500);
    kernel.settles[1]("a step has the arrays");
    expect(looks.units.value).toMatchObject({ site: "a", error: "a step has the arrays" });
    expect(looks.units.value?.data?.header.units).toBe(4);
  });
});
