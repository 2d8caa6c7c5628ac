// The units, the code and the NNX state of the selected site, what was compiled and what lower precision
// would do, requested on demand.
// Invariants: at most one request of each kind is under way, and the newest one follows it; an answer
// for a site that is no longer wanted is ignored; the longer the kernel took, the longer the next
// request waits, so that watching does not hold up a loop.
import { signal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { Kernel } from "./bridge";
import { decodeCasts, decodeUnits, type CastsData, type UnitsData } from "./decode";
import type { Casts, Code, Compilations, Look, Nnx, UnitStats } from "./protocol";

type QueryKind = Look["what"] | "nnx";
type QueryAnswer = UnitStats | Code | Compilations | Casts | Nnx;

interface QueryResult<T> {
  readonly site: string;
  /** The data; from an earlier moment while newer data is under way, null before the first. */
  readonly data: T | null;
  readonly error: string;
}

interface PendingQuery {
  site: string;
  /** The axis of the units. */
  axis: number;
  /** Whether newer data than that of the last request is wanted. */
  again: boolean;
  busy: boolean;
  began: number;
  timer: ReturnType<typeof setTimeout> | undefined;
}

const LEAST_WAIT_MS = 500;
const WAIT_FACTOR = 4;

export class SiteQueries {
  readonly units = signal<QueryResult<UnitsData> | null>(null);
  readonly code = signal<QueryResult<Code> | null>(null);
  readonly compilations = signal<QueryResult<Compilations> | null>(null);
  readonly casts = signal<QueryResult<CastsData> | null>(null);
  readonly nnx = signal<QueryResult<Nnx> | null>(null);

  private readonly wishes = new Map<QueryKind, PendingQuery>();

  constructor(private readonly kernel: Kernel) {}

  /** Request the present data of a site; a moment later if the last request was just made. */
  request(what: QueryKind, site: string, axis = -1): void {
    let wish = this.wishes.get(what);
    if (!wish) this.wishes.set(what, (wish = { site, axis, again: false, busy: false, began: 0, timer: undefined }));
    const other = wish.site !== site || wish.axis !== axis;
    wish.site = site;
    wish.axis = axis;
    wish.again = true;
    if (wish.busy) return;
    if (other) {
      clearTimeout(wish.timer);
      wish.timer = undefined;
    }
    if (wish.timer === undefined) this.send(what, wish);
  }

  /** Stop requesting data for a panel that is no longer shown. */
  forget(what: QueryKind): void {
    const wish = this.wishes.get(what);
    if (wish) wish.again = false;
  }

  receive(message: QueryAnswer, buffer: DataView | undefined): void {
    const what: QueryKind = message.type;
    const wish = this.wishes.get(what);
    if (wish?.site !== message.site || (message.type === "units" && message.axis !== wish.axis)) return;
    const data = message.type === "units" ? decodeUnits(message, buffer) : message.type === "casts" ? decodeCasts(message, buffer) : message;
    (this[what] as Signal<QueryResult<unknown> | null>).value = { site: message.site, data, error: "" };
  }

  private send(what: QueryKind, wish: PendingQuery): void {
    const { site, axis } = wish;
    wish.again = false;
    wish.busy = true;
    wish.began = performance.now();
    this.kernel.ask(what === "nnx" ? { type: "show_nnx", site } : { type: "look", what, site, axis }, (error) => {
      wish.busy = false;
      const same = wish.site === site && wish.axis === axis;
      if (error !== null && same) this.failed(what, site, error);
      if (!same && wish.again) return this.send(what, wish);
      const took = performance.now() - wish.began;
      wish.timer = setTimeout(
        () => {
          wish.timer = undefined;
          if (wish.again) this.send(what, wish);
        },
        Math.max(LEAST_WAIT_MS, took * WAIT_FACTOR),
      );
    });
  }

  private failed(what: QueryKind, site: string, error: string): void {
    const of = this[what] as Signal<QueryResult<unknown> | null>;
    const before = of.value;
    // If a training step has the arrays, the earlier data stays beside the text.
    of.value = { site, data: before?.site === site ? before.data : null, error };
  }
}

/** Requests a panel's data when it is first shown, and when the site or the moment changes. */
export function useSiteQuery(looks: SiteQueries, what: QueryKind, site: string, moment: unknown, axis = -1): void {
  useEffect(() => looks.request(what, site, axis), [looks, what, site, moment, axis]);
  useEffect(() => () => looks.forget(what), [looks, what]);
}
