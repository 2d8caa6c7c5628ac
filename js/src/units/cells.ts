// How units lie in a strip, and how they are painted. Invariants: a unit has one cell, and where a
// cell is and which cell is at a place are inverse to each other; what is dead, not finite or off
// is told by a shape too, not by colour alone.
import type { Area } from "../charts/Canvas";
import type { UnitsData, UnitFigure } from "../inside/decode";

export interface Grid {
  readonly columns: number;
  readonly rows: number;
  readonly width: number;
  readonly height: number;
}

const GAP = 1;

/** Cells as large as fit: one row of tall ones for few, many rows of small ones for many. */
export function gridOf(units: number, width: number): Grid {
  const room = Math.max(width, 40);
  if (units * 10 <= room) return { columns: units, rows: 1, width: Math.min(26, room / Math.max(units, 1)), height: 30 };
  const [cell, height] = units <= 512 ? [12, 16] : units <= 4096 ? [8, 10] : [6, 7];
  const columns = Math.max(1, Math.floor(room / cell));
  return { columns, rows: Math.ceil(units / columns), width: room / columns, height };
}

export function cellAt(grid: Grid, units: number, x: number, y: number): number | null {
  const [column, row] = [Math.floor(x / grid.width), Math.floor(y / grid.height)];
  if (column < 0 || column >= grid.columns || row < 0) return null;
  const unit = row * grid.columns + column;
  return unit < units ? unit : null;
}

/** Never anything but exactly 0. */
export const isDead = (data: UnitsData, unit: number): boolean => data.figures.zero_fraction[unit] === 1;

/** From -1 to 1 (0 to 1 for what has no sign), NaN where there is no figure. */
export function shades(values: Float64Array, figure: UnitFigure): Float64Array {
  if (figure === "zero_fraction") return values;
  let largest = 0;
  for (const value of values) if (Number.isFinite(value)) largest = Math.max(largest, Math.abs(value));
  return values.map((value) => (largest > 0 ? Math.max(-1, Math.min(1, value / largest)) : Number.isNaN(value) ? NaN : 0));
}

interface Painted {
  readonly data: UnitsData;
  readonly figure: UnitFigure;
  readonly grid: Grid;
  readonly mask: Uint8Array;
  readonly active: number | null;
  readonly bad: string;
  readonly off: string;
}

export function paintStrip({ context: c, palette }: Area, { data, figure, grid, mask, active, bad, off }: Painted): void {
  const shade = shades(data.figures[figure], figure);
  const [w, h] = [grid.width, grid.height];
  c.lineWidth = 1;
  for (let unit = 0; unit < shade.length; unit++) {
    const x = (unit % grid.columns) * w;
    const y = Math.floor(unit / grid.columns) * h;
    const [cw, ch] = [Math.max(w - GAP, 1), Math.max(h - GAP, 1)];
    const value = shade[unit];
    c.fillStyle = palette.line;
    c.globalAlpha = 0.55;
    c.fillRect(x, y, cw, ch);
    c.globalAlpha = Number.isNaN(value) ? 0 : 0.08 + 0.92 * Math.abs(value);
    c.fillStyle = value < 0 ? palette.gradient : palette.output;
    if (value !== 0) c.fillRect(x, y, cw, ch);
    c.globalAlpha = 1;
    if (data.figures.nonfinite[unit] > 0) {
      c.fillStyle = bad;
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
      c.fillStyle = off;
      c.fillRect(x, y, cw, Math.min(4, ch)); // a bar on top and a frame
      c.strokeStyle = off;
      c.strokeRect(x + 0.5, y + 0.5, cw - 1, ch - 1);
    }
  }
  if (active !== null && active < shade.length) {
    c.strokeStyle = palette.text;
    c.lineWidth = 2;
    c.strokeRect((active % grid.columns) * w, Math.floor(active / grid.columns) * h + 1, Math.max(w - GAP, 2), Math.max(h - 2, 2));
  }
}
