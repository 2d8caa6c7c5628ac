// What the panels "Lens", "Attribution" and "Examples" ask for, and what they show.
// Invariants: nothing is computed before a button is pressed; another example, position or unit of
// what is there is only shown; a message without an error replaces the one before, and while the
// next is computed the one before stays. A refusal is shown where one clicked, until a study ends.
import { useEffect } from "preact/hooks";
import { signal, type Signal } from "@preact/signals";
import type { InputsState } from "../inputs/state";
import type { Ask } from "../kernel/bridge";
import type { Attributed, Lens, Logits, Study, Sweep, UnitExamples } from "../kernel/protocol";
import { PixelsState } from "./pixels";

type Message = Lens | Logits | Attributed | UnitExamples;
export type What = Message["type"] | Sweep["type"];
type Wish = Pick<Study, "example" | "position" | "unit" | "axis" | "site" | "token" | "unembed" | "norm" | "method">;

/** The last message of a study, and the last one with something in it. */
export interface Shown<T extends Message> {
  readonly now: T;
  readonly found: T | null;
}

export class StudiesState {
  readonly lens = signal<Shown<Lens> | null>(null);
  readonly logits = signal<Shown<Logits> | null>(null);
  readonly attribution = signal<Shown<Attributed> | null>(null);
  readonly examples = signal<Shown<UnitExamples> | null>(null);
  /** The picture of what each pixel counts. */
  readonly pixels: PixelsState;
  /** The request that was refused, and why. */
  readonly refused = signal<{ readonly what: What; readonly why: string } | null>(null);
  /** What is under way, in its order: all but the first wait. */
  readonly order = signal<readonly What[]>([]);
  readonly wish = signal<Wish>({
    site: "", example: 0, position: -1, unit: 0, axis: -1, token: null, unembed: "", norm: "", method: "gradient_times_input",
  });

  constructor(
    private readonly kernel: (request: Ask, settle: (error: string | null) => void) => number,
    private readonly inputs: InputsState,
  ) {
    this.pixels = new PixelsState(() => this.attribution.value?.found ?? null, inputs);
  }

  receive(message: Message): void {
    const of = this[message.type] as Signal<Shown<Message> | null>;
    const empty = message.running || message.error !== "";
    const none = message.type === "logits" && !empty && message.bars.length === 0; // of a lens that is gone
    of.value = none ? null : { now: message, found: empty ? (of.value?.found ?? null) : message };
    if (message.type === "examples" && !empty) this.change({ unit: message.unit, axis: message.axis }); // perhaps chosen in Python
    this.heard(message.type, message.running);
  }

  /** A study begins or ends: what it, or its end, has overtaken is no longer refused. */
  heard(what: What, running: boolean): void {
    if (!running || this.refused.value?.what === what) this.refused.value = null;
    const others = this.order.value.filter((one) => one !== what);
    if (!running) this.order.value = others;
    else if (!this.order.value.includes(what)) this.order.value = [...others, what];
  }

  change(wish: Partial<Wish>): void {
    this.wish.value = { ...this.wish.value, ...wish };
  }

  /** Compute a study, or with `again` false show another part of the last one. */
  ask(what: Study["what"], wish: Partial<Wish>, again: boolean): void {
    if (what !== "logits") this.change(wish); // its position is not that of an attribution
    this.kernel({ type: "study", what, again, ...this.wish.value, ...wish }, this.settle(what));
  }

  /** Takes the reply to a request. */
  settle(what: What): (error: string | null) => void {
    return (why) => {
      if (why !== null) this.refused.value = { what, why };
    };
  }

  /** Whether what was found is of another batch than the one that a study would look at now. */
  isOld(found: Message | null | undefined): boolean {
    const now = this.inputs.inputs.value;
    return !!found && !!now && found.batch >= 0 && found.batch !== now.number;
  }

  /** Show the chosen example of what was found. */
  useExample(what: "lens" | "attribution", example: number, live: boolean): void {
    const shown = this[what].value;
    const found = shown?.found;
    const other = live && shown !== null && found && found.example !== example && !this.isOld(found) && !shown.now.running && shown.now.error === "";
    useEffect(() => {
      if (other) this.ask(what, { example }, false);
    }, [other, example]);
  }

  stop(): void {
    this.kernel({ type: "stop_study" }, () => undefined);
  }
}
