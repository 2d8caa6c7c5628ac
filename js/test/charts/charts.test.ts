// Bins, scales and numbers: the parts of a chart that can be wrong without looking wrong.
import { describe, expect, it } from "vitest";
import { middleShare } from "../../src/charts/axis";
import { binEdges, samplingError, quantile, rebin, toBars, total } from "../../src/charts/bins";
import { outlineOf, placeBars } from "../../src/charts/bars";
import { paintBands } from "../../src/charts/history";
import { edgeScale, labels, linear, logarithmic, niceTicks, symlog } from "../../src/charts/scale";
import type { HistoryData } from "../../src/kernel/decode";
import { decimal, tick } from "../../src/ui/format";
import type { Palette } from "../../src/ui/theme";

const binOf = (value: number): number => new Uint32Array(new Float32Array([value]).buffer)[0] >>> 20;

function pairsOf(values: Iterable<number>): Float64Array {
  const counts = new Map<number, number>();
  for (const value of values) counts.set(binOf(value), (counts.get(binOf(value)) ?? 0) + 1);
  return new Float64Array([...counts].flat());
}

describe("bins", () => {
  it("hold the float32 values whose upper bits they are", () => {
    const values = [1, -1, 1.124, 1.125, 0.1, -0.1, 3.4e38, -3.4e38, 1.2e-38, 7, 8, -8, 1e-20, 65504];
    for (const v of values) {
      const x = Math.fround(v);
      const [low, high] = binEdges(binOf(x));
      expect(x >= low && x <= high).toBe(true);
      if (x > 0) expect(x < high || high > 3.4e38).toBe(true);
    }
  });

  it("touch, and agree with a Float32Array about every edge", () => {
    const word = new Uint32Array(1);
    const float = new Float32Array(word.buffer);
    for (let bin = 8; bin < 0x7f7; bin++) {
      word[0] = bin << 20;
      expect(binEdges(bin)[0]).toBe(float[0]);
      expect(binEdges(bin)[1]).toBe(binEdges(bin + 1)[0]);
      expect(binEdges(bin | 0x800)).toEqual([-binEdges(bin)[1], -binEdges(bin)[0]]);
    }
    expect(binEdges(0x7f7)[1]).toBeLessThan(Infinity);
  });

  it("of zero and the subnormals lie about zero, whatever their sign", () => {
    for (const value of [0, -0, 1e-40, -1e-45]) {
      const [low, high] = binEdges(binOf(value));
      expect(low).toBeLessThan(0);
      expect(high).toBeGreaterThan(0);
    }
    expect(toBars(pairsOf([0, -0, 1e-40, 1]))).toHaveLength(2);
  });

  it("become rising bars with all counts", () => {
    const bars = toBars(pairsOf([3, -2, 0, 0, 1, 1]));
    expect(bars.map((b) => b.count)).toEqual([1, 2, 2, 1]);
    for (let i = 1; i < bars.length; i++) expect(bars[i].low).toBeGreaterThanOrEqual(bars[i - 1].high);
  });
});

describe("precision", () => {
  const of = (figures: Partial<Record<string, number>>) => samplingError((name) => figures[name] ?? 0);

  it("is silent where every value is in a bin", () => {
    expect(of({ size: 10, zeros: 3, nan: 2, seen: 5 })).toBe("");
    expect(of({ size: NaN, zeros: NaN, nan: NaN, posinf: NaN, neginf: NaN, seen: NaN })).toBe("");
    expect(of({})).toBe("");
  });

  it("says how many values of a sample there are, and how far ranks are off", () => {
    expect(of({ size: 8388608, seen: 65536 })).toBe("65\u202f536 of 8\u202f388\u202f608 values, ranks ±1.1\u202f%");
    expect(of({ size: 8388608, zeros: 4194304, seen: 65536 })).toBe("65\u202f536 of 4\u202f194\u202f304 nonzero values, ranks ±0.53\u202f%");
    expect(of({ size: 100, zeros: 97, seen: 0 })).toBe("0 of 3 nonzero values, ranks ±3\u202f%");
  });
});

