// The panels "Examples" and "Attribution": what they ask for, stop and show, over a mock comm.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { enterValue, press, startView, type TestView, openTab } from "../helpers/view";

let view: TestView;
beforeEach(async () => void (view = await startView()));
afterEach(() => view.end());

const golden = (name: string, more: object): object => ({
  ...(JSON.parse(readFileSync(join(__dirname, "..", "golden", `${name}.json`), "utf8")) as object),
  ...more,
});

async function told(...messages: object[]): Promise<void> {
  for (const message of messages) view.stream.emit(message);
  await settle();
}

async function open(panel: string): Promise<void> {
  await openTab(view.find, panel);
  await settle();
}

const text = (): string => view.el.textContent ?? "";

it("searches for examples until it is stopped, and keeps what was found", async () => {
  await open("examples");
  view.find("nni-study-start")!.click();
  await settle();
  expect(view.control.of("study")).toMatchObject([{ what: "examples", again: true, site: "blocks/0", unit: 0 }]);
  await told(golden("examples", { running: true, done: 3, total: 12, rows: [] }));
  expect(view.find("nni-study")!.textContent).toBe("3 of 12 batches");
  expect(view.find("nni-study-start")).toBeNull();
  view.find("nni-study-stop")!.click();
  await settle();
  expect(view.control.of("stop_study")).toHaveLength(1);
  await told(golden("examples", { stopped: true }));
  expect(text()).toContain("The search was stopped.");
  expect(view.all("nni-excited")).toHaveLength(1);
});

it("says of a unit that never fires that its examples mean nothing", async () => {
  await open("examples");
  const row = { which: "most", rank: 1, example: 0, value: 0, place: [], words: [], at: -1 };
  await told(golden("examples", { constant: true, rows: [row] }));
  expect(view.find("nni-examples-constant")!.textContent).toBe(
    "This unit has one value, 0, for every example, so it means nothing which ones are listed.",
  );
  await told(golden("examples", { rows: [], nan: 40 }));
  expect(text()).toContain("40 have a NaN, which is left out.");
  expect(text()).toContain("No example has a number for this unit.");
});

it("keeps what was found if the next study fails, and says why it failed", async () => {
  await open("attribution");
  await told(golden("attribution", {}));
  expect(text()).toContain("The scores add up to 1.250; the output differs from the baseline's by 1.250.");
  await told(golden("attribution", { error: "The model has no logits.", scores: [], shape: [0] }));
  expect(view.find("nni-study-problem")!.textContent).toBe("The model has no logits.");
  expect(view.find("nni-attribution")!.dataset["value"]).toBe("2");
});

it("says where one clicked, and only there, that another study runs, until it ends", async () => {
  const busy = "Another study of the model is running. Wait for it, or stop it in its panel.";
  await told(golden("lens", {}));
  const places = { sweep: "nni-study-start", examples: "nni-study-start", attribution: "nni-study-start", lens: "nni-study-start", logits: "nni-lens-cell" };
  for (const [what, button] of Object.entries(places)) {
    const running = what === "examples" ? "attribution" : "examples";
    await told(golden(running, { running: true }));
    await open(what === "logits" ? "lens" : what);
    view.find(button)!.click();
    await settle();
    const { id } = view.control.of(what === "sweep" ? "start_sweep" : "study").at(-1)!;
    view.control.emit({ type: "reply", id, ok: false, error: busy });
    await settle();
    expect(view.all("nni-study-problem").map((one) => one.textContent)).toEqual([busy]);
    await open(what === "sweep" ? "examples" : "sweep");
    expect(view.find("nni-study-problem")).toBeNull();
    await open(what === "logits" ? "lens" : what);
    await told(golden(running, {}));
    expect(view.find("nni-study-problem")).toBeNull();
  }
}, 20_000);

it("lays the scores of pixels over the picture, and those of nothing else", async () => {
  const pictures = { path: "0", count: 1, rows: 4, columns: 4, height: 4, width: 4, channels: 1, shown: "grey", pixels: btoa("\0".repeat(16)) };
  const inputs = { type: "inputs", version: VERSION, number: 5, kind: "run", other: "", example: 0, batch: 2, tokens: "", positions: 0, examples: [], problem: "", pictures, apart: [] };
  const pixels = (example: number, side: number, blocks: number): object =>
    golden("attribution", { batch: 5, example, blocks, of: "", words: [], shape: [side, side], scores: new Array(side * side).fill(0.5) });
  await open("attribution");
  await told(inputs, pixels(0, 4, 1));
  expect(view.find("nni-values-share")).toMatchObject({ value: "0.4" });
  expect(view.find("nni-values-thumbnail")).not.toBeNull();
  await told(pixels(0, 2, 2)); // sums of blocks of the same picture
  expect(view.find("nni-values-share")).not.toBeNull();
  for (const other of [pixels(0, 3, 1), pixels(1, 4, 1)]) {
    await told(other); // an array of another size, an example without a thumbnail
    expect(view.find("nni-values-share")).toBeNull();
    expect(view.find("nni-attribution")).not.toBeNull();
  }
});

