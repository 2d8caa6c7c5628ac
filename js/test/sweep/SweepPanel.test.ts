// The panel "Sweep": started, stopped, and ranked by what is chosen.
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION, type Sweep } from "../../src/kernel/protocol";
import { ids } from "../../src/ui/testids";
import { HOSTILE } from "../helpers/injection";
import { settle } from "../helpers/kernel";
import { started, type Mounted } from "../helpers/mounted";

let { control, stream, el, find, all, end } = {} as Mounted;
beforeEach(async () => void ({ control, stream, el, find, all, end } = await started()));
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
  find(ids.tab("sweep"))!.click();
  await settle();
  find(ids.sweepStart)!.click();
  expect(control.of("start_sweep")).toMatchObject([{ sites: "**", kind: "", strength: null, at: "output" }]);
  stream.emit(swept({ running: true, rows: [], done: 0, total: 0 }));
  await settle();
  expect(find(ids.sweep)?.dataset["state"]).toBe("running");
  find(ids.sweepStop)!.click();
  expect(control.of("stop_sweep")).toHaveLength(1);
  stream.emit(swept({ stopped: true }));
  await settle();
  expect(find(ids.sweep)?.dataset["state"]).toBe("stopped");
  const ranked = (): unknown[] => all(ids.sweepRow).map((row) => [row.dataset["site"], row.dataset["value"]]);
  expect(ranked()).toEqual([["head", "-2"], ["blocks/1", "0"], [HOSTILE, ""]]);
  expect(all(ids.sweepRow).map((row) => row.lastElementChild!.textContent)).toEqual(["−2", "no change", HOSTILE]);
  [...find(ids.sweepMeasure)!.querySelectorAll("button")].find((b) => b.textContent === "output")!.click();
  await settle();
  expect(ranked()).toEqual([["blocks/1", "0.4"], ["head", "0.1"], [HOSTILE, ""]]);
  all(ids.sweepRow)[1].querySelector("button")!.click();
  await settle();
  expect(find(ids.selected)?.dataset["value"]).toBe("head");
  expect(el.querySelectorAll("img, script")).toHaveLength(0);
});
