// The panel "Values": which view suits, what is asked for, what is read from cells, and its keys.
import { beforeEach, describe, expect, it, vi } from "vitest";
import type { KernelRequest } from "../../src/kernel/bridge";
import type { Arrays, HeldArray, Values } from "../../src/kernel/protocol";
import { VERSION } from "../../src/kernel/protocol";
import { cellAt, decodeValues, largestRows, isBad, colourRange, type Cells } from "../../src/values/cells";
import { colours, shade } from "../../src/charts/colour";
import { blockFor, covers, moveSpan, possibleViews, readRequest, viewAxes, sliderAxes, defaultView, wholeBox, withAxis, zoomSpan } from "../../src/values/layout";
import { topKeys } from "../../src/attention/TopKeys";
import { elementAt, gridHeight, paintWords, layOutTiles } from "../../src/values/painting";
import { ValuesState } from "../../src/values/state";
import { blockText, exactAt, valuesExpression, runExpression, extentText, indexText, shortest } from "../../src/values/text";
import { settle } from "../helpers/kernel";
import { enterValue, startView, openTab } from "../helpers/view";

function held(shape: number[], axes: string[], more: Partial<HeldArray> = {}): HeldArray {
  const bytes = shape.reduce((a, b) => a * b, 4);
  return { number: 1, call: 0, name: "", shape, dtype: "float32", axes, bytes, ...more };
}

const MATRIX = held([8, 6], ["batch", "feature"]);
const IMAGES = held([4, 32, 30, 100], ["batch", "height", "width", "channel"]);
const TOKENS = held([2, 5, 7], ["batch", "position", "feature"]);

function arrays(list: HeldArray[], more: Partial<Arrays> = {}): Arrays {
  return {
    type: "arrays", version: VERSION, request: 1, site: "blocks/0", part: "output", clean: false, parts: ["output", "input"],
    arrays: list, perturbed: false, source: "The example.", notes: [], ...more,
  }; // prettier-ignore
}

function header(more: Partial<Values> = {}): Values {
  return {
    type: "values", version: VERSION, request: 2, array: 1, index: [0, 0], axes: [-1, 0, 1], norm_over: -1, component: "value",
    exact: false, starts: [0, 0, 0], ends: [1, 2, 3], block: [1, 1, 1], counts: [1, 2, 3], planes: ["value"], encoding: "float32", ...more,
  }; // prettier-ignore
}

function float32(...planes: number[][]): DataView {
  const step = Math.ceil((planes[0]!.length * 4) / 8) * 8;
  const bytes = new Uint8Array(3 + step * planes.length);
  planes.forEach((plane, i) => bytes.set(new Uint8Array(new Float32Array(plane).buffer), 3 + i * step));
  return new DataView(bytes.buffer, 3); // at an odd offset, as a message's buffer may lie
}

const cells = (more: Partial<Values>, ...planes: number[][]): Cells => decodeValues(header(more), float32(...planes)) as Cells;

