// Buffers of messages -> typed arrays, in the order of nnx_inspector/screen/protocol. Little-endian.
// Invariant: it honours the view's byteOffset and copies only if float64 would be unaligned. A buffer
// whose length does not fit its header is a `ProtocolError`, never a short read.
import {
  CASTS,
  CAST_STATS,
  HISTORY_BINS,
  HISTORY_QUANTILES,
  PARAMETER_QUANTITIES,
  QUANTITIES,
  ROW_STATS,
  SPARK,
  STATISTICS,
  UNIT_STATS,
  type Casts,
  type Choices,
  type Curves,
  type Frame,
  type FrameParameter,
  type History,
  type Statistic,
  type UnitStats,
  type Updates,
} from "./protocol";
import { ProtocolError } from "./version";

export interface FrameData {
  readonly header: Frame;
  /** [site, quantity, statistic]: read it with `statistic`. */
  readonly table: Float64Array;
  /** Pairs (bin, count) by `histogramKey`, in no order. */
  readonly histograms: ReadonlyMap<string, Float64Array>;
  /** [site, quantity, SPARK]. */
  readonly sparklines: Uint8Array;
  /** [site, ROW_STATS]: read it with `rowStatistic`. */
  readonly rows: Float64Array;
  /** The parameters of the selected site. */
  readonly parameters: readonly ParameterData[];
}

/** What was measured of a parameter, each by PARAMETER_QUANTITIES; null if it was not. */
export interface ParameterData extends FrameParameter {
  readonly measured: readonly (SummaryData | null)[];
}

export interface SummaryData {
  readonly figures: Readonly<Record<Statistic, number>>;
  /** Pairs (bin, count), in no order. */
  readonly pairs: Float64Array;
}

export interface UpdatesData {
  readonly header: Updates;
  readonly steps: Float64Array;
  /** For each parameter, the ratio at each step; NaN where it is unknown. */
  readonly ratios: readonly Float64Array[];
  /** Alike, the share of the update that the parameter's dtype rounds to nothing. */
  readonly lost: readonly Float64Array[];
}

export interface HistoryData {
  readonly header: History;
  readonly steps: Float64Array;
  /** [steps, HISTORY_QUANTILES] */
  readonly quantiles: Float64Array;
  readonly edges: Float64Array;
  /** [steps, HISTORY_BINS] */
  readonly fractions: Float64Array;
}

/** The heads of an attention, or the experts of a router, over the steps. */
export interface ChoicesData {
  readonly header: Choices;
  readonly steps: Float64Array;
  /** [figures][rows][steps] */
  readonly figures: readonly (readonly Float64Array[])[];
}

export interface CurveData {
  readonly name: string;
  /** [points, 2]: step and value. */
  readonly points: Float64Array;
  /** How many values the recording has of it, and how many of these are NaN or Inf. */
  readonly recorded: number;
  readonly notFinite: number;
}

export interface CastsData {
  readonly header: Casts;
  /** [rows, CASTS, CAST_STATS] */
  readonly shares: Float64Array;
}

export type UnitStatistic = (typeof UNIT_STATS)[number];

export interface UnitsData {
  readonly header: UnitStats;
  readonly figures: Readonly<Record<UnitStatistic, Float64Array>>;
}

export const histogramKey = (site: number, quantity: number): string => `${site}/${quantity}`;

export const parameterKey = (path: string, quantity: number): string => `${quantity} ${path}`;

const INDEX = new Map<string, number>(STATISTICS.map((name, i) => [name, i]));

/** One figure of the table; NaN if it was not measured. */
export function statistic(frame: FrameData, site: number, quantity: number, name: Statistic): number {
  return frame.table[(site * QUANTITIES.length + quantity) * STATISTICS.length + INDEX.get(name)!];
}

/** How many values are NaN or infinite, by the three counts. */
export const notFiniteCount = (count: (name: "nan" | "posinf" | "neginf") => number): number => count("nan") + count("posinf") + count("neginf");

/** A figure of the parameters that a row itself holds; NaN if there is none. */
export function rowStatistic(frame: FrameData, site: number, name: (typeof ROW_STATS)[number]): number {
  return frame.rows[site * ROW_STATS.length + ROW_STATS.indexOf(name)];
}

