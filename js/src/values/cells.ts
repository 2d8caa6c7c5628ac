// The buffer of a `values` message -> planes, and the facts of one cell.
// Invariant: a cell with a value that is not finite is marked as such; 64-bit integers stay exact.
import type { Values } from "../kernel/protocol";
import { ProtocolError } from "../kernel/version";

export interface Cells {
  /** Where the cells lie, in elements along tiles, rows and columns. */
  readonly header: Pick<Values, "starts" | "ends" | "block" | "counts">;
  /** The values, or the means of the blocks, [tiles, rows, columns]. */
  readonly mean: Float32Array | Float64Array;
  readonly low: Float32Array | Float64Array | null;
  readonly high: Float32Array | Float64Array | null;
  /** How many values of each block are NaN, +Inf and -Inf; null if there are none. */
  readonly bad: readonly [nan: FloatPlane, posinf: FloatPlane, neginf: FloatPlane] | null;
}
/** Cells that were read from the kernel. */
export type ReadCells = Cells & { readonly header: Values };
type FloatPlane = Float32Array | Float64Array;

const ITEM_SIZE = { float32: 4, float64: 8, int64: 8, uint64: 8 } as const;

export function decodeValues(header: Values, buffer: DataView | undefined): ReadCells | string[] {
  const view = buffer ?? new DataView(new ArrayBuffer(0));
  if (header.counts.length !== 3 || header.starts.length !== 3 || header.ends.length !== 3 || header.block.length !== 3) {
    throw new ProtocolError("values has counts, starts, ends and block of other than three axes.");
  }
  const count = header.counts[0]! * header.counts[1]! * header.counts[2]!;
  const step = Math.ceil((count * ITEM_SIZE[header.encoding]) / 8) * 8;
  if (view.byteLength !== step * header.planes.length) {
    throw new ProtocolError(`The buffer of values has ${view.byteLength} bytes, ${step * header.planes.length} were expected.`);
  }
  // a copy: the message's own buffer may lie at any offset
  const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) as ArrayBuffer;
  if (header.exact) return decodeExact(header, bytes, count, step);
  const plane = (name: string): FloatPlane | null => {
    const at = header.planes.indexOf(name);
    if (at < 0) return null;
    return header.encoding === "float32" ? new Float32Array(bytes, at * step, count) : new Float64Array(bytes, at * step, count);
  };
  const mean = plane("value") ?? plane("mean");
  if (!mean) throw new ProtocolError(`values has no plane "value" or "mean", only ${header.planes.join(", ")}.`);
  const bad = [plane("nan"), plane("posinf"), plane("neginf")] as const;
  return { header, mean, low: plane("low"), high: plane("high"), bad: bad[0] && bad[1] && bad[2] ? [bad[0], bad[1], bad[2]] : null };
}

/** The rows whose cells have the greatest norm, greatest first; [] where a cell stands for several values, or for one that is not finite. */
export function largestRows({ header: { block, counts }, mean }: Cells, most: number): number[] {
  if (block.some((n) => n > 1) || counts[0] !== 1) return [];
  const norms = Array.from({ length: counts[1]! }, (_, row) => Math.hypot(...mean.subarray(row * counts[2]!, (row + 1) * counts[2]!)));
  if (!norms.every(Number.isFinite)) return [];
  const rows = norms.flatMap((norm, row) => (norm > 0 ? [row] : []));
  return rows.sort((a, b) => norms[b]! - norms[a]!).slice(0, most);
}

/** Every digit, in a form that Python reads; complex numbers as "real imaginary". */
function decodeExact(header: Values, bytes: ArrayBuffer, count: number, step: number): string[] {
  const planes = header.planes.map((_, i) => {
    if (header.encoding === "int64") return new BigInt64Array(bytes, i * step, count);
    if (header.encoding === "uint64") return new BigUint64Array(bytes, i * step, count);
    return header.encoding === "float32" ? new Float32Array(bytes, i * step, count) : new Float64Array(bytes, i * step, count);
  });
  return Array.from({ length: count }, (_, i) => planes.map((plane) => digits(plane[i]!)).join(" "));
}

export function digits(value: number | bigint): string {
  return Object.is(value, -0) ? "-0" : String(value);
}

/** Whether the cell has NaN or Inf values, which its mean does not show. */
export function isBad(cells: Cells, at: number): boolean {
  if (cells.bad) return cells.bad.some((plane) => plane[at]! > 0);
  return !Number.isFinite(cells.mean[at]!);
}

/** The cell of an element; -1 if it is outside. */
export function cellAt({ header: h }: Cells, tile: number, row: number, column: number): number {
  const [t, r, c] = [tile, row, column].map((n, i) => Math.floor((Math.floor(n) - h.starts[i]!) / h.block[i]!)) as [number, number, number];
  if (t < 0 || r < 0 || c < 0 || t >= h.counts[0]! || r >= h.counts[1]! || c >= h.counts[2]!) return -1;
  return (t * h.counts[1]! + r) * h.counts[2]! + c;
}

export interface ColourRange {
  readonly low: number;
  readonly high: number;
  /** Whether zero is in the middle of the range. */
  readonly signed: boolean;
  /** The hue of what is above zero: by default blue; gradients are orange. */
  readonly hue?: "blue" | "orange";
}

/** The range of colours: from the 1st to the 99th percentile of the shown values, or all of them. */
export function colourRange(cells: Pick<Cells, "mean" | "low" | "high">, robust: boolean): ColourRange {
  const finite = cells.mean.filter((v) => Number.isFinite(v)).sort();
  if (finite.length === 0) return { low: 0, high: 1, signed: false };
  let [low, high] = [finite[0]!, finite[finite.length - 1]!];
  let least = low;
  if (cells.low && cells.high) {
    for (const v of cells.low) if (v < least) least = v;
    if (!robust) {
      low = least;
      for (const v of cells.high) if (v > high) high = v;
    }
  }
  if (robust) [low, high] = [quantile(finite, 0.01), quantile(finite, 0.99)];
  if (least < 0) {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return { low: -most, high: most, signed: true };
  }
  return high > low ? { low, high, signed: false } : { low: Math.min(low, 0), high: Math.max(high, low + (Math.abs(low) || 1)), signed: false };
}

function quantile(sorted: ArrayLike<number>, q: number): number {
  return sorted[Math.round((sorted.length - 1) * q)]!;
}
