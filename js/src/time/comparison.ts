// A figure beside the same figure of the pinned pass.
// Invariant: sizes are compared by ratio, signed figures and counts by difference, and a column's
// head says which; a figure that one of the two passes lacks has no comparison.
import { NOT_MEASURED, percent, real, signed } from "../ui/format";

export type Comparison = "ratio" | "difference" | "points";

export function compareValues(kind: Comparison, now: number, pinned: number): number {
  if (Number.isNaN(now) || Number.isNaN(pinned)) return NaN;
  if (kind !== "ratio") return now - pinned;
  return pinned === 0 ? (now === 0 ? 1 : Infinity) : now / pinned;
}

/** The text of a column of comparisons: in its head, and in full. */
export const HEAD_SIGNS: Readonly<Record<Comparison, string>> = { ratio: "×", difference: "Δ", points: "Δ" };
const DESCRIPTIONS: Readonly<Record<Comparison, string>> = {
  ratio: "as a multiple of that in",
  difference: "minus that in",
  points: "minus that in",
};

export function comparisonText(kind: Comparison, name: string, pinned: string): string {
  return `${name}, ${DESCRIPTIONS[kind]} ${pinned} (pinned)`;
}

export function differenceText(kind: Comparison, value: number): string {
  if (Number.isNaN(value)) return NOT_MEASURED;
  if (kind === "ratio") return Number.isFinite(value) ? `×${ratio(value)}` : "from 0";
  if (value === 0) return "±0";
  return kind === "points" ? `${value > 0 ? "+" : ""}${percent(value)}` : signed(value);
}

function ratio(value: number): string {
  return value >= 0.01 && value < 1000 ? value.toPrecision(3) : real(value);
}
