// Numbers as colours: one scale about zero (blue to orange), one from low to high, and one colour for
// values that are not finite. Invariant: the lightness of each scale changes steadily, so that it can
// be read without seeing hues; zero is the page's own background in light and dark.
import type { Range } from "../values/cells";

type Rgb = readonly [number, number, number];

const LIGHT = {
  signed: [[5, 48, 97], [50, 120, 180], [150, 196, 222], [247, 247, 247], [253, 190, 120], [217, 112, 20], [127, 52, 0]],
  rising: [[250, 250, 245], [203, 225, 226], [127, 184, 200], [62, 134, 170], [34, 84, 131], [12, 36, 84]],
} as const satisfies Record<string, readonly Rgb[]>;
const DARK = {
  signed: [[190, 226, 255], [94, 170, 232], [34, 92, 148], [24, 24, 26], [132, 70, 14], [226, 132, 40], [255, 222, 170]],
  rising: [[20, 22, 28], [28, 56, 92], [30, 104, 138], [58, 156, 160], [142, 205, 168], [246, 245, 200]],
} as const satisfies Record<string, readonly Rgb[]>;

export const NOT_FINITE: Rgb = [214, 39, 150];

/** 256 colours from the low end of a range to the high one. */
export function colours(range: Range, dark: boolean): Uint8ClampedArray {
  const stops = (dark ? DARK : LIGHT)[range.signed ? "signed" : "rising"];
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const k = Math.min(Math.floor(at), stops.length - 2);
    for (let c = 0; c < 3; c++) table[i * 3 + c] = stops[k]![c]! + (stops[k + 1]![c]! - stops[k]![c]!) * (at - k);
  }
  return table;
}

/** The place of a value in the table; a value outside the range has the colour of the end. */
export function shade(value: number, range: Range): number {
  const span = range.high - range.low;
  const share = span > 0 ? (value - range.low) / span : range.signed ? 0.5 : 0;
  return Math.round(Math.min(Math.max(share, 0), 1) * 255);
}

export const css = (rgb: ArrayLike<number>, at = 0): string => `rgb(${rgb[at]}, ${rgb[at + 1]}, ${rgb[at + 2]})`;
