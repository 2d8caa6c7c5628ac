// The bars of a histogram on its axis, and those of another pass on the same axis, for an outline.
// On the log axis bins keep their own edges; on the linear one their counts are spread over equal
// widths. Areas are counts on either. Invariants: the axis holds the values of both passes, so that
// none is left out and none is piled up at an edge; the outline has the area of the bars.
import { count, percent, real } from "../ui/format";
import { extent, isZero, rebin, total, type Bar } from "./bins";
import { linear, symlog, type TickScale } from "./scale";

const LINEAR_BARS = 64;
/** The share of counts nearest zero that the log axis may draw as its middle. */
const SMALL_SHARE = 0.03;

export interface PlacedBar extends Bar {
  readonly from: number;
  readonly to: number;
  readonly text: string;
  /** Counts a unit of the axis's length, of as many values as the bars have. */
  readonly height: number;
}

export interface Chart {
  readonly scale: TickScale;
  readonly bars: readonly PlacedBar[];
  readonly other: readonly PlacedBar[];
  /** The height of the chart, and the bar that towers over all others, which is cut. */
  readonly top: number;
  readonly cut: PlacedBar | null;
}

/** Either may be empty, not both. */
export function placeBars(bars: readonly Bar[], behind: readonly Bar[], log: boolean): Chart {
  const [now, other] = [total(bars), total(behind)];
  const { scale, spread } = log ? logAxis(bars, behind) : linearAxis(bars, behind);
  const drawn = (of: readonly Bar[], share: number): PlacedBar[] =>
    spread(of).map((bar) => {
      const [from, to] = [scale.at(bar.low), scale.at(bar.high)];
      return { ...bar, from, to, height: (bar.count * share) / Math.max(to - from, 1e-9) };
    });
  const [front, outline] = [drawn(bars, 1), drawn(behind, now > 0 ? now / other : 1)];
  const [one, two] = [chartTop(front), chartTop(outline)];
  const top = Math.max(one.top, two.top);
  return { scale, bars: front, other: outline, top, cut: one.cut && one.cut.height > top ? one.cut : null };
}

type ToBars = (bars: readonly Bar[]) => (Bar & { text: string })[];

const rangeText = (low: number, high: number): string => `${real(low)} … ${real(high)}`;

function linearAxis(bars: readonly Bar[], behind: readonly Bar[]): { scale: TickScale; spread: ToBars } {
  const ends = extent([...bars, ...behind]);
  const spread: ToBars = (of) => rebin(of, LINEAR_BARS, ends).map((bar) => ({ ...bar, text: rangeText(bar.low, bar.high) }));
  return { scale: linear(...ends), spread };
}

/** Negative values, a middle for values near zero, positive values; either side may be missing. */
function logAxis(bars: readonly Bar[], behind: readonly Bar[]): { scale: TickScale; spread: ToBars } {
  const threshold = Math.min(smallEdge(bars), smallEdge(behind));
  const near = Number.isFinite(threshold) ? threshold : 1;
  const spread: ToBars = (of) => {
    const small = (bar: Bar): boolean => !isZero(bar) && bar.low >= -near && bar.high <= near;
    const merged = of.filter((bar) => !small(bar) && !isZero(bar)).map((bar) => ({ ...bar, text: rangeText(bar.low, bar.high) }));
    const middle = near / 3;
    const zero = total(of.filter(isZero));
    const below = total(of.filter((bar) => small(bar) && bar.high <= 0));
    const above = total(of.filter((bar) => small(bar) && bar.low >= 0));
    if (below > 0) merged.push({ low: -near, high: -middle, count: below, text: rangeText(-near, 0) });
    if (zero > 0) merged.push({ low: -middle, high: middle, count: zero, text: "0" });
    if (above > 0) merged.push({ low: middle, high: near, count: above, text: rangeText(0, near) });
    return merged.sort((a, b) => a.low - b.low);
  };
  const all = [...spread(bars), ...spread(behind)];
  const scale = symlog(Math.min(...all.map((bar) => bar.low)), Math.max(...all.map((bar) => bar.high)), near, 0.25);
  return { scale, spread };
}

/** The edge of the bin below which only few values lie nearer to zero; ∞ if all are zeros. */
function smallEdge(bars: readonly Bar[]): number {
  const sizes = bars
    .filter((bar) => !isZero(bar))
    .map((bar) => ({ near: Math.min(Math.abs(bar.low), Math.abs(bar.high)), count: bar.count }))
    .sort((a, b) => a.near - b.near);
  let left = sizes.reduce((sum, s) => sum + s.count, 0) * SMALL_SHARE;
  for (const size of sizes) {
    left -= size.count;
    if (left < 0) return size.near;
  }
  return sizes.at(-1)?.near ?? Infinity;
}

/** The height of some bars; one that towers over all others is cut. */
function chartTop(drawn: readonly PlacedBar[]): { top: number; cut: PlacedBar | null } {
  const [highest, second] = [...drawn].sort((a, b) => b.height - a.height);
  if (!highest) return { top: 0, cut: null };
  if (!second || !(second.height > 0)) return { top: 0, cut: highest }; // any other height is its own
  if (highest.height > 4 * second.height) return { top: second.height * 1.6, cut: highest };
  return { top: highest.height * 1.04, cut: null };
}

/** What is known of a bar, for its read-out. */
export const barText = (bar: PlacedBar, all: number): string => `${bar.text}: ${count(bar.count)} (${percent(bar.count / all)})`;

/** The outline of bars as an SVG path in a picture of this size; it falls to the ground in gaps. */
export function outlineOf({ other, top }: Chart, width: number, height: number): string {
  let path = "";
  let x = NaN;
  for (const bar of other) {
    if (bar.count <= 0) continue;
    const y = (height * (1 - Math.min(bar.height / top, 1))).toFixed(2);
    const [left, right] = [(bar.from * width).toFixed(2), (bar.to * width).toFixed(2)];
    path += Math.abs(bar.from * width - x) < 0.6 ? `L${left} ${y}H${right}` : `${path ? `V${height}` : ""}M${left} ${height}V${y}H${right}`;
    x = bar.to * width;
  }
  return path && `${path}V${height}`;
}
