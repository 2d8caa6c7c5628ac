// Buffers of what is asked on demand -> typed arrays, as nnx_inspector/protocol says. Little-endian.
import { UNIT_FIGURES, STATISTICS, type Parameter, type Parameters, type Statistic, type UnitFigures } from "../protocol";
import { ProtocolError } from "../validate";

export interface ParameterData extends Parameter {
  readonly figures: Readonly<Record<Statistic, number>>;
  /** Pairs (bin, count). */
  readonly pairs: Float64Array;
}

export interface ParametersData {
  readonly header: Parameters;
  readonly list: readonly ParameterData[];
}

export type UnitFigure = (typeof UNIT_FIGURES)[number];

export interface UnitsData {
  readonly header: UnitFigures;
  readonly figures: Readonly<Record<UnitFigure, Float64Array>>;
}

export function histogramsOf(header: Parameters, buffer: DataView | undefined): ParametersData {
  const size = header.parameters.length * STATISTICS.length;
  const all = floats(header.type, buffer, size + header.parameters.reduce((sum, p) => sum + 2 * p.bins, 0));
  let from = size;
  const list = header.parameters.map((parameter, i) => {
    const figures = Object.fromEntries(STATISTICS.map((name, k) => [name, all[i * STATISTICS.length + k]]));
    const pairs = all.subarray(from, from + 2 * parameter.bins);
    from += 2 * parameter.bins;
    return { ...parameter, figures: figures as Record<Statistic, number>, pairs };
  });
  return { header, list };
}

export function unitsOf(header: UnitFigures, buffer: DataView | undefined): UnitsData {
  const all = floats(header.type, buffer, UNIT_FIGURES.length * header.units);
  const figures = Object.fromEntries(
    UNIT_FIGURES.map((name, i) => [name, all.subarray(i * header.units, (i + 1) * header.units)]),
  );
  return { header, figures: figures as Record<UnitFigure, Float64Array> };
}

function floats(what: string, buffer: DataView | undefined, count: number): Float64Array {
  const length = buffer?.byteLength ?? 0;
  if (length !== count * 8) {
    throw new ProtocolError(`The buffer of ${what} has ${length} bytes, ${count * 8} were expected.`);
  }
  if (!buffer) return new Float64Array(0);
  const { buffer: bytes, byteOffset: start } = buffer;
  return new Float64Array(start % 8 === 0 ? bytes : bytes.slice(start, start + length), start % 8 === 0 ? start : 0, count);
}

