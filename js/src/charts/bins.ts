// Histogram bins. A bin is the upper 12 bits of the float32 values it holds, so edges are read
// from floats: positive bins cover [f(b<<20), f((b+1)<<20)), negative ones the mirror image, and
// those of exponent 0 hold zeros and subnormals. Invariant: rebinning keeps the total count.

import { count, percent } from "../ui/format";

export interface Bar {
  readonly low: number;
  readonly high: number;
  readonly count: number;
}

const MANTISSA = 3; // mantissa bits in a bin, after sign and exponent
const SHIFT = 23 - MANTISSA;
const SIGN = 1 << (8 + MANTISSA);
const LAST = 0xff << MANTISSA; // the first of the bins of infinities and NaN, which are never filled
const LARGEST = 3.4028234663852886e38;
const SMALLEST = 2 ** -126;

const word = new DataView(new ArrayBuffer(4));

function float(bits: number): number {
  word.setUint32(0, bits);
  return word.getFloat32(0);
}

/** The range of a bin. The bins of zero and of the subnormals are one range about 0. */
export function binEdges(bin: number): [low: number, high: number] {
  const size = bin & (SIGN - 1);
  if (size < 1 << MANTISSA) return [-SMALLEST, SMALLEST];
  const low = size >= LAST ? LARGEST : float(size << SHIFT);
  const high = size + 1 >= LAST ? LARGEST : float((size + 1) << SHIFT);
  return bin & SIGN ? [-high, -low] : [low, high];
}

/** What a histogram of a sample says of its precision; empty if it counts every value. */
export function samplingError(figure: (name: "size" | "zeros" | "nan" | "posinf" | "neginf" | "seen") => number): string {
  const finite = figure("size") - figure("nan") - figure("posinf") - figure("neginf");
  const nonzero = finite - figure("zeros");
  const seen = figure("seen");
  if (!(seen < nonzero)) return "";
  // Hoeffding's bound, exceeded once in a million; as Summary.rank_error
  const error = Math.min(Math.sqrt(Math.log(2e6) / (2 * Math.max(seen, 1))), 1) * (nonzero / finite);
  const of = figure("zeros") > 0 ? "nonzero values" : "values";
  return `${count(seen)} of ${count(nonzero)} ${of}, ranks ±${percent(Number(error.toPrecision(2)))}`;
}

/** Pairs (bin, count) -> bars in ascending order, with all bins about zero as one. */
export function toBars(pairs: Float64Array): Bar[] {
  let zeros = 0;
  const bars: Bar[] = [];
  for (let i = 0; i < pairs.length; i += 2) {
    const [low, high] = binEdges(pairs[i]);
    if (!(pairs[i + 1] > 0)) continue;
    if (low < 0 && high > 0) zeros += pairs[i + 1];
    else bars.push({ low, high, count: pairs[i + 1] });
  }
  if (zeros > 0) bars.push({ low: -SMALLEST, high: SMALLEST, count: zeros });
  return bars.sort((a, b) => a.low - b.low);
}

export const isZero = (bar: Bar): boolean => bar.low < 0 && bar.high > 0;

export function total(bars: readonly Bar[]): number {
  return bars.reduce((sum, bar) => sum + bar.count, 0);
}

/** The value below which a fraction of the counts lies, even within a bar. */
export function quantile(bars: readonly Bar[], fraction: number): number {
  let left = total(bars) * fraction;
  for (const bar of bars) {
    if (left <= bar.count) return isZero(bar) ? 0 : bar.low + (bar.high - bar.low) * (left / bar.count);
    left -= bar.count;
  }
  return bars.at(-1)?.high ?? NaN;
}

/** The least and the greatest value that bars hold; a range about 0 if all are zeros. */
export function extent(bars: readonly Bar[]): [low: number, high: number] {
  const some = bars.filter((bar) => !isZero(bar));
  if (some.length === 0) return [-0.5, 0.5];
  const zero = some.length < bars.length;
  const low = some.reduce((least, bar) => Math.min(least, bar.low), zero ? 0 : Infinity);
  return [low, some.reduce((most, bar) => Math.max(most, bar.high), zero ? 0 : -Infinity)];
}

/** The same counts in `n` bars of equal width from `low` to `high`, each old bar spread evenly over its range. */
export function rebin(bars: readonly Bar[], n: number, [low, high] = extent(bars)): Bar[] {
  if (bars.length === 0) return [];
  const width = high / n - low / n; // divided separately: the difference itself may overflow
  const counts = new Array<number>(n).fill(0);
  const place = (value: number): number => Math.min(Math.max((value - low) / width, 0), n);
  for (const bar of bars) {
    const from = isZero(bar) ? place(0) : place(bar.low);
    const to = isZero(bar) ? from : place(bar.high);
    const first = Math.min(Math.floor(from), n - 1);
    const last = Math.min(Math.ceil(to) - 1, n - 1);
    if (last <= first) {
      counts[first] += bar.count;
      continue;
    }
    let left = bar.count;
    for (let i = first; i < last; i++) {
      const part = (bar.count * (Math.min(i + 1, to) - Math.max(i, from))) / (to - from);
      counts[i] += part;
      left -= part;
    }
    counts[last] += left;
  }
  return counts.map((count, i) => ({ low: low + i * width, high: low + (i + 1) * width, count }));
}
