// The place of a value on an axis, as a fraction of its length, and the ticks of an axis.
// Invariant: every scale is monotonic and maps its ends to 0 and 1, even if they are equal.
import { lastAtMost } from "../kernel/bisect";

export interface Scale {
  at(value: number): number;
}

export interface TickScale extends Scale {
  readonly ticks: readonly number[];
}

export function linear(low: number, high: number): TickScale {
  const span = high - low;
  if (!(span > 0)) return { at: () => 0.5, ticks: [low] };
  return { at: (value) => (value - low) / span, ticks: niceTicks(low, high, 5) };
}

/** For values above 0. */
export function logarithmic(low: number, high: number): Scale {
  const { at } = linear(Math.log10(low), Math.log10(high));
  return { at: (value) => at(Math.log10(value)) };
}

/** About `wanted` multiples of 1, 2 or 5 times a power of ten; two at least. */
export function niceTicks(low: number, high: number, wanted: number): number[] {
  for (let finer = wanted; ; finer *= 2) {
    const ticks = multiples(low, high, finer);
    if (ticks.length > 1 || !(high > low) || finer > 16 * wanted) return ticks;
  }
}

function multiples(low: number, high: number, wanted: number): number[] {
  const rough = (high - low) / wanted;
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
  const ticks: number[] = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/**
 * Logarithmic outside (-threshold, threshold) and linear within, where the values about zero take
 * the length of `middle` decades. It has one side only if all values are on one side.
 */
export function symlog(low: number, high: number, threshold: number, middle: number): TickScale {
  const raw = (value: number): number => {
    const size = Math.abs(value);
    if (size <= threshold) return (value / threshold) * middle;
    return Math.sign(value) * (middle + Math.log10(size / threshold));
  };
  const [from, to] = [raw(low), raw(high)];
  if (!(to > from)) return { at: () => 0.5, ticks: [low] };
  return { at: (value) => (raw(value) - from) / (to - from), ticks: powerTicks(low, high, threshold) };
}

/** The edges of a heatmap's rows: values that are evenly spaced on the axis. */
export function edgeScale(edges: Float64Array): Scale {
  const n = edges.length - 1;
  const at = (value: number): number => {
    if (!(value > edges[0])) return 0;
    if (value >= edges[n]) return 1;
    const i = lastAtMost(edges.length, (k) => edges[k], value);
    return (i + (value - edges[i]) / (edges[i + 1] - edges[i])) / n;
  };
  return { at };
}

function powerTicks(low: number, high: number, threshold: number): number[] {
  const ticks = low <= 0 && high >= 0 ? [0] : [];
  const first = Math.ceil(Math.log10(threshold) - 1e-9);
  const last = Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high))) + 1e-9);
  for (let k = last; k >= first; k--) for (const t of [10 ** k, -(10 ** k)]) if (t >= low && t <= high) ticks.push(t);
  return ticks;
}

/** A tick with its label: `left` and `width` in pixels from the start of the axis. */
interface Label {
  readonly value: number;
  readonly at: number;
  readonly text: string;
  readonly left: number;
  readonly width: number;
}

const LABEL_GAP = 8;

/**
 * Labels below an axis of `length` pixels, which stay within it and do not touch: 0 and the outermost
 * ticks have priority, then earlier ticks. Of a value and its negative both have a label, or none has.
 */
export function labels(scale: TickScale, length: number, text: (value: number) => string, widthOf: (text: string) => number): Label[] {
  const all = scale.ticks
    .map((value) => ({ value, at: scale.at(value), text: text(value) }))
    .filter(({ at }) => at >= 0 && at <= 1)
    .map((tick) => {
      const width = widthOf(tick.text);
      const left = Math.max(Math.min(tick.at * length - width / 2, length - width), 0);
      return { ...tick, left, width };
    });
  const along = [...all].sort((a, b) => a.at - b.at);
  const first = new Set([along.find((l) => l.value === 0), along[0], along[along.length - 1]].filter((l) => l !== undefined));
  const kept: Label[] = [];
  for (const label of [...first, ...all.filter((l) => !first.has(l))]) {
    const pair = first.has(label) ? [label] : all.filter((l) => Math.abs(l.value) === Math.abs(label.value) && !kept.includes(l));
    if (pair.every((one) => [...kept, ...pair].every((k) => k === one || one.left >= k.left + k.width + LABEL_GAP || k.left >= one.left + one.width + LABEL_GAP))) kept.push(...pair);
  }
  return kept.sort((a, b) => a.at - b.at);
}

/** The stretches of numbers below `count` for which something holds, from the first to behind the last. */
export function runs(count: number, holds: (i: number) => boolean): [from: number, end: number][] {
  const found: [number, number][] = [];
  for (let from = 0; from < count; from++) {
    if (!holds(from)) continue;
    let end = from + 1;
    while (end < count && holds(end)) end += 1;
    found.push([from, end]);
    from = end;
  }
  return found;
}
