// A run that is read from its file: how it is, what can be asked of it, and what is left out.
import { afterEach, beforeEach, expect, it } from "vitest";
import type { Recorded, State } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { progress, scale, state } from "../helpers/messages";
import { enterValue, openMenu, startView, type TestView } from "../helpers/view";

const recorded: Recorded = { run: "running", text: "run.nni: The run goes on.", missing: ["values", "units", "flow"], steers: false, every: 0 };
const idle = { ...progress, kind: "recorded", running: false, total: null, rate: null };

let { control, stream, el, find, end } = {} as TestView;
const open = async (more: Partial<State> = {}): Promise<void> => {
  ({ control, stream, el, find, end } = await startView({ recorded, cost: null, progress: { ...idle, running: true }, ...more }));
};
beforeEach(() => open());
afterEach(() => end());
const shows = async (more: Partial<Recorded>, running = false): Promise<void> => {
  stream.emit(state({ recorded: { ...recorded, ...more }, cost: null, progress: { ...idle, running } }));
  await settle();
};

it("says how the run is", async () => {
  for (const [run, words, running] of [
    ["running", "live", true],
    ["stalled", "stalled", true],
    ["ended", "finished", false],
    ["gone", "stopped", false],
  ] as const) {
    await shows({ run, text: `run.nni: ${run}.` }, running);
    expect(el.querySelector(".nni-status")?.textContent).toBe(words);
    expect(find("nni-banner")?.textContent).toContain(`run.nni: ${run}.`);
    expect(find("nni-banner")?.textContent).toContain(running ? "live" : "saved");
    expect(find("nni-progress")?.dataset["state"]).toBe(words === "live" ? "running" : words);
  }
});

it("leaves out what needs the model, and the cost of an inspection that there is none of", () => {
  for (const panel of recorded.missing) expect(find(`nni-tab-${panel}`)).toBeNull();
  expect(find("nni-tab-overview")).not.toBeNull();
  expect(["nni-group-Test", "nni-group-Units", "nni-group-Structure"].map((id) => find(id) !== null)).toEqual([true, false, true]);
  expect(find("nni-cost")).toBeNull();
  expect(find("nni-perturb")).toBeNull();
  expect(find("nni-banner")?.textContent).toContain("Controls that need the model are switched off.");
  expect(el.textContent).not.toContain("Nothing is perturbed");
});

it("asks a run that takes requests, and offers only what its programs have room for", async () => {
  await shows({ steers: true, every: 10 }, true);
  expect(find("nni-banner")?.textContent).not.toContain("switched off");
  const every = find("nni-every") as HTMLInputElement;
  expect(every.value).toBe("10");
  enterValue(every, "5");
  find("nni-measure-next")!.click();
  expect(control.of("set_every")).toMatchObject([{ every: 5 }]);
  expect(control.of("measure_next")).toHaveLength(1);
  await openMenu(find, "nni-perturb");
  const kinds = [...el.querySelectorAll(".nni-perturb-kind b")].map((one) => one.textContent);
  expect(kinds).toEqual(["Zero", "Scale"]);
  expect(find("nni-perturb-at")).toBeNull();
  find("nni-perturb-Zero")!.click();
  await settle();
  expect(control.of("perturb")).toMatchObject([{ site: "blocks/0", kind: "Zero", at: "output" }]);
});

it("shows a refused request in words", async () => {
  await shows({ steers: true, every: 10 }, true);
  find("nni-measure-next")!.click();
  control.emit({ type: "reply", id: control.of("measure_next")[0]!["id"], ok: false, error: "the run has not answered." });
  await settle();
  expect(el.textContent).toContain("Could not measure the next step: the run has not answered.");
});

it("switches the run's own perturbations, and none of one that is over", async () => {
  const perturbations = [scale(3, "head", 2)];
  stream.emit(state({ recorded: { ...recorded, steers: true, every: 2 }, cost: null, perturbations }));
  await settle();
  find("nni-switch")!.click();
  expect(control.of("adjust")).toMatchObject([{ perturbation: 3, enabled: false }]);
  stream.emit(state({ recorded: { ...recorded, run: "ended" }, cost: null, perturbations, progress: idle }));
  await settle();
  expect((find("nni-switch") as HTMLButtonElement).disabled).toBe(true);
});
