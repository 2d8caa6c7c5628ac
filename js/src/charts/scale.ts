// The place of a value on an axis, as a fraction of its length, and the ticks of an axis.
// Invariant: every scale is monotonic and maps its ends to 0 and 1, even if they are equal.

export interface Scale {
  at(value: number): number;
  readonly ticks: readonly number[];
}

export function linear(low: number, high: number, wanted = 5): Scale {
  const span = high - low;
  if (!(span > 0)) return { at: () => 0.5, ticks: [low] };
  return { at: (value) => (value - low) / span, ticks: niceTicks(low, high, wanted) };
}

/** For values above 0: powers of ten, or 1, 2 and 5 times them where there are few. */
export function logarithmic(low: number, high: number): Scale {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const digits = to - from > 3 ? [1] : [1, 5, 2];
  const powers = Array.from({ length: Math.floor(to) - Math.floor(from) + 1 }, (_, k) => Math.floor(from) + k);
  const ticks = digits.flatMap((digit) => powers.map((power) => Number(`${digit}e${power}`)));
  return { at: (value) => (to > from ? (Math.log10(value) - from) / (to - from) : 0.5), ticks: ticks.filter((t) => t >= low && t <= high) };
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
export function symlog(low: number, high: number, threshold: number, middle = 0.6): Scale {
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
    let [low, high] = [0, n];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (edges[middle] <= value) low = middle;
      else high = middle;
    }
    return (low + (value - edges[low]) / (edges[high] - edges[low])) / n;
  };
  const threshold = edges.reduce((least, e) => (e !== 0 ? Math.min(least, Math.abs(e)) : least), Infinity);
  return { at, ticks: powerTicks(edges[0], edges[n], Number.isFinite(threshold) ? threshold : 1) };
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
 * Labels below an axis of `length` pixels, which exceed it by at most `over` at the ends and do not
 * touch: 0 and the outermost ticks have priority, then earlier ticks. Of a value and its negative both
 * have a label, or none has.
 */
export function labels(scale: Scale, length: number, text: (value: number) => string, widthOf: (text: string) => number, over = 0): Label[] {
  const all = scale.ticks
    .map((value) => ({ value, at: scale.at(value), text: text(value) }))
    .filter(({ at }) => at >= 0 && at <= 1)
    .map((tick) => {
      const width = widthOf(tick.text);
      const left = Math.max(Math.min(tick.at * length - width / 2, length + over - width), -over);
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

/** Ticks whose labels do not touch: earlier ones have priority; `apart` is a fraction of the axis. */
export function spaced(scale: Scale, apart: number): { value: number; at: number }[] {
  const kept: { value: number; at: number }[] = [];
  for (const value of scale.ticks) {
    const at = scale.at(value);
    if (at >= 0 && at <= 1 && kept.every((k) => Math.abs(k.at - at) >= apart)) kept.push({ value, at });
  }
  return kept;
}
