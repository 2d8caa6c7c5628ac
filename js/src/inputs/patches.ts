// Positions as the patches of a picture: cells along one axis, laid out in rows and columns.
// Invariant: the element under a place of the grid is the position whose value is drawn there.
import { toPatchGrid, type PatchGrid } from "./pictures";
import type { HeldArray, Pictures } from "../kernel/protocol";
import type { Cells } from "../values/cells";
import type { Box, Cursor } from "../values/layout";

/** The patches that an array [batch, positions, features] has. */
export function patchGrid(array: HeldArray, pictures: Pictures | null | undefined): PatchGrid | null {
  if (array.shape.length !== 3 || array.axes.some((name) => /head|query|key|height|width|kernel/.test(name))) return null;
  return toPatchGrid(pictures, array.shape[1]!);
}

/** Cells [tiles, 1, positions] as [tiles, rows, columns]; null if they are not single positions. */
export function asGrid(cells: Cells, { rows, columns, skip }: PatchGrid): Cells | null {
  const { counts, starts, ends, block } = cells.header;
  const [tiles, , positions] = counts as [number, number, number];
  if (tiles !== 1 || starts[2] !== 0 || block[2] !== 1 || positions !== skip + rows * columns) return null;
  const header = { ...cells.header, counts: [1, rows, columns], starts: [starts[0]!, 0, 0], ends: [ends[0]!, rows, columns], block: [block[0]!, 1, 1] };
  return { header, mean: cells.mean.slice(skip), low: null, high: null, bad: null };
}

/** The position so many rows and columns further, within the grid. */
export function moveInGrid(at: Cursor, grid: PatchGrid, rows: number, columns: number): Cursor {
  const { tile, row, column } = toGrid(at, grid);
  const clamp = (n: number, length: number): number => Math.min(Math.max(n, 0), length - 1);
  return fromGrid({ tile, row: clamp(row + rows, grid.rows), column: clamp(column + columns, grid.columns) }, grid);
}

export const gridBox = (box: Box, { rows, columns }: PatchGrid): Box => ({ tiles: box.tiles, rows: [0, rows], columns: [0, columns] });

export const toGrid = (at: Cursor, { columns, skip }: PatchGrid): Cursor => {
  const patch = at.column - skip;
  return { tile: at.tile, row: Math.floor(patch / columns), column: ((patch % columns) + columns) % columns };
};

export const fromGrid = (at: Cursor, { columns, skip }: PatchGrid): Cursor => ({ tile: at.tile, row: 0, column: skip + at.row * columns + at.column });

/** The part of a picture where a place lies, as the shares top, bottom, left and right: of a map with rows and columns, or of a patch. */
export function placeOnPicture(place: readonly number[], extent: readonly number[], pictures: Pictures | null | undefined): readonly [number, number, number, number] | null {
  const grid = place.length === 1 ? toPatchGrid(pictures, extent[0]!) : null;
  if (grid && place[0]! < grid.skip) return null; // a class token
  const patch = grid && toGrid({ tile: 0, row: 0, column: place[0]! }, grid);
  const [y, x, rows, columns] = patch ? [patch.row, patch.column, grid.rows, grid.columns] : place.length === 2 ? [...place, ...extent] : [];
  return rows && columns ? [y! / rows, (y! + 1) / rows, x! / columns, (x! + 1) / columns] : null;
}
