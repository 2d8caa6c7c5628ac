import { describe, expect, it } from "vitest";
import { toPatchGrid, rgbaPixels } from "../../src/inputs/pictures";
import type { HeldArray, Pictures } from "../../src/kernel/protocol";
import type { Cells } from "../../src/values/cells";
import { asGrid, fromGrid, patchGrid, toGrid, moveInGrid } from "../../src/inputs/patches";

const grey: Pictures = { path: "x", count: 2, rows: 28, columns: 28, height: 2, width: 1, channels: 1, shown: "0 … 1", pixels: btoa("\x00\x10\x20\xff") };

describe("thumbnails", () => {
  it("give each example its own pixels", () => {
    expect([...rgbaPixels(grey, 1)!]).toEqual([32, 32, 32, 255, 255, 255, 255, 255]);
    const colour = { ...grey, channels: 3, height: 1, count: 1, pixels: btoa("\x01\x02\x03") };
    expect([...rgbaPixels(colour, 0)!]).toEqual([1, 2, 3, 255]);
  });

  it("are none beyond the bytes of the message, or for channels that have no colour", () => {
    expect(rgbaPixels(grey, 2)).toBeNull();
    expect(rgbaPixels({ ...grey, channels: 2, width: 1, height: 1 }, 0)).toBeNull();
  });
});

describe("the grid of patches", () => {
  const of = (rows: number, columns: number, positions: number) => toPatchGrid({ ...grey, rows, columns }, positions);

  it("covers the picture with square patches, after a class token or not", () => {
    expect(of(28, 28, 49)).toEqual({ rows: 7, columns: 7, skip: 0 });
    expect(of(28, 28, 50)).toEqual({ rows: 7, columns: 7, skip: 1 });
    expect(of(224, 224, 197)).toEqual({ rows: 14, columns: 14, skip: 1 });
    expect(of(32, 16, 9)).toEqual({ rows: 4, columns: 2, skip: 1 });
  });

  it("is none where positions are no patches", () => {
    expect(of(28, 28, 10)).toBeNull();
    expect(of(28, 28, 784)).toBeNull();
    expect(toPatchGrid(null, 49)).toBeNull();
  });

  it("is that of an array of positions and features only", () => {
    const array = { axes: ["batch", "position", "feature"], shape: [2, 50, 8] } as unknown as HeldArray;
    expect(patchGrid(array, grey)).toEqual({ rows: 7, columns: 7, skip: 1 });
    expect(patchGrid({ ...array, axes: ["batch", "query", "key"] }, grey)).toBeNull();
  });

  it("shows each position at its place, and finds it there", () => {
    const grid = { rows: 2, columns: 3, skip: 1 };
    const header = { counts: [1, 1, 7], starts: [0, 0, 0], ends: [1, 1, 7], block: [1, 1, 1] };
    const cells = { header, mean: new Float32Array([9, 0, 1, 2, 3, 4, 5]), low: null, high: null, bad: null } as unknown as Cells;
    const drawn = asGrid(cells, grid)!;
    expect([...drawn.mean]).toEqual([0, 1, 2, 3, 4, 5]);
    expect(drawn.header.counts).toEqual([1, 2, 3]);
    expect(fromGrid({ tile: 0, row: 1, column: 2 }, grid)).toEqual({ tile: 0, row: 0, column: 6 });
    expect(toGrid({ tile: 0, row: 0, column: 6 }, grid)).toEqual({ tile: 0, row: 1, column: 2 });
    expect(moveInGrid({ tile: 0, row: 0, column: 3 }, grid, 1, 5).column).toBe(6);
    expect(asGrid({ ...cells, header: { ...cells.header, block: [1, 1, 2] } }, grid)).toBeNull();
  });
});
