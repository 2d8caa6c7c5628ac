// The panel "Distributions": its cards, its table, and how far steps move the parameters.
import { afterEach, beforeEach, describe, expect, it } from "vitest";
import { decadeRange } from "../../src/distributions/UpdateRatio";
import { CLEAN, PARAMETER_QUANTITIES, QUANTITIES, ROW_STATS, SPARK, STATISTICS, VERSION, type Frame, type FrameParameter } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { cell, frame, layout, perturbation, SITES, state } from "../helpers/messages";
import { enterValue, startView, type TestView } from "../helpers/view";

let view: TestView;
beforeEach(async () => void (view = await startView()));
afterEach(() => view.end());

const COUNTS = [0, 0xf8, 7, 3, 0, 7, 5]; // 3 in bin 0x3f8, 5 in bin 0x400
const heads = (): (string | null)[] => [...view.find("nni-figures")!.querySelectorAll("thead th")].map((th) => th.textContent);
const rowsOf = (): (string | null)[] => [...view.find("nni-figures")!.querySelectorAll("tbody th")].map((th) => th.textContent);

/** A frame with parameters of the selected site, each with its value, and its gradient if `gradient`. */
function withParameters(seq: number, names: readonly string[], { gradient = true, size = 8, ratio = 0.001 as number | null } = {}): [Frame, DataView] {
  const [header, buffer] = frame(seq);
  const sparks = SITES.length * QUANTITIES.length * SPARK;
  const floats = SITES.length * (QUANTITIES.length * STATISTICS.length + ROW_STATS.length);
  const own = new Float64Array(names.length * PARAMETER_QUANTITIES.length * STATISTICS.length).fill(0);
  for (let i = 0; i < own.length; i += STATISTICS.length) own.set([size, 0.5, 2, 1, 4, 3], i);
  const each = gradient ? [COUNTS.length, COUNTS.length] : [COUNTS.length, -1];
  const parameters: FrameParameter[] = names.map((name) => ({ path: `blocks/0/${name}`, name, update_ratio: ratio, bytes: each }));
  const kept = new Uint8Array(buffer.buffer);
  const rows = new Float64Array(buffer.buffer, 0, floats).subarray(SITES.length * QUANTITIES.length * STATISTICS.length);
  rows[2 * ROW_STATS.length + ROW_STATS.indexOf("update_ratio")] = ratio ?? NaN; // of the selected site
  const pieces = [kept.slice(0, floats * 8), new Uint8Array(own.buffer), kept.slice(floats * 8, floats * 8 + sparks), Uint8Array.from(COUNTS)];
  for (const one of parameters) for (const bytes of one.bytes) if (bytes > 0) pieces.push(Uint8Array.from(COUNTS));
  const all = new Uint8Array(pieces.reduce((sum, one) => sum + one.length, 0));
  let at = 0;
  for (const one of pieces) all.set(one, (at += one.length) - one.length);
  return [{ ...header, parameters }, new DataView(all.buffer)];
}

describe("values that are not finite", () => {
  it("have a red column of their own and columns in the table, and nothing of either where there are none", async () => {
    expect(heads()).toEqual(["step 1", "values", "mean", "std", "min", "max", "norm", "zeros", "NaN", "+Inf", "−Inf"]); // each figure is 1
    view.stream.emit(...frame(2, { value: 8, edit: (table) => SITES.forEach((_, i) => QUANTITIES.forEach((__, q) => ["nan", "posinf", "neginf"].forEach((name) => (table[cell(i, q, name as "nan")] = 0)))) }));
    await settle();
    expect(heads()).toEqual(["step 2", "values", "mean", "std", "min", "max", "norm", "zeros"]);
    expect(view.el.querySelector(".nni-hist-bad")).toBeNull();
    view.stream.emit(...frame(3, { value: 0, edit: (table) => ((table[cell(2, 0, "size")] = 8), (table[cell(2, 0, "nan")] = 2), (table[cell(2, 1, "size")] = 4)) }));
    await settle();
    expect(heads().slice(-2)).toEqual(["zeros", "NaN"]);
    expect(view.find("nni-hist-count-output")!.textContent).toBe("25\u202f% NaN");
    expect(view.find("nni-hist-output")!.querySelector<HTMLElement>(".nni-hist-bad i")!.style.height).toContain("25%");
    expect(view.find("nni-hist-gradient")!.querySelector(".nni-hist-bad")).toBeNull();
  });
});

