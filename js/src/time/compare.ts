// A figure beside the same figure of the pinned pass.
// Invariant: sizes compare by ratio, signed figures and counts by difference; what was not measured
// in one of the two compares with nothing.
import { NOT_MEASURED, percent, real, signed } from "../format";

export type Comparison = "ratio" | "difference" | "points";

export function compare(kind: Comparison, now: number, pinned: number): number {
  if (Number.isNaN(now) || Number.isNaN(pinned)) return NaN;
  if (kind !== "ratio") return now - pinned;
  return pinned === 0 ? (now === 0 ? 1 : Infinity) : now / pinned;
}

export function compared(kind: Comparison, value: number): string {
  if (Number.isNaN(value)) return NOT_MEASURED;
  if (kind === "ratio") return Number.isFinite(value) ? `×${ratio(value)}` : "from 0";
  if (value === 0) return "±0";
  return kind === "points" ? `${value > 0 ? "+" : ""}${percent(value)}` : signed(value);
}

function ratio(value: number): string {
  return value >= 0.01 && value < 1000 ? value.toPrecision(3) : real(value);
}