describe("a view", () => {
  it("is the one that suits the names of the axes", () => {
    expect([MATRIX, IMAGES, TOKENS].map(defaultView)).toEqual(["heatmap", "images", "tokens"]);
    expect(defaultView(held([2, 3, 5, 5], ["batch", "head", "query", "key"]))).toBe("attention");
    expect(defaultView(held([3, 3, 1, 8], ["kernel height", "kernel width", "in channel", "out channel"]))).toBe("images");
    expect(defaultView(held([9], ["feature"]))).toBe("line");
    expect(defaultView(held([], []))).toBe("line");
    expect(possibleViews(held([9], ["feature"]))).toEqual(["line"]);
  });

  it("is offered for what can be one", () => {
    expect(possibleViews(IMAGES)).toEqual(["heatmap", "images", "tokens", "line"]);
    expect(possibleViews(TOKENS)).toEqual(["heatmap", "tokens", "line"]);
    expect(possibleViews(held([2, 3, 5, 5], ["batch", "head", "query", "key"]))).toEqual(["heatmap", "attention", "line"]);
    expect(possibleViews(held([3, 5, 5], ["axis 0", "axis 1", "axis 2"]))).toEqual(["heatmap", "images", "attention", "tokens", "line"]);
    expect(possibleViews(held([3, 5, 4], ["axis 0", "axis 1", "axis 2"]))).not.toContain("attention");
  });

  it("shows each axis once and leaves the others to sliders", () => {
    expect(viewAxes(IMAGES, "images")).toEqual({ view: "images", tiles: 3, rows: 1, columns: 2, over: -1 });
    expect(sliderAxes(IMAGES, viewAxes(IMAGES, "images"))).toEqual([0]);
    expect(viewAxes(TOKENS, "tokens")).toEqual({ view: "tokens", tiles: -1, rows: 0, columns: 1, over: 2 });
    expect(withAxis(viewAxes(IMAGES, "images"), "rows", 2)).toEqual({ view: "images", tiles: 3, rows: 2, columns: 1, over: -1 });
    for (const array of [MATRIX, IMAGES, TOKENS]) {
      for (const view of possibleViews(array)) {
        const s = viewAxes(array, view);
        const used = [s.tiles, s.rows, s.columns, s.over].filter((a) => a >= 0);
        expect(new Set(used).size).toBe(used.length);
        expect(sliderAxes(array, s).length + used.length).toBe(array.shape.length);
      }
    }
  });

  it("asks for whole elements, and for norms with the axes that are left", () => {
    const shown = viewAxes(TOKENS, "tokens");
    expect(readRequest(TOKENS, shown, [1, 2, 3], wholeBox(TOKENS, shown), [64, 64, 64], "value")).toMatchObject({
      array: 1, index: [1, 2], axes: [-1, 0, 1], starts: [0, 0, 0], ends: [1, 2, 5], norm_over: 2,
    }); // prettier-ignore
    const s = viewAxes(MATRIX, "heatmap");
    expect(readRequest(MATRIX, s, [0, 0], { tiles: [0, 1], rows: [1.2, 3.4], columns: [0, 6] }, [1, 9, 9], "value")).toMatchObject({ starts: [0, 1, 0], ends: [1, 4, 6] });
    expect(wholeBox(IMAGES, viewAxes(IMAGES, "images")).tiles).toEqual([0, 64]);
  });

  it("zooms about a point and never beyond the array", () => {
    expect(zoomSpan([0, 100], 100, 50, 0.5)).toEqual([25, 75]);
    expect(zoomSpan([0, 100], 100, 0.5, 0.5)[0]).toBe(0.25);
    expect(zoomSpan([25, 75], 100, 50, 4)).toEqual([0, 100]);
    expect(zoomSpan([10, 14], 100, 12, 0.1)).toEqual([10, 14]);
    expect(moveSpan([90, 95], 50, 100)).toEqual([95, 100]);
    expect(blockFor([0, 1000], 256)).toBe(4);
    expect(blockFor([3, 259], 256)).toBe(1);
  });

  it("asks again only where what it has is not enough", () => {
    const s = viewAxes(MATRIX, "heatmap");
    const wish = readRequest(MATRIX, s, [0, 0], wholeBox(MATRIX, s), [64, 4, 64], "value");
    const has = header({ ends: [1, 8, 6], block: [1, 2, 1], counts: [1, 4, 6] });
    expect(covers(has, wish)).toBe(true);
    expect(covers(has, { ...wish, index: [5, 5] })).toBe(true); // both axes are shown
    expect(covers(has, { ...wish, most: [64, 64, 64] })).toBe(false);
    expect(covers(has, { ...wish, array: 2 })).toBe(false);
    expect(covers({ ...has, ends: [1, 6, 6] }, wish)).toBe(false);
    expect(covers({ ...has, exact: true }, wish)).toBe(false);
  });
});