describe("an optimizer", () => {
  const sites = SITES.map((site, i) => (i === 2 ? { ...site, kind: "state", flops: null, source: "" } : site));
  const nothing = (table: Float64Array): unknown => STATISTICS.forEach((name) => (table[cell(2, 0, name)] = NaN));

  it("has arrays whose values are called its state, and no parameters and FLOPs", async () => {
    view.stream.emit(layout(sites.map((site, i) => (i === 2 ? { ...site, output: "float32[8]" } : site))));
    view.stream.emit(...frame(2));
    await settle();
    expect(rowsOf()).toEqual(["state"]);
    view.all("nni-row")[2]!.dispatchEvent(new PointerEvent("pointerenter"));
    await settle();
    expect(view.find("nni-tip")!.textContent).toContain("state 3 NaN/Inf mean 1");
    expect(view.find("nni-tip")!.textContent).not.toMatch(/activation|parameters|FLOPs/);
    const [header, buffer] = frame(3, { edit: nothing });
    view.stream.emit({ ...header, histograms: [] }, new DataView(buffer.buffer, 0, buffer.byteLength - COUNTS.length));
    await settle();
    expect(view.el.textContent).toContain("No state was measured here.");
  });

  it("has groups, which say that they have no values", async () => {
    view.stream.emit(layout(sites.map((site, i) => (i === 2 ? { ...site, output: "" } : site))));
    view.stream.emit(...frame(2, { edit: nothing }));
    await settle();
    expect(view.find("nni-figures")).toBeNull();
    expect(view.el.querySelector(".nni-site-facts")!.textContent).toBe("a part of the optimizer's state");
    expect(view.el.querySelector(".nni-notes")!.textContent).toContain("Open its row, and select an array of it");
  });
});

describe("the named figure", () => {
  it("is the one value where all are alike, and the bar under the keys while one is looked at", async () => {
    const named = (): string | null => view.find("nni-hist-count-output")!.textContent;
    view.stream.emit(...frame(2, { value: 0, edit: (table) => (table[cell(2, 0, "size")] = 8) }));
    await settle();
    expect(named()).toBe("all 0");
    const svg = view.find("nni-hist-output")!.querySelector("svg")!;
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true, cancelable: true }));
    await settle();
    expect(named()).toMatch(/: \d+ \(.*%\)$/);
  });
});

describe("parameters", () => {
  it("of a pass have a card for the value and one for the gradient, each in turn", async () => {
    view.stream.emit(...withParameters(2, ["bias", "kernel"]));
    await settle();
    expect([view.find("nni-hist-weight"), view.find("nni-hist-weight-gradient")].every(Boolean)).toBe(true);
    expect(rowsOf()).toEqual(["activations", "gradient", "bias", "bias gradient", "kernel", "kernel gradient"]);
    expect(view.all("nni-parameter").map((row) => row.dataset["site"])).toEqual(["blocks/0/bias", "blocks/0/kernel"]);
    const choice = view.find("nni-parameter-choice") as HTMLSelectElement;
    expect(choice.value).toBe("bias");
    enterValue(choice, "kernel");
    await settle();
    expect(view.find("nni-hist-weight-gradient")!.textContent).toContain("kernel gradient");
  });

  it("without a gradient have one card, and none where nothing was measured", async () => {
    view.stream.emit(...withParameters(2, ["kernel"], { gradient: false }));
    await settle();
    expect(view.find("nni-hist-weight")).not.toBeNull();
    expect(view.find("nni-hist-weight-gradient")).toBeNull();
    expect(view.find("nni-parameter-choice")).toBeNull(); // there is nothing to choose
    view.stream.emit(...frame(3));
    await settle();
    expect(view.find("nni-hist-weight")).toBeNull();
  });
});

describe("a step whose update was not seen", () => {
  const said = (): boolean => document.body.textContent.includes("No update was seen in this pass");

  it("says so where a gradient was measured, and nothing where the ratio is known or there was none to see", async () => {
    view.stream.emit(...withParameters(2, ["kernel"], { ratio: null }));
    await settle();
    expect(said()).toBe(true);
    view.stream.emit(...withParameters(3, ["kernel"]));
    await settle();
    expect(said()).toBe(false);
    view.stream.emit(...withParameters(4, ["kernel"], { ratio: null, gradient: false }));
    await settle();
    expect(said()).toBe(false);
  });
});

