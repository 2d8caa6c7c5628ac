// What is said of a metric: its last value, how many values are not finite, and its whole name.
import { afterEach, expect, it, vi } from "vitest";
import { VERSION } from "../../src/kernel/protocol";
import { ids } from "../../src/ui/testids";
import { settle } from "../helpers/kernel";
import { started, type Mounted } from "../helpers/mounted";

let { stream, find, end } = {} as Mounted;
afterEach(() => {
  end();
  vi.restoreAllMocks();
});

/** Shows one metric, and returns what stands at it. */
async function shown(name: string, values: number[], recorded = values.length): Promise<HTMLElement> {
  ({ stream, find, end } = await started());
  const notFinite = values.filter((value) => !Number.isFinite(value)).length;
  const points = new Float64Array(values.flatMap((value, i) => [i, value]));
  stream.emit({ type: "curves", version: VERSION, names: [name], points: [values.length], recorded: [recorded], not_finite: [notFinite] }, new DataView(points.buffer));
  await settle();
  return find(ids.metric(name))!;
}

it("says how many values are not finite, also where the last one is", async () => {
  const found = await shown("loss", [NaN, 1, NaN, NaN, 2.5], 1205);
  expect(found.querySelector("b")!.textContent).toBe("2.5");
  expect(find(ids.metricGaps("loss"))!.textContent).toBe("3 of 1\u202f205 not finite");
});

it("says so without a curve where no value is finite", async () => {
  const found = await shown("loss", [NaN, NaN]);
  expect(found.querySelector("canvas")).toBeNull();
  expect([found.querySelector("b"), find(ids.metricGaps("loss"))].map((part) => part!.textContent)).toEqual(["not finite", "2 of 2 not finite"]);
});

it("says nothing of a metric that is finite throughout", async () => {
  const found = await shown("loss", [3, 2, 1]);
  expect(find(ids.metricGaps("loss"))).toBeNull();
  expect(found.textContent).not.toContain("finite");
});

it("has the whole of a name that may be cut off as its title", async () => {
  const name = "validation/".repeat(20);
  const found = await shown(name, [1]);
  expect(found.querySelector("figcaption span")!.getAttribute("title")).toBe(name);
});
