// The cells of a strip of units, and how they are painted. Invariants: a unit has one cell, and the
// map from cells to places is the inverse of the map back; colours mean the same as in the panel
// "Values"; units that are dead, not finite or off are also marked by a shape.
import type { Area } from "../charts/Canvas";
import type { UnitsData, UnitStatistic } from "../kernel/decode";
import { isOperation } from "../kernel/sites";
import type { Site } from "../kernel/protocol";
import type { PatchGrid as Patches } from "../inputs/pictures";
import type { ColourRange } from "../values/cells";
import { colours, css, shade } from "../charts/colour";
import { NUMBERS, SIZE, textWidth } from "../charts/text";

interface StripGrid {
  readonly columns: number;
  readonly rows: number;
  readonly width: number;
  readonly height: number;
  /** The empty places before the first unit. */
  readonly lead: number;
  /** The room for numbers: left of several rows, below a single one. */
  readonly left: number;
  readonly below: number;
}

const GAP = 1;
/** The width of a strip of patches, and how much of the picture its cells let through. */
const PICTURE_WIDTH = 224;
const PICTURE_SHARE = 0.5;

/** Cells as large as fit: one row of tall cells for few units, many rows of small ones for many. Patches
 * of a picture lie as in it, below the units that are none. */
export function stripGrid(units: number, width: number, patches?: Patches | null): StripGrid {
  const room = Math.max(width, 40);
  if (patches) {
    const size = Math.min(PICTURE_WIDTH, room) / patches.columns;
    const lead = (patches.columns - (patches.skip % patches.columns)) % patches.columns;
    return { columns: patches.columns, rows: (units + lead) / patches.columns, width: size, height: size, lead, left: 0, below: 0 };
  }
  if (units * 10 <= room) return { columns: units, rows: 1, width: Math.min(26, room / Math.max(units, 1)), height: 30, lead: 0, left: 0, below: SIZE + 3 };
  const [cell, height] = units <= 512 ? [12, 16] : units <= 4096 ? [8, 10] : [6, 7];
  const left = textWidth(String(units)) + 4;
  const columns = Math.max(1, Math.floor((room - left) / cell));
  return { columns, rows: Math.ceil(units / columns), width: (room - left) / columns, height, lead: 0, left, below: 0 };
}

export function unitAt(grid: StripGrid, units: number, x: number, y: number): number | null {
  const [column, row] = [Math.floor((x - grid.left) / grid.width), Math.floor(y / grid.height)];
  if (column < 0 || column >= grid.columns || row < 0 || row >= grid.rows) return null;
  const unit = row * grid.columns + column - grid.lead;
  return unit >= 0 && unit < units ? unit : null;
}

/** The units along a straight line on the strip, as a pointer goes that skips some. */
export function unitsOnLine({ columns, lead }: StripGrid, from: number, to: number): number[] {
  const [a, b] = [from + lead, to + lead].map((place) => [Math.floor(place / columns), place % columns] as const);
  const steps = Math.max(Math.abs(b![0] - a![0]), Math.abs(b![1] - a![1]), 1);
  return Array.from({ length: steps + 1 }, (_, i) => {
    const [row, column] = [0, 1].map((k) => Math.round(a![k]! + ((b![k]! - a![k]!) * i) / steps)) as [number, number];
    return row * columns + column - lead;
  });
}

/** The axis that is shown first: of an attention that of the heads, of all else the last. */
export function defaultAxis({ key, output, stacked }: Pick<Site, "key" | "output" | "stacked">): number {
  const rank = output.split(",").length - (stacked > 1 ? 1 : 0);
  return isOperation(key) && /@attention(\[\d+\])?$/.test(key) && rank > 3 ? -3 : -1;
}

/** Whether a unit passes nothing on: it is always exactly 0, or off behind the activation function. */
export const isDead = (data: UnitsData, unit: number): boolean => data.figures.dead[unit] === 1;

/** The range of the colours: 0 to 1 for a share, else up to the largest figure, with 0 in the middle
 * if any figure is negative. */
export function unitRange(values: Float64Array, figure: UnitStatistic): ColourRange {
  if (figure === "zero_fraction") return { low: 0, high: 1, signed: false };
  let [largest, signed] = [0, false];
  for (const value of values) {
    if (Number.isFinite(value)) largest = Math.max(largest, Math.abs(value));
    signed ||= value < 0;
  }
  return { low: signed ? -largest : 0, high: largest, signed };
}