describe("cells", () => {
  it("are read at any offset, padded planes and all", () => {
    const c = cells({ planes: ["mean", "low", "high"], block: [1, 4, 2], counts: [1, 1, 3], ends: [1, 4, 5] }, [1, 2, 3], [0, -1, 2], [4, 5, 6]);
    expect([...c.mean, ...c.low!, ...c.high!]).toEqual([1, 2, 3, 0, -1, 2, 4, 5, 6]);
    expect(cellAt(c, 0, 3, 4)).toBe(2);
    expect(cellAt(c, 0, 4, 0)).toBe(-1);
    expect(() => decodeValues(header(), float32([1, 2]))).toThrow("The buffer of values has 8 bytes, 24 were expected.");
    expect(() => decodeValues(header({ planes: ["low"] }), float32([1, 2, 3, 4, 5, 6]))).toThrow('no plane "value"');
  });

  it("with anything that is not finite are told apart", () => {
    const planes = ["mean", "low", "high", "nan", "posinf", "neginf"];
    const c = cells({ planes, counts: [1, 1, 2], block: [1, 2, 2] }, [1, 2], [1, 2], [1, 2], [0, 3], [0, 0], [0, 0]);
    expect([isBad(c, 0), isBad(c, 1)]).toEqual([false, true]);
    expect(blockText(c, { tile: 0, row: 0, column: 3 })).toBe("block of 2 × 2: mean 2, from 2 to 2, 3 NaN");
    const whole = cells({ counts: [1, 1, 3] }, [1, NaN, Infinity]);
    expect([0, 1, 2].map((i) => isBad(whole, i))).toEqual([false, true, true]);
  });

  it("have a range about zero, or from low to high, with or without the rare ones", () => {
    const many = Array.from({ length: 201 }, (_, i) => (i === 200 ? 1000 : i / 200));
    const c = cells({ counts: [1, 1, 201], ends: [1, 1, 201] }, many);
    expect(colourRange(c, true).high).toBeCloseTo(0.99);
    expect(colourRange(c, false)).toEqual({ low: 0, high: 1000, signed: false });
    expect(colourRange(cells({ counts: [1, 1, 2] }, [-3, 1]), false)).toEqual({ low: -3, high: 3, signed: true });
    expect(colourRange(cells({ counts: [1, 1, 2] }, [NaN, NaN]), true)).toEqual({ low: 0, high: 1, signed: false });
    const flat = colourRange(cells({ counts: [1, 1, 2] }, [2, 2]), true);
    expect(flat.high).toBeGreaterThan(flat.low);
  });

  it("say which rows have the greatest norm, if each is one finite value", () => {
    const of = { counts: [1, 4, 2], ends: [1, 4, 2] };
    expect(largestRows(cells(of, [1, -1, 0, 3, 0, 0, -2, 2]), 3)).toEqual([1, 3, 0]);
    expect(largestRows(cells(of, [1, -1, 0, 3, 0, 0, -2, 2]), 2)).toEqual([1, 3]);
    expect(largestRows(cells(of, [1, NaN, 0, 3, 0, 0, -2, 2]), 3)).toEqual([]);
    expect(largestRows(cells({ ...of, block: [1, 1, 2] }, [1, -1, 0, 3, 0, 0, -2, 2]), 3)).toEqual([]);
  });

  it("that are exact keep all digits of wide integers and both parts of complex numbers", () => {
    const wide = new BigInt64Array([9223372036854775807n]);
    const read = (more: Partial<Values>, buffer: ArrayBuffer): unknown => decodeValues(header({ exact: true, counts: [1, 1, 1], ...more }), new DataView(buffer));
    expect(read({ encoding: "int64" }, wide.buffer as ArrayBuffer)).toEqual(["9223372036854775807"]);
    expect(read({ encoding: "float64", planes: ["real", "imag"] }, new Float64Array([0.1, -2]).buffer as ArrayBuffer)).toEqual(["0.1 -2"]);
  });
});

describe("colours", () => {
  it("get steadily darker (lighter at night) away from zero, alike on both sides", () => {
    for (const dark of [false, true]) {
      const table = colours({ low: -1, high: 1, signed: true }, dark);
      const light = Array.from({ length: 256 }, (_, i) => 0.2126 * table[i * 3]! + 0.7152 * table[i * 3 + 1]! + 0.0722 * table[i * 3 + 2]!);
      for (let i = 1; i < 256; i++) expect((light[i]! - light[i - 1]!) * (i < 128 ? 1 : -1) * (dark ? -1 : 1)).toBeGreaterThan(-2.5);
    }
    expect([-2, -1, 0, 1, NaN].map((v) => shade(v, { low: -1, high: 1, signed: true })).slice(0, 4)).toEqual([0, 0, 128, 255]);
  });
});

