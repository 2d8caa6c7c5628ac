// Buffers of messages -> typed arrays, in the order that nnx_inspector/protocol gives. Little-endian.
// Invariant: honours the view's byteOffset, copies only where float64 would be unaligned, and a
// buffer of another length than its header says is a `ProtocolError`, never a short read.
import {
  HISTORY_BINS,
  HISTORY_QUANTILES,
  QUANTITIES,
  SPARK,
  STATISTICS,
  type Curves,
  type Frame,
  type History,
} from "./protocol";
import { ProtocolError } from "./validate";

export interface FrameData {
  readonly header: Frame;
  /** [site, quantity, statistic]: read it with `statistic`. */
  readonly table: Float64Array;
  /** Pairs (bin, count) by `histogramKey`. */
  readonly histograms: ReadonlyMap<string, Float64Array>;
  /** [site, quantity, SPARK]. */
  readonly sparklines: Uint8Array;
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

export interface CurveData {
  readonly name: string;
  /** [points, 2]: step and value. */
  readonly points: Float64Array;
}

export const histogramKey = (site: number, quantity: number): string => `${site}/${quantity}`;

const INDEX = new Map<string, number>(STATISTICS.map((name, i) => [name, i]));

/** One figure of the table; NaN where it was not measured. */
export function statistic(frame: FrameData, site: number, quantity: number, name: (typeof STATISTICS)[number]): number {
  return frame.table[(site * QUANTITIES.length + quantity) * STATISTICS.length + INDEX.get(name)!];
}

/** The heights of a site's sparkline; null where it was not measured. */
export function sparkline(frame: FrameData | null, site: number): Uint8Array | null {
  if (!frame || site < 0 || Number.isNaN(statistic(frame, site, 0, "size"))) return null;
  const from = site * QUANTITIES.length * SPARK;
  return frame.sparklines.subarray(from, from + SPARK);
}

export function decodeFrame(header: Frame, buffer: DataView | undefined): FrameData {
  const reader = new Reader(header.type, buffer);
  const pairs = header.histograms.reduce((sum, h) => sum + h.bins, 0);
  const perSite = QUANTITIES.length * (STATISTICS.length * 8 + SPARK);
  const sites = (reader.length - pairs * 16) / perSite;
  if (!Number.isInteger(sites) || sites < 0) {
    throw new ProtocolError(`The buffer of frame ${header.seq} has ${reader.length} bytes: not a whole number of sites.`);
  }
  const table = reader.floats(sites * QUANTITIES.length * STATISTICS.length);
  const histograms = new Map<string, Float64Array>();
  for (const h of header.histograms) histograms.set(histogramKey(h.site, h.quantity), reader.floats(h.bins * 2));
  const sparklines = reader.bytes(sites * QUANTITIES.length * SPARK);
  reader.end();
  return { header, table, histograms, sparklines };
}

export function sitesOf(frame: FrameData): number {
  return frame.sparklines.length / (QUANTITIES.length * SPARK);
}

export function decodeHistory(header: History, buffer: DataView | undefined): HistoryData {
  const reader = new Reader(header.type, buffer);
  const steps = reader.floats(header.steps);
  const quantiles = reader.floats(header.steps * HISTORY_QUANTILES.length);
  const edges = reader.floats(HISTORY_BINS + 1);
  const fractions = reader.floats(header.steps * HISTORY_BINS);
  reader.end();
  return { header, steps, quantiles, edges, fractions };
}

export function decodeCurves(header: Curves, buffer: DataView | undefined): CurveData[] {
  if (header.names.length !== header.points.length) {
    throw new ProtocolError(`curves has ${header.names.length} names and ${header.points.length} points.`);
  }
  const reader = new Reader(header.type, buffer);
  const curves = header.names.map((name, i) => ({ name, points: reader.floats(header.points[i] * 2) }));
  reader.end();
  return curves;
}

export class Reader {
  private readonly view: DataView;
  private offset = 0;

  constructor(
    private readonly what: string,
    buffer: DataView | undefined,
  ) {
    this.view = buffer ?? new DataView(new ArrayBuffer(0));
  }

  get length(): number {
    return this.view.byteLength;
  }

  floats(count: number): Float64Array {
    const start = this.take(count * 8);
    const { buffer } = this.view;
    if (start % 8 === 0) return new Float64Array(buffer, start, count);
    return new Float64Array(buffer.slice(start, start + count * 8));
  }

  bytes(count: number): Uint8Array {
    return new Uint8Array(this.view.buffer, this.take(count), count);
  }

  end(): void {
    if (this.offset !== this.length) {
      throw new ProtocolError(`The buffer of ${this.what} has ${this.length} bytes, ${this.offset} were expected.`);
    }
  }

  private take(size: number): number {
    if (this.offset + size > this.length) {
      throw new ProtocolError(
        `The buffer of ${this.what} has ${this.length} bytes, at least ${this.offset + size} were expected.`,
      );
    }
    const start = this.view.byteOffset + this.offset;
    this.offset += size;
    return start;
  }
}
