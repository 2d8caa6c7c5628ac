// Numbers as colours: one scale about zero, from grey to the hue of the quantity, one from low to high,
// and one colour for values that are not finite. Invariant: the lightness of each scale changes
// steadily, so that it can be read without seeing hues; zero is the page's own background.
import type { ColourRange } from "../values/cells";

type Rgb = readonly [number, number, number];

/** From the greatest size to zero: what is below it, and what is above it, blue or (for gradients) orange. */
const LIGHT = {
  below: [[45, 52, 60], [103, 113, 123], [184, 191, 198]],
  blue: [[0, 62, 107], [0, 105, 168], [138, 188, 220]],
  orange: [[110, 44, 0], [184, 77, 0], [236, 178, 128]],
  zero: [255, 255, 255],
} as const satisfies Record<string, readonly Rgb[] | Rgb>;
const DARK = {
  below: [[222, 228, 233], [150, 159, 168], [78, 85, 92]],
  blue: [[200, 232, 255], [95, 184, 238], [24, 84, 126]],
  orange: [[255, 224, 178], [240, 160, 75], [116, 70, 22]],
  zero: [17, 17, 17],
} as const satisfies Record<string, readonly Rgb[] | Rgb>;

export const NOT_FINITE: Rgb = [214, 39, 150];

/** 256 colours from the low end of a range to the high one. */
export function colours(range: ColourRange, dark: boolean): Uint8ClampedArray {
  const { below, zero, ...hues } = dark ? DARK : LIGHT;
  const above = [zero, ...[...hues[range.hue ?? "blue"]].reverse()];
  const stops: readonly Rgb[] = range.signed ? [...below, ...above] : above;
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const k = Math.min(Math.floor(at), stops.length - 2);
    for (let c = 0; c < 3; c++) table[i * 3 + c] = stops[k]![c]! + (stops[k + 1]![c]! - stops[k]![c]!) * (at - k);
  }
  return table;
}

/** The place of a value in the table; a value outside the range has the colour of the end. */
export function shade(value: number, range: ColourRange): number {
  const span = range.high - range.low;
  const share = span > 0 ? (value - range.low) / span : range.signed ? 0.5 : 0;
  return Math.round(Math.min(Math.max(share, 0), 1) * 255);
}

export const css = (rgb: ArrayLike<number>, at = 0): string => `rgb(${rgb[at]}, ${rgb[at + 1]}, ${rgb[at + 2]})`;