describe("places", () => {
  it("of several pictures do not overlap, and lead back to their elements", () => {
    const shown = viewAxes(IMAGES, "images");
    const at = layOutTiles(shown, { tiles: [64, 100], rows: [0, 32], columns: [0, 30] }, 600, 300);
    expect(at.tiles).toHaveLength(36);
    at.tiles.forEach((r, i) => {
      expect(r.x + r.width).toBeLessThanOrEqual(600);
      expect(r.y + r.height).toBeLessThanOrEqual(300);
      expect(r.width / r.height).toBeCloseTo(30 / 32);
      expect(elementAt(at, r.x + r.width * 0.999, r.y + 0.01)).toEqual({ tile: 64 + i, row: 0, column: 29 });
    });
    expect(elementAt(at, 599.9, 299.9)).toBeNull();
  });

  it("of a single head leave room for words, and are square where the matrix is", () => {
    const shown = viewAxes(held([2, 5, 4, 6], ["batch", "head", "query", "key"]), "attention");
    const words = { rows: ["a", "b", "c", "d"], columns: null };
    const box = { tiles: [3, 4], rows: [0, 4], columns: [0, 6] } as const;
    const [large, ...others] = layOutTiles(shown, box, 600, 300, words).tiles;
    expect([large!.tile, others.length]).toEqual([3, 0]);
    expect(large!.x).toBeGreaterThan(60);
    expect(large!.x + large!.width).toBeLessThanOrEqual(600);
    expect(large!.width / large!.height).toBeCloseTo(6 / 4);
  });

  it("of maps fit in the height that their grid asks for, whatever their number", () => {
    const shown = viewAxes(IMAGES, "images");
    for (const [count, width] of [[24, 396], [24, 616], [3, 396], [64, 396], [17, 700]] as const) {
      const box = { tiles: [0, count], rows: [0, 8], columns: [0, 8] } as const;
      const high = gridHeight(box, width, 8);
      const tiles = layOutTiles(shown, box, width, high).tiles;
      expect(Math.max(...tiles.map((r) => r.y + r.height))).toBeLessThanOrEqual(high);
      expect(Math.max(...tiles.map((r) => r.x + r.width))).toBeLessThanOrEqual(width);
      expect(tiles[0]!.width).toBeGreaterThan(Math.min(width / Math.max(8, Math.ceil(Math.sqrt(2 * count))), 120) * 0.8 - 4);
    }
    expect(gridHeight({ tiles: [0, 24], rows: [0, 8], columns: [0, 8] }, 396, 8)).toBeLessThan(155); // three rows of eight
  });
});

describe("texts", () => {
  it("name the keys that a query looks at most, and how many a cell stands for", () => {
    const seen = cells({ counts: [1, 2, 3], ends: [1, 2, 5], block: [1, 1, 2], planes: ["mean"] }, [0, 0, 0, 0.2, 0.05, 0.5]);
    expect(topKeys(seen, { tile: 0, row: 1, column: 0 }, 5).map((key) => [key.from, key.count])).toEqual([
      [4, 1],
      [0, 2],
      [2, 2],
    ]);
    expect(topKeys(seen, { tile: 1, row: 1, column: 0 }, 5)).toEqual([]);
    const several = held([2, 3, 3], ["head", "query", "key"], { name: "@attention[1]" });
    expect(valuesExpression(arrays([several], { part: "attention" }), several, viewAxes(several, "attention"), [0, 0, 0])).toBe('insp.values("blocks/0@attention[1]")');
  });

  it("tell a value as short as its dtype allows", () => {
    expect(shortest(String(Math.fround(0.1)), "float32")).toBe("0.1");
    expect(shortest("0.1", "float64")).toBe("0.1");
    expect(shortest(String(Math.fround(-1e-20)), "float32")).toBe("−1e−20");
    expect(shortest("NaN", "float32")).toBe("NaN");
    expect(shortest("-Infinity", "bfloat16")).toBe("−∞");
    expect(shortest("9223372036854775807", "int64")).toBe("9223372036854775807");
    expect(shortest("1 -2", "complex64")).toBe("1 − 2i");
    expect(shortest("1", "bool")).toBe("1");
  });

  it("say where a value is, what was left out, and the Python for it", () => {
    const shown = viewAxes(IMAGES, "images");
    expect(indexText(IMAGES, shown, [3, 0, 0, 0], { tile: 9, row: 1, column: 2 })).toBe("batch 3, height 1, width 2, channel 9");
    const c = cells({ counts: [1, 1, 1], ends: [64, 32, 30], block: [1, 2, 2] }, [1]);
    expect(extentText(IMAGES, shown, c)).toBe("61.4 k of 384 k values (1.54 MB in all); each cell the mean of 2 × 2 of them; channel 0–63 of 100".replace(/ (?=[kM])/g, "\u202f"));
    expect(valuesExpression(arrays([MATRIX]), MATRIX, shown, [])).toBe('insp.values("blocks/0")');
    expect(valuesExpression(arrays([IMAGES]), IMAGES, shown, [0, 0, 0, 0])).toBe('insp.values("blocks/0")');
    expect(valuesExpression(arrays([IMAGES]), IMAGES, shown, [3, 0, 0, 0])).toBe('insp.values("blocks/0")[3]');
    const second = held([2], ["feature"], { number: 2, call: 1, name: "['a']" });
    expect(valuesExpression(arrays([MATRIX, second], { clean: true }), second, shown, [])).toBe(`insp.values("blocks/0", call=1, clean=True)['a']`);
    expect(runExpression(arrays([MATRIX]), MATRIX)).toBe('run.values("blocks/0").value');
    expect(runExpression(arrays([MATRIX, second]), second)).toBe(`run.values("blocks/0").calls[1]["['a']"]`);
    const kernel = held([2], ["feature"], { name: "kernel" });
    expect(valuesExpression(arrays([kernel], { part: "parameter" }), kernel, shown, [])).toBe('insp.values("blocks/0", part="parameter")["kernel"]');
  });

  it("are exact by the cells where those are single elements, else by the kernel", () => {
    const at = { tile: 0, row: 0, column: 1 };
    const c = cells({}, [1, 0.1, 3, 4, 5, 6]);
    const shown = viewAxes(MATRIX, "heatmap");
    expect(exactAt(MATRIX, shown, c, at, "7")).toBe(String(Math.fround(0.1)));
    expect(exactAt({ ...MATRIX, dtype: "int64" }, shown, c, at, "7")).toBe("7");
    expect(exactAt(MATRIX, shown, { ...c, header: header({ block: [1, 2, 2] }) }, at, null)).toBeNull();
  });
});

