// The data of a saved page (screen/export/replay.py packs it): an index in JSON, and arrays whose
// bytes lie plane by plane. Invariant: data that does not fit its index is a ProtocolError, never a
// short read; the messages read from it are those that the kernel would have sent.
import { PARAMETER_QUANTITIES, QUANTITIES, ROW_STATS, SPARK, STATISTICS, VERSION, type Frame, type FrameParameter, type Histogram, type Layout, type Progress, type State } from "../kernel/protocol"; // prettier-ignore
import { ProtocolError, checkVersion } from "../kernel/version";
import type { ValuesPart } from "../values/state";

export type Message = readonly [header: unknown, buffer: DataView | undefined];

interface ArrayPlace {
  readonly at: number;
  readonly count: number;
  readonly type: keyof typeof ARRAY_TYPES;
}

interface PackedMessage {
  readonly header: { readonly site?: number; readonly quantity?: number };
  /** Arrays that follow one another as float64 or bytes; empty if there is no buffer. */
  readonly buffer: readonly ArrayPlace[];
}

interface SavedPass {
  readonly number: number;
  readonly step: number;
  readonly perturbed: boolean;
  readonly metrics: Record<string, number | null>;
}

interface RecordingIndex {
  readonly version: number;
  readonly note: string;
  readonly layout: Layout;
  readonly state: State;
  readonly kept: readonly unknown[];
  readonly curves: PackedMessage;
  readonly passes: PackedMessage;
  readonly library: ArrayPlace;
  readonly histories: readonly PackedMessage[];
  readonly answers: Readonly<Record<string, readonly (readonly [string, PackedMessage | { readonly error: string }])[]>>;
  readonly missing?: readonly string[];
  readonly frames: readonly SavedPass[];
  readonly table: ArrayPlace;
  readonly sparklines: ArrayPlace;
  readonly rows: ArrayPlace;
  /** The parameters of detailed sites, and how many of each of these sites are left out. */
  readonly parameters: readonly { readonly site: number; readonly path: string; readonly name: string }[];
  readonly more: readonly number[];
  readonly figures: ArrayPlace;
  readonly ratios: ArrayPlace;
  readonly detailed: readonly number[];
  readonly lengths: ArrayPlace;
  readonly counts: ArrayPlace;
}

const NO_HISTOGRAM = 0xffff;
const PARAMETER_WIDTH = PARAMETER_QUANTITIES.length * STATISTICS.length;
const ARRAY_TYPES = { u1: Uint8Array, u2: Uint16Array, f4: Float32Array, f8: Float64Array } as const;

export class SavedRecording {
  readonly note: string;
  readonly layout: Layout;
  readonly state: State;
  readonly kept: readonly unknown[];
  /** The kinds of answers that it has for no site. */
  readonly missing: ReadonlySet<string>;
  /** The number of passes. */
  readonly count: number;

  private readonly index: RecordingIndex;
  private readonly from: number;
  private readonly rows: ReadonlyMap<string, number>;
  private readonly answers = new Map<string, Map<string, PackedMessage | { readonly error: string }>>();
  private readonly table: Float64Array;
  private readonly sparklines: Uint8Array;
  private readonly weights: Float64Array;
  private readonly figures: Float64Array;
  private readonly ratios: Float64Array;
  private readonly lengths: Uint16Array;
  private readonly counts: Uint8Array;
  /** The start of the counts of each pass, for each pair of site (then parameter) and quantity. */
  private readonly starts: Uint32Array;

