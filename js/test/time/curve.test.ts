// The curve of a metric with its marks and the cursor, and the axis of steps, without a page.
import { describe, expect, it } from "vitest";
import { INSET, notFiniteSteps, canBeLog, finiteRange, paintCurve, xOfStep, stepOfX, suitsLog, valueAt, type CurveMarks } from "../../src/time/curve";
import type { Palette } from "../../src/ui/theme";

const points = (...values: number[]): Float64Array => new Float64Array(values.flatMap((value, i) => [i, value]));

describe("the axis of a metric", () => {
  it("is logarithmic over two decades above 0", () => {
    expect(suitsLog(points(3, 0.5, 0.02))).toBe(true);
    expect(suitsLog(points(3, 0.5, 0.2))).toBe(false);
    expect(suitsLog(points(3, 0.5, 0))).toBe(false);
    expect(suitsLog(points(NaN, 0.5))).toBe(false);
    expect(canBeLog(points(3, 0))).toBe(true);
    expect(canBeLog(points(-3, 0, NaN))).toBe(false);
    expect(finiteRange(points(3, NaN, -1), false)).toEqual([-1, 3]);
  });

  it("of steps goes from 0 to the newest, and leads back from a place to its step", () => {
    expect([0, 50, 100].map((step) => xOfStep(step, 100, 212))).toEqual([INSET, 106, 206]);
    for (const step of [0, 12.5, 100]) expect(stepOfX(xOfStep(step, 100, 212), 100, 212)).toBeCloseTo(step, 9);
    expect([stepOfX(-50, 100, 212), stepOfX(900, 100, 212)]).toEqual([0, 100]);
    expect([xOfStep(0, 0, 212), stepOfX(30, 0, 212)], "a single step is in the middle").toEqual([106, 0]);
  });

  it("knows the value at a step, or at the recorded step before it", () => {
    const some = new Float64Array([2, 0.5, 4, NaN, 9, 0.25]);
    expect([1, 2, 3.9, 4, 8, 9, Infinity].map((step) => valueAt(some, step))).toEqual([undefined, 0.5, 0.5, NaN, NaN, 0.25, 0.25]);
    expect(notFiniteSteps(some)).toEqual([4]);
  });
});

describe("the curve of a metric", () => {
  const draw = (values: number[], log = false, marks: Partial<CurveMarks> = {}) => {
    const [width, last] = [400, values.length - 1];
    const step = (x: number): number => Math.round(stepOfX(x, last, width) * 100) / 100;
    const found = { lines: [] as number[], dots: [] as number[], bad: [] as number[], on: [] as number[], cursor: [] as number[] };
    let [path, fillStyle] = [0, ""];
    const own = {
      beginPath: () => (path = 0),
      lineTo: () => (path += 1),
      stroke: () => found.lines.push(path),
      arc: (x: number) => found.dots.push(step(x)),
      fillRect: (x: number, _: number, w: number) => found[fillStyle as "bad" | "on" | "cursor"].push(step(x + (fillStyle === "cursor" ? 1 : w / 2))),
    };
    const context = new Proxy(own as object, {
      get: (known, name) => Reflect.get(known, name) ?? (() => undefined),
      set: (_, name, value) => {
        if (name === "fillStyle") fillStyle = value as string;
        return true;
      },
    }) as CanvasRenderingContext2D;
    const palette = { bad: "bad", perturb: "on", focus: "cursor", metric: "line" } as Palette;
    paintCurve({ context, width, height: 44, palette }, points(...values), { last, cursor: NaN, pinned: NaN, spans: [], ...marks }, log);
    return found;
  };

  it("has a dot for a value between two gaps, and marks for the steps that are not finite", () => {
    expect(draw([1, NaN, 2, NaN, NaN, 3, NaN])).toMatchObject({ lines: [], dots: [0, 2, 5], bad: [1, 3.5, 6] });
  });

  it("is a line through the values between two gaps", () => {
    expect(draw([1, 2, Infinity, 3, 2, 1])).toMatchObject({ lines: [2, 3], dots: [], bad: [2] });
    expect(draw([NaN, 2, 1, NaN])).toMatchObject({ lines: [2], bad: [0, 3] });
    expect(draw([3, 2, 1])).toMatchObject({ lines: [3], bad: [] });
  });

  it("does not mark a value that only a logarithmic axis has no place for", () => {
    expect(draw([3, 0, 2, 1], true)).toMatchObject({ lines: [2], dots: [0], bad: [] });
  });

  it("marks where something was perturbed, and the cursor", () => {
    expect(draw([3, 2, 1, 0, 1], false, { spans: [[1, 3]], cursor: 3 })).toMatchObject({ on: [2], cursor: [3] });
    expect(draw([3, 2, 1]).cursor).toEqual([]);
  });
});
