// The line of Python at the bottom, and that of a perturbation's row, are copied whole.
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { ids } from "../../src/ui/testids";
import { settle } from "../helpers/kernel";
import { perturbation, state } from "../helpers/messages";
import { started, type Mounted } from "../helpers/mounted";

let { stream, el, find, end } = {} as Mounted;
beforeEach(async () => void ({ stream, el, find, end } = await started()));
afterEach(() => end());

it("tells the Python of what was clicked last, and of a row", async () => {
  const write = vi.fn(() => Promise.resolve());
  vi.stubGlobal("navigator", { clipboard: { writeText: write } });
  const python = 'insp.perturb("head", nni.Zero())';
  stream.emit(state({ python: "insp.switch_all(True)", perturbations: [perturbation(1, "head", { python })] }));
  await settle();
  expect(find(ids.python)?.dataset["value"]).toBe("insp.switch_all(True)");
  el.querySelector<HTMLElement>(`.nni-footer [data-testid="${ids.copyPython}"]`)!.click();
  find(ids.expression)!.click();
  expect(write.mock.calls).toEqual([["insp.switch_all(True)"], [python]]);
  vi.unstubAllGlobals();
});