/** The heights of a site's sparkline; null if it was not measured. */
export function sparkline(frame: FrameData | null, site: number): Uint8Array | null {
  if (!frame || site < 0 || Number.isNaN(statistic(frame, site, 0, "size"))) return null;
  const from = site * QUANTITIES.length * SPARK;
  return frame.sparklines.subarray(from, from + SPARK);
}

export function decodeFrame(header: Frame, buffer: DataView | undefined): FrameData {
  const length = buffer?.byteLength ?? 0;
  const counts = sum(header.histograms.map((h) => h.bytes)) + sum(header.parameters.flatMap((p) => p.bytes.map((n) => Math.max(n, 0))));
  const width = PARAMETER_QUANTITIES.length * STATISTICS.length;
  const own = header.parameters.length * width;
  const sites = (length - counts - own * 8) / (QUANTITIES.length * (STATISTICS.length * 8 + SPARK) + ROW_STATS.length * 8);
  if (sites < 0 || !Number.isInteger(sites) || header.parameters.some((p) => p.bytes.length !== PARAMETER_QUANTITIES.length)) {
    throw new ProtocolError(`The buffer of frame ${header.seq} has ${length} bytes: not a whole number of sites.`);
  }
  const [cells, rowCells] = [sites * QUANTITIES.length, sites * ROW_STATS.length];
  const reader = new Reader(header.type, buffer, cells * STATISTICS.length + rowCells + own, cells * SPARK + counts);
  const [table, rows] = [reader.floats(cells * STATISTICS.length), reader.floats(rowCells)];
  const figures = header.parameters.map(({ bytes }) => bytes.map(() => toRecord(STATISTICS, reader.floats(STATISTICS.length))));
  const parameters: ParameterData[] = [];
  const frame = { header, table, rows, parameters, histograms: new Map<string, Float64Array>(), sparklines: reader.bytes(cells * SPARK) };
  for (const { site, quantity, bytes } of header.histograms) {
    const [low, high] = (["min", "max"] as const).map((name) => statistic(frame, site, quantity, name));
    frame.histograms.set(histogramKey(site, quantity), decodeCounts(reader.bytes(bytes), low, high));
  }
  header.parameters.forEach((parameter, i) => {
    const measured = parameter.bytes.map((bytes, j) => {
      const of = figures[i][j];
      return bytes < 0 ? null : { figures: of, pairs: decodeCounts(reader.bytes(bytes), of.min, of.max) };
    });
    parameters.push({ ...parameter, measured });
  });
  return frame;
}

const EXPONENT_BITS = 0x7f8; // no bin of a nonzero finite value has all of these bits
const ZEROS = new Set([0x7f9, 0xff9]);
const UNSEEN = 0x7fb;
const LARGEST = 3.4028234663852886e38;

/** The counts of a summary, as Python keeps them (stats/encoding.py), as pairs (bin, count); zeros
 * are with the subnormals. Counts of a sample are scaled up to all values, which are between `low`
 * and `high`. */
export function decodeCounts(bytes: Uint8Array, low: number, high: number): Float64Array {
  const pairs: number[] = [];
  let [bin, zeros, seen, unseen] = [0, 0, 0, 0];
  for (let at = 0, skips = false; at < bytes.length; ) {
    let number = 0;
    for (let weight = 1, more = true; more; weight *= 128) {
      more = bytes[at] > 127;
      number += (bytes[at++] & 127) * weight;
    }
    if (skips || number === 0) {
      bin += number;
      skips = !skips;
      continue;
    }
    if ((bin & EXPONENT_BITS) !== EXPONENT_BITS) seen += pairs[pairs.push(bin, number) - 1];
    else if (ZEROS.has(bin)) zeros += number;
    else if (bin === UNSEEN) unseen = number;
    bin += 1;
  }
  const all = 1 + unseen / seen;
  if (seen > 0) for (let i = 1; i < pairs.length; i += 2) pairs[i] *= all;
  else if (unseen > 0 && low <= high) pairs.push(binOfValue(low), unseen / 2, binOfValue(high), unseen / 2);
  if (zeros > 0) pairs.push(0, zeros);
  return Float64Array.from(pairs);
}

