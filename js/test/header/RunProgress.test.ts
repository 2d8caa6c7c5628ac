// The header: where a run is, said once.
import { afterEach, beforeEach, expect, it } from "vitest";
import { ids } from "../../src/ui/testids";
import { settle } from "../helpers/kernel";
import { progress, state } from "../helpers/messages";
import { started, type Mounted } from "../helpers/mounted";

let { stream, el, find, end } = {} as Mounted;
beforeEach(async () => void ({ stream, el, find, end } = await started()));
afterEach(() => end());
const text = (): string => el.querySelector(".nni-run")!.textContent!;

it("says where a loop is once", async () => {
  expect(find(ids.step)?.textContent).toBe("1 of 10");
  expect(text()).not.toContain("step 1");
  expect(text()).toContain("running2 steps/s");
  expect(el.querySelector("[role=progressbar]")?.getAttribute("aria-valuetext")).toBe("1 of 10");
  stream.emit(state({ progress: { ...progress, running: false, step: 10 } }));
  await settle();
  expect(text()).toContain("10 of 10finished");
  stream.emit(state({ progress: { ...progress, running: false, step: 4, total: null } }));
  await settle();
  expect(text()).toContain("4 stepsfinished");
  find(ids.pause)!.click();
  await settle();
  expect(find(ids.timeStep)?.textContent).toBe("heldstep 1");
});

it("says the step of a single pass, and idle", async () => {
  stream.emit(state({ progress: { kind: "step", running: false, step: 1, total: null, rate: null } }));
  await settle();
  expect(text()).toContain("step 1idle");
  expect(text()).not.toContain("steps");
  expect(el.querySelector("[role=progressbar]")).toBeNull();
  expect(find(ids.progress)?.dataset).toMatchObject({ value: "1", state: "idle" });
});

it("names what takes a while, with the time so far, in place of running", async () => {
  const waiting = [{ what: "compiling the measured step", seconds: 8.2 }];
  stream.emit(state({ waiting }));
  await settle();
  expect(text()).toContain("compiling the measured step, 8\u00a0s");
  expect(text()).not.toContain("running");
  expect(find(ids.waiting)?.dataset["value"]).toBe("compiling the measured step");
  expect(el.querySelector(".nni-status [aria-hidden]")?.textContent).toBe(", 8\u00a0s");
  stream.emit(state({}));
  await settle();
  expect(text()).toContain("running2 steps/s");
});