describe("the state", () => {
  let asked: { request: KernelRequest; settle: (error: string | null) => void }[];
  let values: ValuesState;
  beforeEach(() => {
    asked = [];
    values = new ValuesState((request, settle) => asked.push({ request, settle }));
  });
  const types = (): string[] => asked.map(({ request }) => request.type);

  it("shows the output of a module that does not attend, after one that does", () => {
    values.open("attn");
    asked[0]!.settle(null);
    values.setPart("attn", "attention");
    asked[1]!.settle(null);
    values.open("head");
    asked[2]!.settle("'head' computes no attention itself.");
    expect(asked[3]!.request).toMatchObject({ site: "head", part: "output" });
    expect(values.problem.value).toBe("");
    asked[3]!.settle("no output");
    expect(values.problem.value).toBe("no output");
  });

  it("asks for arrays, then for a window, and for the last wish of several", () => {
    values.open("blocks/0");
    values.open("blocks/0");
    values.setPart("blocks/0", "input");
    expect(types()).toEqual(["show_values"]);
    values.receive(arrays([MATRIX]), undefined); // of the part that is no longer wanted
    expect(values.array.value).toBeNull();
    asked[0]!.settle(null);
    expect(asked[1]!.request).toEqual({ type: "show_values", site: "blocks/0", part: "input", clean: false });
    values.receive(arrays([TOKENS], { part: "input" }), undefined);
    expect(types()).toEqual(["show_values", "show_values", "read_values"]);
    values.setView("heatmap");
    values.setIndex(0, 1);
    values.setIndex(0, 99);
    expect(types()).toHaveLength(3);
    asked[2]!.settle(null);
    expect(asked[3]!.request).toMatchObject({ index: [1, 0, 0], axes: [-1, 1, 2] });
  });

  it("takes cells of what is shown only, and keeps them until others come", () => {
    values.open("blocks/0");
    values.receive(arrays([MATRIX]), undefined);
    const come = header({ ends: [1, 8, 6], counts: [1, 8, 6] });
    const buffer = float32(Array.from({ length: 48 }, (_, i) => i));
    values.receive({ ...come, array: 7 }, buffer);
    expect(values.cells.value).toBeNull();
    values.receive(come, buffer);
    const first = values.cells.value;
    expect(first?.mean[47]).toBe(47);
    values.receive(arrays([{ ...MATRIX, number: 5 }]), undefined); // the same array of a later pass
    expect(values.cells.value).toBe(first);
    values.receive({ ...come, array: 5 }, buffer);
    expect(values.cells.value).not.toBe(first);
    values.open("blocks/1");
    expect(values.cells.value).toBeNull();
  });

  it("asks for the exact value under the crosshair, of the last place", () => {
    values.open("blocks/0");
    values.receive(arrays([MATRIX]), undefined);
    values.point({ tile: 0, row: 1, column: 2 });
    values.point({ tile: 0, row: 1, column: 3 });
    values.point({ tile: 0, row: 1, column: 4 });
    const points = () => asked.filter(({ request }) => request.type === "read_values" && request.exact);
    expect(points()).toHaveLength(1);
    points()[0]!.settle(null);
    expect(points()[1]!.request).toMatchObject({ starts: [0, 1, 4], ends: [1, 2, 5] });
    const told = { exact: true, encoding: "float64", counts: [1, 1, 1], starts: [0, 1, 3], ends: [1, 2, 4] } as const;
    values.receive(header(told), new DataView(new Float64Array([0.5]).buffer));
    expect(values.exact.value).toBeNull(); // of another place
    values.receive(header({ ...told, starts: [0, 1, 4] }), new DataView(new Float64Array([0.25]).buffer));
    expect(values.exact.value).toBe("0.25");
  });

  it("tells why there is nothing", () => {
    values.open("blocks/0");
    asked[0]!.settle("It is in a branch that this pass did not take.");
    expect(values.problem.value).toBe("It is in a branch that this pass did not take.");
    expect(values.busy.value).toBe(false);
  });
});

