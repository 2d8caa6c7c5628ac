// A mask that is drawn on a picture of two axes of an array: which axes, and a rectangle of it.
import { MOST_UNITS } from "../kernel/protocol";
import type { Mask } from "./requests";

/** The rows and columns of a picture that a mask can lie over: two axes, one after the other, of which
 * none holds examples; null if there are none. `axis` is that of the rows, from the end. */
export function maskedAxes(axes: readonly string[], shape: readonly number[], rows: number, columns: number) {
  if (rows < 0 || columns !== rows + 1 || /batch|layer|iteration|member/.test(axes[rows]!)) return null;
  const units = shape[rows]! * shape[columns]!;
  return units > 0 && units <= MOST_UNITS ? { units, axis: rows - shape.length, columns: shape[columns]! } : null;
}

/** The mask with a rectangle between two places, both within it, switched. */
export function fillRectangle(mask: Mask, columns: number, from: readonly [number, number], end: readonly [number, number], to: 0 | 1): Mask {
  const next = mask.slice();
  const [top, bottom] = [Math.min(from[0], end[0]), Math.max(from[0], end[0])];
  const [left, right] = [Math.min(from[1], end[1]), Math.max(from[1], end[1])];
  for (let row = top; row <= bottom; row++) next.fill(to, row * columns + left, row * columns + right + 1);
  return next;
}
