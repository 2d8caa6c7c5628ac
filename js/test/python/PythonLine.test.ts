// The line of Python at the bottom, and that of a perturbation's row, are copied whole.
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { VERSION } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { perturbation, state } from "../helpers/messages";
import { openTab, startView, type TestView } from "../helpers/view";

let { stream, el, find, end } = {} as TestView;
beforeEach(async () => void ({ stream, el, find, end } = await startView()));
afterEach(() => end());

it("tells the Python of the open panel after a click on an example, until the next click", async () => {
  const examples = [["a", "b"], ["c", "d"]].map((words) => ({ words, label: "", prediction: "" }));
  stream.emit({ type: "inputs", version: VERSION, number: 1, kind: "run", other: "", example: 0, batch: 2, tokens: "tokens", positions: 2, examples, problem: "", pictures: null, apart: [] });
  stream.emit(state({ python: "insp.switch_all(True)" }));
  await settle();
  const clicked = async (id: string): Promise<string | undefined> => {
    find(id)!.click();
    await settle();
    return find("nni-python")?.dataset["value"];
  };
  const python = (): string | undefined => find("nni-python")?.dataset["value"];
  await openTab(find, "words");
  expect(python()).toBe("insp.switch_all(True)");
  expect(await clicked("nni-example-1")).toBe('insp.words("blocks/0", 1)');
  await openTab(find, "attribution");
  expect(python()).toContain('.query("example == 1")');
  await openTab(find, "overview");
  expect(python()).toBe("insp.switch_all(True)");
  await openTab(find, "words");
  expect(python()).toBe('insp.words("blocks/0", 1)');
  stream.emit(state({ python: "insp.switch_all(False)" }));
  await settle();
  expect(find("nni-python")?.dataset["value"]).toBe("insp.switch_all(False)");
});

it("tells the Python of what was clicked last, and of a row", async () => {
  const write = vi.fn(() => Promise.resolve());
  vi.stubGlobal("navigator", { clipboard: { writeText: write } });
  const python = 'insp.perturb("head", nni.Zero())';
  stream.emit(state({ python: "insp.switch_all(True)", perturbations: [perturbation(1, "head", { python })] }));
  await settle();
  expect(find("nni-python")?.dataset["value"]).toBe("insp.switch_all(True)");
  el.querySelector<HTMLElement>(`.nni-footer [data-testid="nni-copy-python"]`)!.click();
  find("nni-expression")!.click();
  expect(write.mock.calls).toEqual([["insp.switch_all(True)"], [python]]);
  vi.unstubAllGlobals();
});