describe("rebinning", () => {
  it.each([1, 7, 64, 500])("into %i keeps the count", (n) => {
    let seed = 1;
    const random = (): number => (seed = (seed * 16807) % 2147483647) / 2147483647;
    for (const scale of [1e-30, 1e-3, 1, 1e30, 1e38]) {
      const values = Array.from({ length: 300 }, () => (random() < 0.2 ? 0 : (random() - 0.4) * scale));
      const bars = toBars(pairsOf(values));
      const again = rebin(bars, n);
      expect(again).toHaveLength(n);
      expect(total(again)).toBeCloseTo(300, 6);
      expect(again.every((bar) => bar.count >= -1e-9 && Number.isFinite(bar.low) && Number.isFinite(bar.high))).toBe(true);
    }
  });

  it("puts counts where the values are", () => {
    const again = rebin(toBars(new Float64Array([binOf(1), 10, binOf(4), 20])), 4); // [1, 1.125) and [4, 4.5)
    expect(again[0].count).toBeCloseTo(10);
    expect(again[3].count).toBeCloseTo(20);
    expect(again[1].count).toBe(0);
  });

  it("takes zeros alone, one bin, and nothing", () => {
    expect(total(rebin(toBars(pairsOf([0, 0])), 8))).toBe(2);
    expect(total(rebin(toBars(pairsOf([5])), 8))).toBeCloseTo(1);
    expect(rebin([], 8)).toEqual([]);
  });

  it("leaves quantiles within a bin", () => {
    const bars = toBars(pairsOf(Array.from({ length: 1001 }, (_, i) => i / 1000)));
    expect(Math.abs(quantile(bars, 0.5) - 0.5)).toBeLessThan(0.06);
  });
});

