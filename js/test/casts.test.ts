// The panel "Precision": the shares that the kernel computed, of the selected module and then of all, worst first.
import { afterEach, beforeEach, expect, it } from "vitest";
import { CASTS, VERSION, type Casts } from "../src/kernel/protocol";
import { HOSTILE } from "./helpers/hostile";
import { settle } from "./helpers/kernel";
import { enterValue, openTab, startView, type TestView } from "./helpers/view";

let { control, stream, el, find, all, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, el, find, all, end } = await startView()));
afterEach(() => end());

const choose = async (id: string, value: string): Promise<void> => {
  enterValue(find(id), value);
  await settle();
};
const shown = (): unknown[] => all("nni-cast").map((row) => [row.querySelector("th")!.textContent, ...[...row.querySelectorAll("td")].map((one) => Number(one.dataset["value"]))]);

it("shows the selected module first, then all of which something would be lost", async () => {
  await openTab(find, "precision");
  await settle();
  expect(control.of("look").at(-1)).toMatchObject({ what: "casts", site: "" });
  const rows = [{ site: "blocks/0", name: "activations" }, { site: "head", name: `${HOSTILE} gradient` }, { site: "blocks/0", name: "kernel" }];
  // [row, dtype, to_zero | subnormal | overflow | scaled_to_zero | scaled_subnormal]
  const shares = new Float64Array(rows.length * CASTS.length * 5);
  const put = (row: number, dtype: (typeof CASTS)[number], of: number[]): void => shares.set(of, (row * CASTS.length + CASTS.indexOf(dtype)) * 5);
  put(0, "float16", [0.125, 0.25, 0, 0, 0.5]);
  put(1, "float16", [0.25, 0.125, 0.5, 0.0625, 0]);
  put(2, "float16", [NaN, NaN, NaN, NaN, NaN]);
  stream.emit({ type: "casts", version: VERSION, id: 1, site: "", step: 7, rows, total: 5 } satisfies Casts, new DataView(shares.buffer));
  await settle();
  expect(shown()).toEqual([["activations", 0, 0, 0], ["kernel", 0, 0, 0]]);
  expect(el.textContent).toContain("No value of any module would become 0 or be too large.");
  await choose("nni-cast-dtype", "float16");
  const mine = [["activations", 0.125, 0.25, 0], ["kernel", NaN, NaN, NaN]];
  expect(shown()).toEqual([...mine, [`head · ${HOSTILE} gradient`, 0.25, 0.125, 0.5], ["blocks/0 · activations", 0.125, 0.25, 0]]);
  expect(el.textContent).toContain("Only 3 of 5 arrays are here.");
  expect(el.querySelectorAll("img, script")).toHaveLength(0);
  await choose("nni-cast-scale", "with a scale for each array");
  expect(shown()).toEqual([["activations", 0, 0.5, 0], ["kernel", NaN, NaN, NaN], [`head · ${HOSTILE} gradient`, 0.0625, 0, 0]]);
  all("nni-cast").at(-1)!.querySelector("button")!.click();
  await settle();
  expect(control.of("select").at(-1)).toMatchObject({ site: "head" });
});
