// What is asked of a site on demand: when, and what is taken of the answers.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { SiteQueries } from "../../src/kernel/queries";
import { MockKernel } from "../helpers/kernel";
import { units } from "../helpers/messages";

describe("queries", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  it("has one request under way, and the newest wish follows it", () => {
    const kernel = new MockKernel();
    const queries = new SiteQueries(kernel);
    queries.request("units", "a");
    queries.request("units", "b");
    queries.request("units", "c");
    queries.request("code", "c");
    queries.request("nnx", "c");
    expect(kernel.asked).toEqual([
      { type: "look", what: "units", site: "a", axis: -1 },
      { type: "look", what: "code", site: "c", axis: -1 },
      { type: "show_nnx", site: "c" },
    ]);
    queries.receive(...units(4, "a"));
    expect(queries.units.value, "nobody wants it any more").toBeNull();
    kernel.settles[0](null);
    expect(kernel.asked[3]).toEqual({ type: "look", what: "units", site: "c", axis: -1 });
    queries.receive(...units(4, "c"));
    expect(queries.units.value?.site).toBe("c");
  });

  it("asks again at the same site only a while after the answer, longer after a long one", () => {
    const kernel = new MockKernel();
    const queries = new SiteQueries(kernel);
    queries.request("units", "a");
    queries.request("units", "a");
    vi.advanceTimersByTime(1000);
    kernel.settles[0](null);
    vi.advanceTimersByTime(3999);
    expect(kernel.asked).toHaveLength(1);
    vi.advanceTimersByTime(2);
    expect(kernel.asked).toHaveLength(2);
    kernel.settles[1](null);
    queries.request("units", "b");
    expect(kernel.asked, "another site at once").toHaveLength(3);
    kernel.settles[2](null);
    queries.request("units", "b");
    queries.forget("units");
    vi.advanceTimersByTime(60_000);
    expect(kernel.asked, "not for a panel that is gone").toHaveLength(3);
  });

  it("keeps what was seen beside the text of what is wrong now", () => {
    const kernel = new MockKernel();
    const queries = new SiteQueries(kernel);
    queries.request("units", "a");
    queries.receive(...units(4, "a"));
    kernel.settles[0](null);
    queries.request("units", "a");
    vi.advanceTimersByTime(500);
    kernel.settles[1]("a step has the arrays");
    expect(queries.units.value).toMatchObject({ site: "a", error: "a step has the arrays" });
    expect(queries.units.value?.data?.header.units).toBe(4);
  });
});