  constructor(private readonly bytes: Uint8Array) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (bytes.length < 4) throw new ProtocolError("The recording is empty.");
    this.from = 4 + view.getUint32(0, true);
    if (this.from > bytes.length) throw new ProtocolError("The recording is cut off.");
    const index = JSON.parse(new TextDecoder().decode(bytes.subarray(4, this.from))) as RecordingIndex;
    if (index.version !== VERSION) throw new ProtocolError(`The recording has version ${index.version} of the protocol, this page ${VERSION}.`);
    this.index = index;
    this.note = index.note;
    this.layout = checkVersion(index.layout) as Layout;
    this.state = checkVersion(index.state) as State;
    this.kept = index.kept;
    this.missing = new Set(index.missing ?? []);
    this.count = index.frames.length;
    this.rows = new Map(this.layout.sites.map((site, i) => [site.key, i]));
    for (const [what, bySite] of Object.entries(index.answers)) this.answers.set(what, new Map(bySite));
    const mine = index.parameters.length;
    const pairs = index.detailed.length * QUANTITIES.length + mine * PARAMETER_QUANTITIES.length;
    this.weights = this.numbers(index.rows, this.rows.size * ROW_STATS.length * this.count) as Float64Array;
    this.figures = this.numbers(index.figures, mine * PARAMETER_WIDTH * this.count) as Float64Array;
    this.ratios = this.numbers(index.ratios, mine * this.count) as Float64Array;
    this.table = this.numbers(index.table, this.rows.size * QUANTITIES.length * STATISTICS.length * this.count) as Float64Array;
    this.sparklines = this.numbers(index.sparklines, this.rows.size * QUANTITIES.length * SPARK * this.count) as Uint8Array;
    this.lengths = this.numbers(index.lengths, pairs * this.count) as Uint16Array;
    this.counts = this.numbers(index.counts) as Uint8Array;
    this.starts = new Uint32Array(this.lengths.length + 1);
    this.lengths.forEach((length, i) => (this.starts[i + 1] = this.starts[i] + (length === NO_HISTOGRAM ? 0 : length)));
    if (this.starts[this.lengths.length] !== this.counts.length) throw new ProtocolError("The recording's histograms do not fit its passes.");
  }

  /** The row of a site, or undefined. */
  row(site: string): number | undefined {
    return this.rows.get(site);
  }

  /** The place of the pass with this number, -1 for none. */
  indexOf(number: number): number {
    return this.index.frames.findIndex((one) => one.number === number);
  }

  library(): DataView {
    return toDataView(this.numbers(this.index.library));
  }

  curves(): Message {
    return this.message(this.index.curves);
  }

  passes(): Message {
    return this.message(this.index.passes);
  }

  histories(row: number): Message[] {
    return this.index.histories.filter(({ header }) => header.site === row).map((one) => this.message(one));
  }

  /** The kept answer for a site: a message without its number, the text of an error, or null. */
  answer(what: string, site: string): Message | string | null {
    const found = this.answers.get(what)?.get(site);
    if (!found) return null;
    return "error" in found ? found.error : this.message(found);
  }

  /** The part of the selected site whose values were opened last, without perturbations left out. */
  opened(): ValuesPart | undefined {
    const keys = [...(this.answers.get("values")?.keys() ?? [])].map((key): unknown[] => JSON.parse(key) as unknown[]);
    return keys.findLast(([site, , clean, ...more]) => site === this.state.selected && clean === false && more.length === 0)?.[1] as ValuesPart | undefined;
  }

  /** The frame of a pass, with the histograms of a row. */
  frame(at: number, row: number, { seq, held, progress }: { seq: number; held: boolean; progress: Progress }): [Frame, DataView] {
    const one = this.index.frames[at];
    const width = QUANTITIES.length * STATISTICS.length * this.rows.size;
    const sparks = QUANTITIES.length * SPARK;
    const histograms: Histogram[] = [];
    const bodies: Uint8Array[] = [];
    const detail = this.index.detailed.indexOf(row);
    for (let quantity = 0; detail >= 0 && quantity < QUANTITIES.length; quantity++) {
      const counts = this.body(detail * QUANTITIES.length + quantity, at);
      if (!counts) continue;
      histograms.push({ site: row, quantity, bytes: counts.length });
      bodies.push(counts);
    }
    const parameters: FrameParameter[] = [];
    const rows = this.rows.size * ROW_STATS.length;
    const floats = Array.from({ length: width }, (_, i) => this.table[i * this.count + at]);
    for (let i = 0; i < rows; i++) floats.push(this.weights[i * this.count + at]);
    this.index.parameters.forEach(({ site, path, name }, i) => {
      const first = this.index.detailed.length * QUANTITIES.length + i * PARAMETER_QUANTITIES.length;
      const counts = PARAMETER_QUANTITIES.map((_, quantity) => this.body(first + quantity, at));
      if (site !== row || !counts[0]) return;
      const ratio = this.ratios[i * this.count + at];
      parameters.push({ path, name, update_ratio: Number.isFinite(ratio) ? ratio : null, bytes: counts.map((body) => body?.length ?? -1) });
      bodies.push(...counts.filter((body) => body !== null));
      for (let j = i * PARAMETER_WIDTH; j < (i + 1) * PARAMETER_WIDTH; j++) floats.push(this.figures[j * this.count + at]);
    });
    let next = floats.length * 8 + this.rows.size * sparks;
    const buffer = new ArrayBuffer(next + bodies.reduce((sum, body) => sum + body.length, 0));
    new Float64Array(buffer, 0, floats.length).set(floats);
    for (const body of bodies) {
      new Uint8Array(buffer).set(body, next);
      next += body.length;
    }
    const lines = new Uint8Array(buffer, floats.length * 8, this.rows.size * sparks);
    for (let i = 0; i < lines.length / SPARK; i++) {
      const from = (i * this.count + at) * SPARK;
      lines.set(this.sparklines.subarray(from, from + SPARK), i * SPARK);
    }
    const header: Frame = {
      type: "frame", version: VERSION, seq, layout: this.layout.layout, step: one.step, perturbed: one.perturbed,
      metrics: one.metrics, histograms, parameters, more: parameters.length > 0 ? this.index.more[detail] : 0, progress, number: one.number, held,
    }; // prettier-ignore
    return [header, new DataView(buffer)];
  }

  /** The counts of a pair of site (or parameter) and quantity in a pass; null if there are none. */
  private body(pair: number, at: number): Uint8Array | null {
    const i = pair * this.count + at;
    return this.lengths[i] === NO_HISTOGRAM ? null : this.counts.subarray(this.starts[i], this.starts[i + 1]);
  }

  private message({ header, buffer }: PackedMessage): Message {
    if (buffer.length === 0) return [header, undefined];
    // float64 as they are: they may be the bits of something else
    const parts = buffer.map((place) => (place.type === "f4" ? Float64Array.from(this.numbers(place)) : this.numbers(place)));
    const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.byteLength, 0));
    let next = 0;
    for (const part of parts) {
      bytes.set(new Uint8Array(part.buffer), next);
      next += part.byteLength;
    }
    return [header, toDataView(bytes)];
  }

  private numbers({ at, count, type }: ArrayPlace, expected = count): InstanceType<(typeof ARRAY_TYPES)[keyof typeof ARRAY_TYPES]> {
    const size = ARRAY_TYPES[type]?.BYTES_PER_ELEMENT;
    const from = this.from + at;
    if (!(size > 0) || count !== expected || !(at >= 0) || !(from + count * size <= this.bytes.length)) {
      throw new ProtocolError("The recording does not fit its index.");
    }
    const plain = new Uint8Array(count * size);
    for (let plane = 0; plane < size; plane++) {
      const start = from + plane * count;
      for (let i = 0; i < count; i++) plain[i * size + plane] = this.bytes[start + i];
    }
    return new ARRAY_TYPES[type](plain.buffer);
  }
}

function toDataView(array: ArrayBufferView): DataView {
  return new DataView(array.buffer as ArrayBuffer, array.byteOffset, array.byteLength);
}
