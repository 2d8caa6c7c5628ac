// The state of the panel "Words": the figures of a site at each position of an example.
// Invariants: at most one request is under way, and the last wish follows it; an answer for another
// site, example or unit than the wished one is ignored; the figures before stay until others come.
import { batch, signal } from "@preact/signals";
import type { KernelRequest } from "../kernel/bridge";
import { Reader } from "../kernel/decode";
import { LatestRequest } from "../kernel/latest";
import { POSITION_STATS, type Positions } from "../kernel/protocol";

export type PositionStatistic = (typeof POSITION_STATS)[number];

export interface PositionsData {
  readonly header: Positions;
  readonly figures: ReadonlyMap<PositionStatistic, Float64Array>;
}

interface PositionRequest {
  readonly site: string;
  readonly example: number;
  readonly unit: number;
  readonly axis: number | null;
}

export class WordsState {
  readonly data = signal<PositionsData | null>(null);
  readonly problem = signal("");
  readonly busy = signal(false);
  readonly figure = signal<PositionStatistic>("norm");
  readonly unit = signal(0);
  /** The chosen axis of the tokens in the site's array; null for the one that is found. */
  private axis: number | null = null;
  /** The position under the pointer or the keys. */
  readonly at = signal<number | null>(null);

  private wanted: PositionRequest | null = null;
  private readonly latest = new LatestRequest<PositionRequest>(
    (wish, settle) => {
      this.busy.value = true;
      this.ask({ type: "show_positions", ...wish }, settle);
    },
    (wish, error, next) => {
      if (!next) this.answered(wish, error);
      return true;
    },
  );

  constructor(private readonly ask: (request: KernelRequest, settle: (error: string | null) => void) => number) {}

  /** Request the present figures of a site, even those on screen: they may have changed. */
  show(site: string, example: number): void {
    if (this.wanted?.site !== site) this.data.value = this.axis = null;
    this.wanted = { site, example, unit: this.unit.value, axis: this.axis };
    this.latest.ask(this.wanted);
  }

  setUnit(unit: number): void {
    const most = (this.data.value?.header.units ?? 1) - 1;
    this.unit.value = Math.min(Math.max(Math.round(unit), 0), Math.max(most, 0));
    if (this.wanted) this.show(this.wanted.site, this.wanted.example);
  }

  setAxis(axis: number): void {
    this.axis = axis;
    this.unit.value = 0; // another axis has other units
    if (this.wanted) this.show(this.wanted.site, this.wanted.example);
  }

  receive(message: Positions, buffer: DataView | undefined): void {
    const { wanted } = this;
    if (wanted?.site !== message.site || wanted.example !== message.example || wanted.unit !== message.unit) return;
    const reader = new Reader(message.type, buffer, message.figures.length * message.positions);
    const figures = new Map(message.figures.map((name) => [name as PositionStatistic, reader.floats(message.positions)]));
    batch(() => {
      this.data.value = { header: message, figures };
      this.problem.value = message.along === null ? message.source : "";
      if (!figures.has(this.figure.value)) this.figure.value = "norm";
    });
  }

  private answered(wish: PositionRequest, error: string | null): void {
    batch(() => {
      this.busy.value = false;
      if (error === null) return;
      this.data.value = null;
      this.problem.value = error;
      this.unit.value = 0; // another site may have fewer units, and other axes
      this.axis = null;
    });
    if (error !== null && (wish.unit > 0 || wish.axis !== null)) this.show(wish.site, wish.example);
  }
}
