// What was asked of the selected site on demand: its parameters, its units, its code.
// Invariants: at most one request of each kind is under way, and the newest wish follows it; an
// answer for another site than the one that is wanted is ignored; looking again waits longer the
// longer the kernel took, so that a loop is not held up by who watches it.
import { signal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { Kernel } from "./bridge";
import { decodeParameters, decodeUnits, type ParametersData, type UnitsData } from "./decode";
import type { Code, Look, Parameters, UnitFigures } from "./protocol";

type What = Look["what"];
type Answer = Parameters | UnitFigures | Code;

interface Seen<T> {
  readonly site: string;
  /** Of an earlier moment while a newer one is under way; null before the first. */
  readonly data: T | null;
  readonly error: string;
}

interface Wish {
  site: string;
  /** Whether something newer than what was asked for last is wanted. */
  again: boolean;
  busy: boolean;
  began: number;
  timer: ReturnType<typeof setTimeout> | undefined;
}

const LEAST_MS = 500;
const SHARE = 4;

export class Looks {
  readonly parameters = signal<Seen<ParametersData> | null>(null);
  readonly units = signal<Seen<UnitsData> | null>(null);
  readonly code = signal<Seen<Code> | null>(null);

  private readonly wishes = new Map<What, Wish>();

  constructor(private readonly kernel: Kernel) {}

  /** Asks for what is there of a site now; soon, where it was asked for a moment ago. */
  look(what: What, site: string): void {
    let wish = this.wishes.get(what);
    if (!wish) this.wishes.set(what, (wish = { site, again: false, busy: false, began: 0, timer: undefined }));
    const other = wish.site !== site;
    wish.site = site;
    wish.again = true;
    if (wish.busy) return;
    if (other) {
      clearTimeout(wish.timer);
      wish.timer = undefined;
    }
    if (wish.timer === undefined) this.send(what, wish);
  }

  /** A panel that is not shown any more wants nothing. */
  forget(what: What): void {
    const wish = this.wishes.get(what);
    if (wish) wish.again = false;
  }

  receive(message: Answer, buffer: DataView | undefined): void {
    const what: What = message.type;
    if (this.wishes.get(what)?.site !== message.site) return;
    if (message.type === "parameters") {
      this.parameters.value = { site: message.site, data: decodeParameters(message, buffer), error: "" };
    } else if (message.type === "units") {
      this.units.value = { site: message.site, data: decodeUnits(message, buffer), error: "" };
    } else {
      this.code.value = { site: message.site, data: message, error: "" };
    }
  }

  private send(what: What, wish: Wish): void {
    const site = wish.site;
    wish.again = false;
    wish.busy = true;
    wish.began = performance.now();
    this.kernel.ask({ type: "look", what, site }, (error) => {
      wish.busy = false;
      if (error !== null && wish.site === site) this.failed(what, site, error);
      if (wish.site !== site && wish.again) return this.send(what, wish);
      const took = performance.now() - wish.began;
      wish.timer = setTimeout(
        () => {
          wish.timer = undefined;
          if (wish.again) this.send(what, wish);
        },
        Math.max(LEAST_MS, took * SHARE),
      );
    });
  }

  private failed(what: What, site: string, error: string): void {
    const of = this[what] as Signal<Seen<unknown> | null>;
    const before = of.value;
    // A training step has the arrays: what was seen before stays, beside the text.
    of.value = { site, data: before?.site === site ? before.data : null, error };
  }
}


/** Asks for what a panel shows: when it is first shown, and again when the site or the moment changes. */
export function useLook(looks: Looks, what: What, site: string, moment: unknown): void {
  useEffect(() => looks.look(what, site), [looks, what, site, moment]);
  useEffect(() => () => looks.forget(what), [looks, what]);
}