it("shows the pictures that came with the examples of other data, in their order", async () => {
  const pictures = { path: "0", count: 2, rows: 4, columns: 4, height: 4, width: 4, channels: 1, shown: "grey", pixels: btoa("\0".repeat(32)) };
  const [row] = (golden("examples", {}) as { rows: object[] }).rows;
  const rows = [{ ...row, example: 700 }, { ...row, which: "least", example: 900 }, { ...row, which: "random", example: 3 }];
  await open("examples");
  await told(golden("examples", { batch: -1, rows, pictures }));
  expect(view.all("nni-excited").map((one) => one.querySelectorAll("canvas").length)).toEqual([1, 1, 0]);
});

it("names the batch, and shows no picture of another one", async () => {
  const pictures = { path: "0", count: 2, rows: 4, columns: 4, height: 4, width: 4, channels: 1, shown: "grey", pixels: btoa("\0".repeat(32)) };
  const inputs = { type: "inputs", version: VERSION, number: 5, kind: "run", other: "", example: 0, batch: 2, tokens: "", positions: 0, examples: [], problem: "", pictures, apart: [] };
  const found = golden("attribution", { batch: 5, example: 0, blocks: 1, of: "", words: [], shape: [4, 4], scores: new Array(16).fill(0.5) });
  await open("attribution");
  await told(inputs, found);
  expect(text()).toContain("the example's batch of 2 · example 0");
  expect(view.find("nni-values-thumbnail")).not.toBeNull();
  expect(text()).not.toContain("Another batch");
  await told({ ...inputs, number: 7 });
  expect(view.find("nni-values-thumbnail")).toBeNull();
  expect(text()).toContain("Another batch has been run since: press Compute.");
  view.find("nni-example-1")!.click(); // not the same example of the batch that was studied
  await settle();
  expect(view.control.of("study")).toEqual([]);
  await told({ ...found, batch: 7 });
  expect(view.find("nni-values-thumbnail")).not.toBeNull();
});

it("draws what pixels count as a picture of its own, with a crosshair and a key to its colours", async () => {
  const scores = Array.from({ length: 9 }, (_, i) => (i === 7 ? null : i - 2));
  await open("attribution");
  await told(golden("attribution", { blocks: 2, words: [], shape: [3, 3], scores }));
  expect(["nni-legend-low", "nni-legend-high"].map((id) => view.find(id)!.dataset["value"])).toEqual(["-6", "6"]);
  const at = (): HTMLElement => view.find("nni-attribution-pointed")!;
  expect(at().textContent).toBe("Point at a pixel for its score");
  const go = async (key: string): Promise<void> => {
    press(view.find("nni-picture")!, key);
    await settle();
  };
  for (const key of ["ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"]) await go(key); // the first shows the crosshair
  expect(at().textContent).toBe("row 2, column 4, the sum of 2 × 2 pixels: 3");
  expect(at().dataset["value"]).toBe("3");
  await told(golden("attribution", { blocks: 2, words: [], shape: [3, 3], scores: scores.map((one) => one && 2 * one) }));
  expect(at().dataset["value"]).toBe("6"); // the same pixel of the next one
  await go("ArrowDown");
  await go("ArrowLeft");
  expect(at().dataset["value"]).toBe("NaN");
  expect(view.el.querySelector(".nni-legend-bad:not(.nni-hidden)")).not.toBeNull();
  await go("Escape");
  expect(at().dataset["value"]).toBe("");
  await told(golden("attribution", { words: [], shape: [2, 2], scores: [1, 2, 3, 4] }));
  for (const key of ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"]) await go(key);
  expect(at().textContent).toBe("row 0, column 1: 2"); // it ends at the edge
});

it("chooses by number an example that no row shows, and asks for it", async () => {
  const inputs = { type: "inputs", version: VERSION, number: 5, kind: "run", other: "", example: 0, batch: 40, tokens: "", positions: 0, examples: [], problem: "", pictures: null, apart: [] };
  await open("attribution");
  await told(inputs, golden("attribution", { batch: 5, example: 0 }));
  const field = view.find("nni-study-example") as HTMLInputElement;
  expect(field.closest("p")!.textContent).toBe("the example's batch of 40 · example ");
  const type = async (text: string): Promise<void> => {
    enterValue(field, text, "input");
    await settle();
  };
  await type("17");
  expect(view.control.of("study")).toMatchObject([{ what: "attribution", again: false, example: 17 }]);
  await told(golden("attribution", { batch: 5, example: 17 }));
  await type("99");
  expect(view.control.of("study").at(-1)).toMatchObject({ example: 39 });
  await type("");
  expect(view.control.of("study")).toHaveLength(2);
  const row = { label: "", prediction: "", words: [] };
  await told({ ...inputs, batch: 2, examples: [row, row] });
  expect(view.find("nni-study-example")).toBeNull(); // the row above shows all
});

it("sets whole words apart, and leaves letters and parts of words together", async () => {
  await open("examples");
  const row = { which: "most", rank: 1, example: 0, value: 1, place: [1], at: 1 };
  const apart = async (words: string[]): Promise<boolean> => {
    await told(golden("examples", { rows: [{ ...row, words }] }));
    return view.el.querySelector(".nni-excited-text")!.hasAttribute("data-apart");
  };
  expect(await apart(["the", "cat"])).toBe(true);
  expect(await apart(["the", " cat"])).toBe(false);
  expect(await apart(["t", "h"])).toBe(false);
  expect(await apart(["1", "4"])).toBe(true); // ids, which are not 14
});
