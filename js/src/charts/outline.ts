// The histogram of the pinned pass as an outline over the histogram of the pass on screen.
// Invariant: it has the axis and the scale of the bars on screen, as shares of all values, so that
// passes with different numbers of values have outlines of equal area. Values outside the axis
// are left out.
import { isZero, type Bar } from "./bins";
import type { Scale } from "./scale";

/** An SVG path. `all` values are drawn, at heights up to `top` a unit of the axis's length. */
export function pinnedOutline(bars: readonly Bar[], all: number, scale: Scale, top: number, width: number, height: number): string {
  const total = bars.reduce((sum, bar) => sum + bar.count, 0);
  if (!(total > 0)) return "";
  const spots = merged(bars, scale);
  let path = "";
  let x = -1;
  for (const { from, to, count } of spots) {
    const tall = ((count / total) * all) / Math.max(to - from, 1e-9) / top;
    const y = (height * (1 - Math.min(tall, 1))).toFixed(2);
    const [left, right] = [(from * width).toFixed(2), (to * width).toFixed(2)];
    path += Math.abs(from * width - x) < 0.6 ? `L${left} ${y}H${right}` : `${path ? `V${height}` : ""}M${left} ${height}V${y}H${right}`;
    x = to * width;
  }
  return path ? `${path}V${height}` : "";
}

/** Wide enough to be seen, so that many narrow bins do not become a comb. */
const LEAST = 1 / 80;

interface Spot {
  from: number;
  to: number;
  count: number;
}

function merged(bars: readonly Bar[], scale: Scale): Spot[] {
  const spots: Spot[] = [];
  for (const bar of bars) {
    const [low, high] = isZero(bar) ? [0, 0] : [bar.low, bar.high];
    const [from, to] = [scale.at(low), scale.at(high)];
    if (!(to >= 0 && from <= 1)) continue;
    const last = spots.at(-1);
    if (last && (last.to - last.from < LEAST || to - from < LEAST / 4) && from - last.to < LEAST) {
      last.to = Math.min(Math.max(last.to, to, last.from + LEAST / 4), 1);
      last.count += bar.count;
    } else spots.push({ from: Math.max(from, last?.to ?? 0), to: Math.min(Math.max(to, from + LEAST / 4), 1), count: bar.count });
  }
  return spots;
}
