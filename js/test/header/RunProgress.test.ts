// The header: where a run is, said once.
import { afterEach, beforeEach, expect, it } from "vitest";
import { settle } from "../helpers/kernel";
import { progress, state } from "../helpers/messages";
import { openMenu, startView, type TestView } from "../helpers/view";

let { control, stream, el, find, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, el, find, end } = await startView()));
afterEach(() => end());
const text = (): string => el.querySelector(".nni-run-progress")!.textContent!;

it("says how a loop is, and the step on screen", async () => {
  expect(find("nni-step")?.textContent).toBe("step 1");
  expect(text()).toBe("livestep 11 of 10 done");
  expect(el.querySelector("[role=progressbar]")?.getAttribute("aria-valuetext")).toBe("1 of 10");
  stream.emit(state({ progress: { ...progress, running: false, step: 10 } }));
  await settle();
  expect(text()).toBe("finishedstep 110 of 10 done");
  stream.emit(state({ progress: { ...progress, running: false, step: 4, total: null } }));
  await settle();
  expect(text()).toBe("finishedstep 14 done");
});

it("says that a pass is held, and where the run is meanwhile", async () => {
  find("nni-pause")!.click();
  await settle();
  stream.emit(state({ progress: { ...progress, step: 7 } }));
  await settle();
  expect(text()).toBe("heldstep 1run is at 7");
  find("nni-pause")!.click();
  await settle();
  expect(text()).toContain("live");
});

it("says the step of a single pass, and idle", async () => {
  stream.emit(state({ progress: { kind: "step", running: false, step: 1, total: null, rate: null } }));
  await settle();
  expect(text()).toBe("idlestep 1");
  expect(el.querySelector("[role=progressbar]")).toBeNull();
  expect(find("nni-progress")?.dataset).toMatchObject({ value: "1", state: "idle" });
});

it("names what takes a while, with the time so far, in place of live", async () => {
  const waiting = [{ what: "compiling the measured step", seconds: 8.2 }];
  stream.emit(state({ waiting }));
  await settle();
  expect(text()).toContain("compiling the measured step, 8\u00a0s");
  expect(text()).not.toContain("live");
  expect(find("nni-waiting")?.dataset["value"]).toBe("compiling the measured step");
  expect(el.querySelector(".nni-status [aria-hidden]")?.textContent).toBe(", 8\u00a0s");
  stream.emit(state({}));
  await settle();
  expect(text()).toContain("live");
});

it("has the speed and the cost in its menu", async () => {
  stream.emit(state({ cost: { ...state().cost!, compilations: 3, plain_seconds: 0.1, inspected_seconds: 0.15, frames_dropped: 2 } }));
  await settle();
  expect(find("nni-cost")).toBeNull();
  await openMenu(find, "nni-menu");
  expect(el.querySelector("header .nni-menu-list")?.textContent).toContain("2 steps/s");
  expect(find("nni-compilations")?.dataset["value"]).toBe("3");
  expect(find("nni-cost")?.textContent).toContain("measured step1.50×");
});

it("says in its menu what writing to a tracker costs, if there is one", async () => {
  stream.emit(state({ cost: { ...state().cost!, tracker_seconds: null } }));
  await settle();
  await openMenu(find, "nni-menu");
  expect(find("nni-cost")?.textContent).not.toContain("tracker");
  stream.emit(state({ cost: { ...state().cost!, tracker_seconds: 0.25 } }));
  await settle();
  expect(find("nni-cost")?.textContent).toMatch(/tracker250\sms/);
});

it("opens the view beside the notebook, and says how to where that is not possible", async () => {
  find("nni-open-beside")!.click();
  await settle();
  const [asked] = control.of("open_beside");
  control.emit({ type: "reply", id: asked!["id"], ok: false, error: "Two steps dock this view." });
  await settle();
  expect([find("nni-notice")?.dataset["level"], find("nni-notice")?.textContent]).toEqual(["info", "NoteTwo steps dock this view.×"]);
});