describe("update ÷ weight", () => {
  const updates = (parameters: string[], rows: number[][], inside = false): void => {
    const lost = parameters.map((_, i) => rows[0]!.map(() => i / 2));
    const data = Float64Array.from([...rows, ...lost].flat());
    view.stream.emit({ type: "updates", version: VERSION, layout: 1, site: 2, parameters, inside, steps: rows[0]!.length }, new DataView(data.buffer));
  };

  it("says the ratio of each parameter at the step on screen, 0 and unknown ones too", async () => {
    updates(["blocks/0/kernel", "blocks/0/bias"], [[0, 1], [0.5, 0.002], [NaN, 0]]);
    await settle();
    expect(view.find("nni-ratio")!.querySelector(".nni-card-figure")!.textContent!.trim()).toBe("usual: 3e−4 … 0.003");
    expect([...view.find("nni-ratio")!.querySelectorAll(".nni-key span")].map((one) => one.textContent!.trim())).toEqual(["kernel 0.002", "bias 0, 50 % of it lost in rounding"]);
    expect([...view.find("nni-ratio")!.querySelectorAll(".nni-key span")].map((one) => one.getAttribute("title"))).toEqual(["blocks/0/kernel", "blocks/0/bias"]);
  });

  it("is of the parameters inside where the module has none, by their paths from it", async () => {
    updates(["blocks/0/norm/scale", "blocks/0/kernel"], [[1], [0.02], [0.01]], true);
    await settle();
    expect(view.find("nni-ratio")!.querySelector("h4")!.textContent).toContain("update ÷ weight inside");
    expect([...view.find("nni-ratio")!.querySelectorAll(".nni-key span")].map((one) => one.textContent!.trim())).toEqual(["norm/scale 0.02", "kernel 0.01, 50 % of it lost in rounding"]);
  });

  it("is not there where no ratio is known", async () => {
    updates(["blocks/0/kernel"], [[0, 1], [NaN, NaN]]);
    await settle();
    expect(view.find("nni-ratio")).toBeNull();
  });

  it("has whole decades that hold the usual range and every ratio", () => {
    expect(decadeRange([])).toEqual([-4, -2]);
    expect(decadeRange([Float64Array.of(NaN, 0, Infinity, 1e-7)])).toEqual([-7, -2]);
    expect(decadeRange([Float64Array.of(2)])).toEqual([-4, 1]);
  });
});

describe("a perturbed pass", () => {
  const behind = (): Element | null => view.find("nni-behind-output");
  const key = (): string => view.el.querySelector(".nni-key")?.textContent ?? "";
  const perturbed = ([header, buffer]: [Frame, DataView]): [Frame, DataView] => [{ ...header, perturbed: true }, buffer];

  it("has the same pass without it behind its own, and the key stays while there is a perturbation", async () => {
    view.control.emit(state({ perturbations: [perturbation(1, "head")] }));
    view.stream.emit(...frame(2, { number: CLEAN - 2, step: 2, held: true, value: 8 }));
    view.stream.emit(...perturbed(frame(3, { number: 2, step: 2 })));
    await settle();
    expect(behind()).not.toBeNull();
    expect(key()).toBe("step 2, perturbedthe same pass unperturbed");
    expect(rowsOf()).toEqual(["activations", "unperturbed", "gradient", "unperturbed"]);
    view.stream.emit(...perturbed(frame(4, { number: 3, step: 3 }))); // of a loop: what came is of another pass
    await settle();
    expect(behind()).toBeNull();
    expect(key()).toContain("Only the last insp.run or insp.step has an unperturbed pass beside it.");
    view.stream.emit(...frame(5));
    await settle();
    expect(key()).toBe("step 5");
    view.control.emit(state({ seq: 2 }));
    await settle();
    expect(key()).toBe("");
  });

  it("is compared with the pinned pass where one is pinned", async () => {
    view.find("nni-pin")!.click();
    view.stream.emit(...frame(2, { number: CLEAN - 2, step: 2, held: true }));
    view.stream.emit(...perturbed(frame(3, { number: 2, step: 2 })));
    await settle();
    expect(key()).toBe("step 2, perturbed◇ step 1, pinned");
  });
});
