// The strip of units: where its cells are, and their colours.
import { describe, expect, it } from "vitest";
import { decodeUnits } from "../../src/kernel/decode";
import { unitAt, stripGrid, unitsOnLine, isDead, paintStrip, unitRange, defaultAxis } from "../../src/units/cells";
import { colours, css } from "../../src/charts/colour";
import { units } from "../helpers/messages";

describe("cells", () => {
  it.each([1, 5, 40, 96, 512, 513, 4096, 4097, 16384])("of %i units: the cell of a place is the unit that lies there", (count) => {
    for (const width of [0, 200, 641]) {
      const grid = stripGrid(count, width);
      expect(grid.columns * grid.rows).toBeGreaterThanOrEqual(count);
      expect(grid.left + grid.columns * grid.width).toBeLessThanOrEqual(Math.max(width, 40) + 1e-9);
      for (const unit of [0, 1, count >> 1, count - 1].filter((u) => u < count)) {
        const x = grid.left + (unit % grid.columns) * grid.width + grid.width / 2;
        const y = Math.floor(unit / grid.columns) * grid.height + grid.height / 2;
        expect(unitAt(grid, count, x, y)).toBe(unit);
      }
      expect(unitAt(grid, count, -1, 1)).toBeNull();
      expect(unitAt(grid, count, 1, grid.rows * grid.height + 1)).toBeNull();
    }
  });

  it("have colours up to the largest figure, and a share by itself", () => {
    expect(unitRange(Float64Array.from([1, -4, NaN, 2]), "mean")).toEqual({ low: -4, high: 4, signed: true });
    expect(unitRange(Float64Array.from([1, Infinity, 2]), "mean")).toEqual({ low: 0, high: 2, signed: false });
    expect(unitRange(Float64Array.from([0, 0.5]), "zero_fraction")).toEqual({ low: 0, high: 1, signed: false });
    expect(unitRange(Float64Array.from([0, 0, NaN]), "std")).toEqual({ low: 0, high: 0, signed: false });
    const data = decodeUnits(...units(3));
    expect([0, 1, 2].map((unit) => isDead(data, unit))).toEqual([false, true, false]);
  });

  it.each([false, true])("have the colours of the panel Values: grey below 0, blue above (dark: %s)", (dark) => {
    const data = decodeUnits(...units(3));
    data.figures.mean.set([-1, 1, 0]);
    const [painted, numbers]: [string[], string[]] = [[], []];
    const ignore = (): void => undefined;
    const context = {
      fillStyle: "", fillRect: () => painted.push(context.fillStyle), beginPath: ignore, moveTo: ignore, lineTo: ignore, stroke: ignore,
      save: ignore, restore: ignore, translate: ignore, fillText: (text: string) => numbers.push(text),
    }; // prettier-ignore
    const palette = { text: "text", "text-faint": "", line: "line", background: "", output: "", gradient: "", weight: "grey", focus: "blue", control: "", metric: "", perturb: "off", bad: "bad" };
    const area = { context: context as unknown as CanvasRenderingContext2D, width: 100, height: 30, palette };
    paintStrip(area, { data, figure: "mean", grid: stripGrid(3, 100), mask: Uint8Array.from([1, 1, 1]), active: null, dark });
    expect(numbers).toEqual(["0", "1", "2"]);
    const table = colours({ low: -1, high: 1, signed: true }, dark);
    const [below, above, zero] = painted.filter((colour) => colour !== "line");
    expect([below, above, zero]).toEqual([css(table, 0), css(table, 255 * 3), css(table, 128 * 3)]);
    const rgb = (colour: string): number[] => colour.match(/\d+/g)!.map(Number);
    expect(Math.max(...rgb(below)) - Math.min(...rgb(below))).toBeLessThan(24);
    expect(rgb(above)[2] - rgb(above)[0]).toBeGreaterThan(50);
  });
});

it("lays patches out as in their picture, below a class token", () => {
  const grid = stripGrid(10, 600, { rows: 3, columns: 3, skip: 1 });
  expect([grid.columns, grid.rows, grid.lead]).toEqual([3, 4, 2]);
  const at = (column: number, row: number) => unitAt(grid, 10, (column + 0.5) * grid.width, (row + 0.5) * grid.height);
  expect([at(0, 0), at(2, 0), at(0, 1), at(2, 3)]).toEqual([null, 0, 1, 9]);
  expect([unitsOnLine(grid, 1, 9), unitsOnLine(grid, 4, 4)]).toEqual([[1, 5, 9], [4, 4]]);
});

it.each([
  ["attn@attention", "float32[2,4,6,6]", 1, -3],
  ["attn@attention[1]", "float32[2,4,6,6]", 1, -3],
  ["blocks@attention", "float32[3,2,4,6,6]", 3, -3],
  ["blocks@attention", "float32[3,2,6,6]", 3, -1], // no heads
  ["attn@attention", "float32[2,6,6]", 1, -1],
  ["attn@softmax", "float32[2,4,6,6]", 1, -1],
  ["attn\\@attention", "float32[2,4,6,6]", 1, -1],
])("shows the heads of an attention first: %s %s", (key, output, stacked, axis) => {
  expect(defaultAxis({ key, output, stacked })).toBe(axis);
});