interface StripContent {
  readonly data: UnitsData;
  readonly figure: UnitStatistic;
  readonly grid: StripGrid;
  readonly mask: Uint8Array;
  readonly active: number | null;
  readonly dark: boolean;
  /** What the cells lie over: the picture of patches. */
  readonly picture?: { readonly of: HTMLCanvasElement; readonly patches: Patches } | null;
}

export function paintStrip({ context: c, palette }: Area, { data, figure, grid, mask, active, dark, picture }: StripContent): void {
  const values = data.figures[figure];
  const range = unitRange(values, figure);
  const table = colours(range, dark);
  const [w, h] = [grid.width, grid.height];
  c.lineWidth = 1;
  paintNumbers(c, palette["text-faint"], grid, values.length);
  c.save();
  c.translate(grid.left, 0);
  const first = picture ? (picture.patches.skip + grid.lead) / grid.columns : 0;
  if (picture) {
    c.imageSmoothingEnabled = false;
    c.drawImage(picture.of, 0, first * h, grid.columns * w, picture.patches.rows * h);
  }
  for (let unit = 0; unit < values.length; unit++) {
    const place = unit + grid.lead;
    const [x, y] = [(place % grid.columns) * w, Math.floor(place / grid.columns) * h];
    const [cw, ch] = [Math.max(w - GAP, 1), Math.max(h - GAP, 1)];
    const value = values[unit];
    c.globalAlpha = picture && unit >= picture.patches.skip ? PICTURE_SHARE : 1;
    c.fillStyle = palette.line; // an edge: 0 has the colour of the page
    c.fillRect(x, y, cw, ch);
    c.fillStyle = Number.isNaN(value) ? palette.background : css(table, 3 * shade(value, range));
    c.fillRect(x + 1, y + 1, Math.max(cw - 2, 1), Math.max(ch - 2, 1));
    c.globalAlpha = 1;
    if (data.figures.nonfinite[unit] > 0) {
      c.fillStyle = palette.bad;
      c.beginPath(); // a wedge in the corner
      c.moveTo(x, y);
      c.lineTo(x + Math.min(cw, 9), y);
      c.lineTo(x, y + Math.min(ch, 9));
      c.fill();
    }
    if (isDead(data, unit)) {
      c.strokeStyle = palette.text;
      c.beginPath(); // crossed out
      c.moveTo(x + 1.5, y + 1.5);
      c.lineTo(x + cw - 1.5, y + ch - 1.5);
      c.moveTo(x + cw - 1.5, y + 1.5);
      c.lineTo(x + 1.5, y + ch - 1.5);
      c.stroke();
    }
    if (!mask[unit]) {
      c.fillStyle = palette.perturb;
      c.fillRect(x, y, cw, Math.min(4, ch)); // a bar on top and a frame
      c.globalAlpha = picture ? PICTURE_SHARE : 0;
      c.fillRect(x, y, cw, ch);
      c.globalAlpha = 1;
      c.strokeStyle = palette.perturb;
      c.strokeRect(x + 0.5, y + 0.5, cw - 1, ch - 1);
    }
  }
  if (active !== null && active < values.length) {
    c.strokeStyle = palette.text;
    c.lineWidth = 2;
    const place = active + grid.lead;
    c.strokeRect((place % grid.columns) * w, Math.floor(place / grid.columns) * h + 1, Math.max(w - GAP, 2), Math.max(h - 2, 2));
  }
  c.restore();
}

/** The numbers of the units: below a single row, and of the first unit of each of several, as many as there is room for. */
function paintNumbers(c: CanvasRenderingContext2D, colour: string, grid: StripGrid, units: number): void {
  if (grid.left + grid.below === 0) return;
  c.fillStyle = colour;
  c.font = NUMBERS;
  c.textBaseline = "middle";
  c.textAlign = grid.left > 0 ? "right" : "center";
  if (grid.left > 0) {
    const step = Math.ceil(SIZE / grid.height);
    for (let row = 0; row < grid.rows; row += step) c.fillText(String(row * grid.columns), grid.left - 3, (row + 0.5) * grid.height);
  } else {
    const step = [1, 2, 4, 5, 8, 10, 20].find((n) => n * grid.width >= textWidth(`${units} `)) ?? 50;
    for (let unit = 0; unit < units; unit += step) c.fillText(String(unit), (unit + 0.5) * grid.width, grid.height + SIZE / 2 + 2);
  }
}
