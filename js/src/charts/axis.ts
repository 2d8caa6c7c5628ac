// The axis of a histogram: as chosen, or the one on which the bulk of its values is wide enough.
// Invariant: it does not change back and forth while a distribution moves a little.
import { useRef } from "preact/hooks";
import { isZero, quantile, type Bar } from "./bins";

export const AXIS_SCALES = ["auto", "linear", "log"] as const;
export type AxisScale = (typeof AXIS_SCALES)[number];

/** The share of the axis that the middle 90 % of the values take, at least, to stay or become linear. */
const [STAYS, BECOMES] = [0.1, 0.15];

/** The share of a linear axis that the middle 90 % of the values take, zeros left out. */
export function middleShare(bars: readonly Bar[]): number {
  const values = bars.filter((bar) => !isZero(bar));
  if (values.length < 2) return 1;
  const low = Math.min(values[0].low, 0);
  const high = Math.max(values[values.length - 1].high, 0);
  return (quantile(values, 0.95) - quantile(values, 0.05)) / (high - low);
}

/** Whether a histogram has a logarithmic axis; `of` names what it shows. */
export function useLogAxis(axis: AxisScale, bars: readonly Bar[] | null, of: string): boolean {
  const last = useRef({ of: "", log: false });
  if (axis !== "auto") return axis === "log";
  if (!bars || bars.length === 0) return last.current.log;
  const before = last.current.of === of ? last.current.log : null;
  const log = middleShare(bars) < (before === false ? STAYS : BECOMES);
  last.current = { of, log };
  return log;
}