describe("scales", () => {
  it.each([
    ["linear", linear(-2, 5), -2, 5],
    ["symlog", symlog(-2, 5, 0.01, 0.6), -2, 5],
    ["symlog, one side", symlog(0.01, 5, 0.01, 0.6), 0.01, 5],
    ["along edges", edgeScale(new Float64Array([-2, -1, 0, 1, 5])), -2, 5],
  ])("%s rises from 0 to 1", (_, scale, low, high) => {
    expect(scale.at(low)).toBeCloseTo(0);
    expect(scale.at(high)).toBeCloseTo(1);
    let before = -1e-9;
    for (let i = 0; i <= 100; i++) {
      const at = scale.at(low + ((high - low) * i) / 100);
      expect(at).toBeGreaterThanOrEqual(before);
      before = at;
    }
  });

  it("has round ticks", () => {
    expect(niceTicks(0, 1, 5)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
    expect(niceTicks(0.4, 3.1, 3)).toEqual([1, 2, 3]); // the multiples of 2 are one
    expect(linear(3, 3).at(3)).toBe(0.5);
  });
});

describe("labels of an axis", () => {
  const width = (text: string): number => text.length * 6;
  const values = (length: number, scale = symlog(-0.0123, 0.0123, 1e-5, 0.25)): number[] => {
    const found = labels(scale, length, tick, width);
    for (let i = 1; i < found.length; i++) expect(found[i].left).toBeGreaterThanOrEqual(found[i - 1].left + found[i - 1].width + 8);
    for (const l of found) {
      expect(l.left).toBeGreaterThanOrEqual(0);
      expect(l.left + l.width).toBeLessThanOrEqual(length + 1e-9);
    }
    return found.map((l) => l.value);
  };

  it("never touch, and 0 and the outermost stay", () => {
    expect(values(2000)).toHaveLength(9);
    for (const length of [700, 315, 220, 150]) {
      const found = values(length);
      expect(found).toContain(0);
      expect([found[0], found.at(-1)]).toEqual([-0.01, 0.01]);
    }
    for (let length = 150; length < 800; length++) {
      const found = values(length); // the labels of negative values are wider, and yet both sides are alike
      expect(found.map((value) => 0 - value).reverse()).toEqual(found);
    }
    expect(values(60)).toEqual([0]);
  });

  it("are one where the scale is a point", () => {
    expect(values(300, linear(2, 2))).toEqual([2]);
  });
});

describe("another pass behind the bars", () => {
  const bar = (low: number, high: number, count: number) => ({ low, high, count });
  const seen = (chart: ReturnType<typeof placeBars>) => chart.other.reduce((sum, one) => sum + one.height * (one.to - one.from), 0);

  it("is an outline of the same area", () => {
    const chart = placeBars([bar(0, 2, 80)], [bar(0, 1, 10), bar(1, 2, 30)], false);
    expect(seen(chart)).toBeCloseTo(80, 6); // 80 values on screen: heights as if the 40 were 80
    expect(outlineOf(chart, 100, 10)).toMatch(/^M0.00 10V.*V10$/);
    expect(outlineOf(placeBars([bar(0, 2, 80)], [], false), 100, 10)).toBe("");
  });

  it.each([[false], [true]])("is whole where its values are far outside those on screen (log: %s)", (log) => {
    const [now, other] = [[bar(-1, 0.5, 20), bar(0.5, 1, 60)], [bar(-64, -32, 10), bar(1, 2, 10), bar(32, 64, 20)]];
    const chart = placeBars(now, other, log);
    expect(seen(chart)).toBeCloseTo(80, 4);
    for (const one of [...chart.bars, ...chart.other]) {
      expect(one.from).toBeGreaterThanOrEqual(-1e-9);
      expect(one.to).toBeLessThanOrEqual(1 + 1e-9);
    }
    // the share of the other pass above 16 is where it belongs, not at the edge of the bars on screen
    const above = chart.other.filter((one) => one.low >= 16).reduce((sum, one) => sum + one.count, 0);
    expect(above).toBeCloseTo(20, 6);
  });

  it("stays as high as it is beside a spike, which is cut", () => {
    const spread = Array.from({ length: 16 }, (_, i) => bar(i - 8, i - 7, 16 - Math.abs(i - 8)));
    const chart = placeBars([{ low: -1e-38, high: 1e-38, count: 200 }], spread, false);
    expect(chart.cut?.count).toBe(200);
    expect(chart.top).toBeLessThan(chart.cut!.height / 2);
    expect(Math.max(...chart.other.map((one) => one.height))).toBeLessThan(chart.top);
  });

  it("may be all that there is", () => {
    const chart = placeBars([], [bar(1, 2, 4)], true);
    expect(chart.bars).toEqual([]);
    expect(chart.top).toBeGreaterThanOrEqual(0);
    expect(outlineOf({ ...chart, top: 1 }, 10, 10)).not.toBe("");
  });
});

describe("the axis that is chosen", () => {
  const normal = Array.from({ length: 4000 }, (_, i) => Math.sqrt(-2 * Math.log((i + 0.5) / 4000)) * Math.cos(2 * Math.PI * ((i * 0.618034) % 1)));

  it("is linear for a bell curve, far from 0 or behind a ReLU, and logarithmic for values of many sizes", () => {
    expect(middleShare(toBars(pairsOf(normal)))).toBeGreaterThan(0.3);
    expect(middleShare(toBars(pairsOf(normal.map((x) => Math.max(x, 0)))))).toBeGreaterThan(0.3);
    expect(middleShare(toBars(pairsOf(normal.map((x) => x ** 7))))).toBeLessThan(0.05);
    expect(middleShare(toBars(pairsOf([0, 0, 0])))).toBe(1);
    expect(middleShare([])).toBe(1);
  });

  it("has powers of ten at even distances", () => {
    const scale = logarithmic(0.1, 10);
    expect([0.1, 1, 10].map((value) => scale.at(value))).toEqual([0, 0.5, 1]);
    expect(logarithmic(2, 2).at(2)).toBe(0.5);
  });

  it("says numbers without an exponent", () => {
    expect([0, 0.0005, -0.000012, 2.5, 100000, 0.00469345].map((value) => decimal(value))).toEqual(["0", "0.0005", "−0.000012", "2.5", "100\u202f000", "0.00469"]);
    expect(decimal(0.00469345, 4)).toBe("0.004693");
    expect([NaN, Infinity, 1e-9].map((value) => decimal(value, 4))).toEqual(["–", "∞", "1.000e−9"]);
  });
});

describe("bands over the steps", () => {
  it("have no axis where nothing was ever finite, and one for the rest", () => {
    const texts: string[] = [];
    const canvas = document.createElement("canvas");
    const fillText = (text: string): number => texts.push(text);
    const context = new Proxy({ canvas, fillText, measureText: () => ({ width: 1 }) } as object, {
      get: (own, name) => Reflect.get(own, name) ?? (() => undefined),
    }) as CanvasRenderingContext2D;
    const area = { context, width: 400, height: 130, palette: {} as Palette };
    const draw = (values: number[]): string[] => {
      texts.length = 0;
      const quantiles = new Float64Array(values.flatMap((value) => Array<number>(7).fill(value)));
      const history = { steps: Float64Array.from(values.keys()), quantiles } as unknown as HistoryData;
      paintBands(area, history, "red", false, { newest: values.length - 1, shown: null, pinned: null, perturbed: [] });
      return texts.filter((text) => /[.∞e–]|NaN/.test(text));
    };
    expect(draw([NaN, NaN, NaN])).toEqual([]);
    expect(draw([Infinity, -Infinity])).toEqual([]);
    expect(draw([0.25, Infinity, NaN, 0.75])).toEqual(["0.75", "0.25"]);
  });
});
