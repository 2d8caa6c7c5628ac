// The panel "Words": what it asks for, what it shows, and that no word becomes an element.
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { VERSION } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { enterValue, press, startView, type TestView, openTab } from "../helpers/view";

let { control, stream, find, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, find, end } = await startView()));
afterEach(() => end());

const WORDS = ["<img src=x onerror=alert(1)>", " the", "\n"];

async function told(tokens = "tokens"): Promise<void> {
  const examples = [WORDS, ["a", "b", "c"]].map((words, i) => ({ words, label: i ? "cat" : "", prediction: i ? "<b>dog</b>" : "" }));
  stream.emit({ type: "inputs", version: VERSION, number: 1, kind: "run", other: "", example: 0, batch: 2, tokens, positions: 3, examples, problem: "", pictures: null, apart: [] });
  await settle();
}

async function answered(more: object, rows: number[][]): Promise<void> {
  const { id } = control.of("show_positions").at(-1)!;
  const header = { type: "positions", version: VERSION, id, site: "blocks/0", example: 0, unit: 0, axis: null, along: 1, axes: ["", "position", ""], units: 4, positions: 3, figures: ["norm", "unit"], source: "The example." };
  stream.emit({ ...header, ...more }, new DataView(new Float64Array(rows.flat()).buffer));
  control.emit({ type: "reply", id, ok: true, error: "" });
  await settle();
}

it("has a tab only if the tokens are known", async () => {
  expect(find("nni-tab-words")).toBeNull();
  await told("");
  expect(find("nni-tab-words")).toBeNull();
  await told();
  expect(find("nni-tab-words")).not.toBeNull();
});

it("colours the words of the chosen example by the chosen figure", async () => {
  await told();
  await openTab(find, "words");
  await settle();
  expect(control.of("show_positions")).toMatchObject([{ site: "blocks/0", example: 0, unit: 0 }]);
  const words = (): HTMLElement[] => [...find("nni-words")!.querySelectorAll<HTMLElement>(".nni-word")];
  expect(words().map((one) => one.style.background)).toEqual(["", "", ""]);
  await answered({}, [[1, 2, 4], [-1, 0, NaN]]);
  expect(words().map((one) => one.dataset["value"])).toEqual(WORDS);
  expect(words().map((one) => one.textContent)).toEqual(["<img·src=x·onerror=alert(1)>", "·the", "⏎"]);
  expect(words().every((one) => one.children.length === 0)).toBe(true);
  expect(new Set(words().map((one) => one.style.background)).size).toBe(3);

  const strip = find("nni-words")!;
  press(strip, "ArrowRight");
  await settle();
  press(strip, "ArrowRight");
  await settle();
  expect(find("nni-word-pointed")!.textContent).toBe("1 ·the norm 2 · unit 0 0");
  expect(words()[1]!.hasAttribute("data-pointed")).toBe(true);
  const point = (type: string, at: number): boolean => words()[at]!.dispatchEvent(new Event(type, { bubbles: true }));
  point("pointerover", 2); // as when the page moves under a pointer that rests
  await settle();
  expect(words()[1]!.hasAttribute("data-pointed")).toBe(true);
  point("pointermove", 2);
  await settle();
  expect(words()[2]!.hasAttribute("data-pointed")).toBe(true);

  find("nni-example-1")!.click();
  await settle();
  expect(control.of("show_positions").at(-1)).toMatchObject({ example: 1 });
  expect(find("nni-example-said")!.textContent).toBe(", label cat, predicted <b>dog</b>");
  await answered({ example: 0 }, [[9, 9, 9], [9, 9, 9]]);
  expect(find("nni-word-pointed")!.textContent, "an answer for another example is ignored").not.toContain("9");
  expect(find("nni-words-python")!.dataset["value"]).toBe('insp.words("blocks/0", 1)');
});

it("lets one choose the axis of the words where there are several, and says it in Python", async () => {
  await told();
  await openTab(find, "words");
  await settle();
  await answered({}, [[1, 2, 4], [-1, 0, 1]]);
  expect(find("nni-words-axis")).toBeNull();
  const axes = ["", "", "query", "key"];
  const choose = async (name: string): Promise<void> => {
    enterValue(find("nni-words-axis"), name);
    await settle();
  };
  find("nni-example-1")!.click();
  await settle();
  await answered({ example: 1, along: null, axes, positions: 0, figures: [], source: "No axis is known." }, []);
  expect(find("nni-words-problem")!.textContent).toBe("No axis is known.");
  expect(find("nni-words")!.querySelectorAll<HTMLElement>(".nni-word")[1]!.style.background).toBe("");
  await choose("key");
  expect(control.of("show_positions").at(-1)).toMatchObject({ example: 1, axis: 3 });
  await answered({ example: 1, axis: 3, along: 3, axes }, [[1, 2, 4], [-1, 0, 1]]);
  expect(find("nni-words-problem")).toBeNull();
  expect(find("nni-words-axis")!.dataset["value"]).toBe("key");
  expect(find("nni-words-python")!.dataset["value"]).toBe('insp.words("blocks/0", 1, axis=3)');
  await choose("query");
  const { id } = control.of("show_positions").at(-1)!;
  control.emit({ type: "reply", id, ok: false, error: "The batch is another." });
  await settle();
  expect(control.of("show_positions").at(-1), "the one that is found").toMatchObject({ axis: null });
});

it("says beside the examples what could not be read of the batch, and without them too", async () => {
  const inputs = { type: "inputs", version: VERSION, number: 1, kind: "run", other: "", example: 0, batch: 2, tokens: "", positions: 0, examples: [], problem: "decode raised.", pictures: null, apart: [] };
  await openTab(find, "values");
  for (const examples of [[], [{ words: ["1"], label: "", prediction: "" }]]) {
    stream.emit({ ...inputs, examples });
    await settle();
    expect(find("nni-inputs-problem")!.textContent).toBe("decode raised.");
    expect(find("nni-examples")!.querySelector("[role=radiogroup]") !== null).toBe(examples.length > 0);
  }
});

it("shows the words without colours where the site has no positions", async () => {
  await told();
  await openTab(find, "words");
  await settle();
  const { id } = control.of("show_positions").at(-1)!;
  control.emit({ type: "reply", id, ok: false, error: "'blocks/0' has no axis of positions." });
  await settle();
  expect(find("nni-words-problem")!.textContent).toBe("'blocks/0' has no axis of positions.");
  expect(find("nni-words")!.querySelectorAll(".nni-word")).toHaveLength(3);
});

it("adds to a long text by itself, and at once what one goes to", async () => {
  const words = Array.from({ length: 2000 }, (_, i) => `w${i}`);
  stream.emit({ type: "inputs", version: VERSION, number: 1, kind: "run", other: "", example: 0, batch: 1, tokens: "x", positions: 2000, examples: [{ words, label: "", prediction: "" }], problem: "", pictures: null, apart: [] });
  await settle();
  await openTab(find, "words");
  await settle();
  press(find("nni-words")!, "End");
  await settle();
  expect(find("nni-word-pointed")!.textContent).toContain("w1999");
  expect(find("nni-words")!.querySelectorAll(".nni-word")).toHaveLength(2000);
  await openTab(find, "overview");
  await settle();
  await openTab(find, "words");
  await vi.waitFor(() => expect(find("nni-words")!.querySelectorAll(".nni-word")).toHaveLength(2000), { timeout: 30_000 });
}, 60_000);