describe("the panel", () => {
  it("asks when it is shown, and moves the crosshair by the keyboard", async () => {
    const { control, stream, el, find, end } = await startView();
    expect(control.of("show_values")).toEqual([]);
    await openTab(find, "values");
    await settle();
    expect(control.of("show_values")[0]).toMatchObject({ site: "blocks/0", part: "output", clean: false });
    const evil = `<img src=x onerror="window.hacked=true">`;
    stream.emit(arrays([MATRIX, { ...TOKENS, number: 2, name: evil }], { source: evil }));
    stream.emit(header({ ends: [1, 8, 6], counts: [1, 8, 6] }), float32(Array.from({ length: 48 }, (_, i) => i / 3)));
    await settle();
    expect(el.querySelector("img")).toBeNull();
    expect(find("nni-values-source")!.textContent).toContain(evil);
    const picture = find("nni-picture")!;
    const press = (key: string): unknown => picture.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    press("ArrowRight"); // shows it
    press("ArrowRight");
    await settle();
    press("ArrowDown");
    await settle();
    const value = find("nni-value-exact")!;
    expect(value.dataset["place"]).toBe("batch 1, feature 1");
    expect(Number(value.dataset["value"])).toBe(Math.fround(7 / 3));
    expect(value.textContent).toBe("2.3333333");
    press("Escape");
    await settle();
    expect(find("nni-value-exact")!.dataset["value"]).toBe("");
    end();
  });

  it("names the examples with the greatest gradient, and a click looks at one; of outputs it names none", async () => {
    const { control, stream, el, find, end } = await startView();
    await openTab(find, "values");
    await settle();
    const links = (): HTMLElement[] => [...el.querySelectorAll<HTMLElement>(".nni-values .nni-key button")];
    const shown = async (part: Arrays["part"]): Promise<void> => {
      stream.emit(arrays([MATRIX], { part, parts: ["output", "gradient"] }));
      stream.emit(header({ ends: [1, 8, 6], counts: [1, 8, 6] }), float32(Array.from({ length: 48 }, (_, i) => (i === 13 ? -9 : i / 48))));
      await settle();
    };
    await shown("output");
    expect(links()).toEqual([]);
    enterValue(find("nni-values-part"), "gradient");
    await settle();
    await shown("gradient");
    expect(links().map((one) => one.textContent)).toEqual(["example 2", "example 7", "example 6"]);
    links()[0]!.click();
    await vi.waitUntil(() => control.of("choose_example").length > 0);
    expect(control.of("choose_example")).toMatchObject([{ example: 2 }]);
    end();
  });
});

it("writes no word over another beside thousands of rows", () => {
  const drawn: number[] = [];
  const context = { fillText: (_: string, __: number, y: number) => drawn.push(y) } as unknown as CanvasRenderingContext2D;
  const rows = Array.from({ length: 2000 }, (_, i) => `w${i}`);
  for (const height of [100, 173, 268]) {
    const rect = { x: 50, y: 0, width: 200, height };
    paintWords(
      { context, width: 260, height, palette: { text: "" } } as Parameters<typeof paintWords>[0],
      { box: { rows: [0, 2000], columns: [0, 2000], tiles: [0, 1] }, tiles: [rect] } as unknown as Parameters<typeof paintWords>[1],
      { rows, columns: null },
    );
    expect(drawn.length).toBeGreaterThan(height / 30);
    expect(Math.min(...drawn.slice(1).map((y, i) => y - drawn[i]!))).toBeGreaterThanOrEqual(10);
    drawn.length = 0;
  }
});