/** The bin of a finite value: the upper 12 bits of the float32. */
function binOfValue(value: number): number {
  const word = new DataView(new ArrayBuffer(4));
  word.setFloat32(0, Math.min(Math.max(value, -LARGEST), LARGEST));
  return word.getUint32(0) >>> 20;
}

export function siteCount(frame: FrameData): number {
  return frame.sparklines.length / (QUANTITIES.length * SPARK);
}

export function decodeHistory(header: History, buffer: DataView | undefined): HistoryData {
  const reader = new Reader(header.type, buffer, header.steps * (1 + HISTORY_QUANTILES.length + HISTORY_BINS) + HISTORY_BINS + 1);
  const steps = reader.floats(header.steps);
  const quantiles = reader.floats(header.steps * HISTORY_QUANTILES.length);
  const edges = reader.floats(HISTORY_BINS + 1);
  const fractions = reader.floats(header.steps * HISTORY_BINS);
  return { header, steps, quantiles, edges, fractions };
}

export function decodeUpdates(header: Updates, buffer: DataView | undefined): UpdatesData {
  const reader = new Reader(header.type, buffer, header.steps * (1 + 2 * header.parameters.length));
  const each = (): Float64Array[] => header.parameters.map(() => reader.floats(header.steps));
  return { header, steps: reader.floats(header.steps), ratios: each(), lost: each() };
}

export function decodeChoices(header: Choices, buffer: DataView | undefined): ChoicesData {
  const { steps, rows, figures } = header;
  const reader = new Reader(header.type, buffer, steps * (1 + rows * figures.length));
  return { header, steps: reader.floats(steps), figures: figures.map(() => Array.from({ length: rows }, () => reader.floats(steps))) };
}

export function decodeCurves(header: Curves, buffer: DataView | undefined): CurveData[] {
  for (const counts of [header.points, header.recorded, header.not_finite]) {
    if (counts.length !== header.names.length) throw new ProtocolError(`curves has ${header.names.length} names and ${counts.length} counts.`);
  }
  const reader = new Reader(header.type, buffer, 2 * sum(header.points));
  return header.names.map((name, i) => ({ name, points: reader.floats(header.points[i] * 2), recorded: header.recorded[i], notFinite: header.not_finite[i] }));
}

export function decodeCasts(header: Casts, buffer: DataView | undefined): CastsData {
  const count = header.rows.length * CASTS.length * CAST_STATS.length;
  return { header, shares: new Reader(header.type, buffer, count).floats(count) };
}

export function decodeUnits(header: UnitStats, buffer: DataView | undefined): UnitsData {
  const reader = new Reader(header.type, buffer, UNIT_STATS.length * header.units);
  return { header, figures: toRecord(UNIT_STATS, UNIT_STATS.map(() => reader.floats(header.units))) };
}

const sum = (numbers: readonly number[]): number => numbers.reduce((all, one) => all + one, 0);

function toRecord<K extends string, T>(names: readonly K[], values: ArrayLike<T>): Record<K, T> {
  return Object.fromEntries(names.map((name, i) => [name, values[i]])) as Record<K, T>;
}

/** Reads a buffer in order: float64s, then bytes, in the numbers that its header gives. */
export class Reader {
  private readonly buffer: ArrayBufferLike;
  private at: number;

  constructor(what: string, view: DataView = new DataView(new ArrayBuffer(0)), floats: number, bytes = 0) {
    const expected = floats * 8 + bytes;
    if (view.byteLength !== expected) {
      throw new ProtocolError(`The buffer of ${what} has ${view.byteLength} bytes, ${expected} were expected.`);
    }
    this.buffer = view.buffer;
    this.at = view.byteOffset;
  }

  floats(count: number): Float64Array {
    const start = this.take(count * 8);
    if (start % 8 === 0) return new Float64Array(this.buffer, start, count);
    return new Float64Array(this.buffer.slice(start, this.at));
  }

  bytes(count: number): Uint8Array {
    return new Uint8Array(this.buffer, this.take(count), count);
  }

  private take(size: number): number {
    this.at += size;
    return this.at - size;
  }
}
