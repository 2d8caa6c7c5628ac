// The panel "Sweep": started, stopped, and ranked by what is chosen.
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION, type Sweep } from "../../src/kernel/protocol";
import { HOSTILE } from "../helpers/hostile";
import { settle } from "../helpers/kernel";
import { enterValue, startView, type TestView, openTab } from "../helpers/view";

let { control, stream, el, find, all, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, el, find, all, end } = await startView()));
afterEach(() => end());

const swept = (more: Partial<Sweep>): Sweep => ({
  type: "sweep", version: VERSION, running: false, stopped: false, done: 3, total: 3, sites: "**", perturbation: "nni.Zero()",
  source: "the last step", measures: ["loss_change", "output_change"], loss: 0.5, measured: 3, error: "",
  rows: [
    { site: "head", loss_change: -2, output_change: 0.1, kl: null, top1_changed: null, why_not: "" },
    { site: "blocks/1", loss_change: 0, output_change: 0.4, kl: null, top1_changed: null, why_not: "" },
    { site: HOSTILE, loss_change: null, output_change: null, kl: null, top1_changed: null, why_not: HOSTILE },
  ], ...more,
}); // prettier-ignore

it("runs a sweep, stops it, and ranks what it found by what is chosen", async () => {
  await openTab(find, "sweep");
  await settle();
  find("nni-study-start")!.click();
  expect(control.of("start_sweep")).toMatchObject([{ sites: "**", kind: "", strength: null, at: "output" }]);
  stream.emit(swept({ running: true, rows: [], done: 0, total: 0 }));
  await settle();
  expect(find("nni-sweep")?.dataset["state"]).toBe("running");
  find("nni-study-stop")!.click();
  expect(control.of("stop_sweep")).toHaveLength(1);
  stream.emit(swept({ stopped: true }));
  await settle();
  expect(find("nni-sweep")?.dataset["state"]).toBe("stopped");
  const ranked = (): unknown[] => all("nni-sweep-row").map((row) => [row.dataset["site"], row.dataset["value"]]);
  expect(ranked()).toEqual([["head", "-2"], ["blocks/1", "0"], [HOSTILE, ""]]);
  expect(all("nni-sweep-row").map((row) => row.lastElementChild!.textContent)).toEqual(["−2", "no change", HOSTILE]);
  enterValue(find("nni-sweep-measure"), "output_change");
  await settle();
  expect(ranked()).toEqual([["blocks/1", "0.4"], ["head", "0.1"], [HOSTILE, ""]]);
  all("nni-sweep-row")[1].querySelector("button")!.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("head");
  expect(el.querySelectorAll("img, script")).toHaveLength(0);
});

const one = (site: string, loss_change: number | null, more: Partial<Sweep["rows"][number]> = {}): Sweep["rows"][number] => ({ site, loss_change, output_change: 0.1, kl: null, top1_changed: null, why_not: "", ...more });

it("says first which site matters most, from where to where, and without which the loss falls", async () => {
  await openTab(find, "sweep");
  const lead = async (rows: Sweep["rows"], more: Partial<Sweep> = {}): Promise<string | null | undefined> => {
    stream.emit(swept({ rows, measured: rows.length, total: rows.length, ...more }));
    await settle();
    return find("nni-detail")!.querySelector(".nni-sweep-summary")?.textContent;
  };
  expect(await lead([one("head", 1.5), one("blocks/0", -0.25), one("blocks/1", -0.125)])).toBe("head matters most: without it the loss rises from 0.5 to 2. Without blocks/0 or blocks/1 it falls.");
  expect(await lead([one("head", -0.25), one("blocks/0", 0.125)])).toBe("head matters most: without it the loss falls from 0.5 to 0.25. ");
  expect(await lead([one("head", null), one("blocks/0", 0.125)])).toContain("head matters most: without it the loss is not finite.");
  expect(await lead([one("head", 0), one("blocks/0", 0)])).toBe("No site changes the loss.");
  expect(await lead([one("head", 1.5)], { perturbation: "nni.Scale(0.5)" })).toContain("with nni.Scale(0.5) there the loss rises");
  expect(await lead([one("head", 1.5, { why_not: "cannot be perturbed" })])).toBeUndefined();
});

it("draws a rise to the right of zero and a fall to its left", async () => {
  await openTab(find, "sweep");
  stream.emit(swept({ rows: [one("head", 1.5), one("blocks/0", -0.5)] }));
  await settle();
  const bars = all("nni-sweep-row").map((row) => row.querySelector<HTMLElement>(".nni-zero-bar i")!);
  expect(bars.map((bar) => bar.hasAttribute("data-falls"))).toEqual([false, true]);
  expect(bars.map((bar) => parseFloat(bar.style.width))).toEqual([75, 25]);
  expect(el.querySelector(".nni-bars-head")!.textContent).toContain("loss falls ◂▸ loss rises");
});

it("leaves the whole model out of a sweep of zeros, says so, and keeps it for other kinds", async () => {
  await openTab(find, "sweep");
  const rows = [one("", 3), one("head", 1.5)];
  stream.emit(swept({ rows, measured: 2, total: 2 }));
  await settle();
  expect(all("nni-sweep-row").map((row) => row.dataset["site"])).toEqual(["head"]);
  expect(find("nni-sweep")!.textContent).toContain("The whole model is left out");
  stream.emit(swept({ rows, measured: 2, total: 2, perturbation: "nni.Noise(0.5)" }));
  await settle();
  expect(all("nni-sweep-row").map((row) => row.dataset["site"])).toEqual(["", "head"]);
  expect(find("nni-sweep")!.textContent).not.toContain("left out");
});
