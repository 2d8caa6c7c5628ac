// What the panels "Lens", "Attribution" and "Examples" ask for, and what they show.
// Invariants: nothing is computed before a button is pressed; another example, position or unit of
// what is there is only shown; a message without an error replaces the one before, and while the
// next is computed the one before stays. A refusal is shown where one clicked, until a study ends.
import { useEffect } from "preact/hooks";
import { signal, type Signal } from "@preact/signals";
import type { InputsState } from "../inputs/state";
import type { KernelRequest } from "../kernel/bridge";
import type { Attributed, Lens, Logits, Study, Sweep, UnitExamples } from "../kernel/protocol";
import { PixelsState } from "./pixels";

type Message = Lens | Logits | Attributed | UnitExamples;
export type StudyKind = Message["type"] | Sweep["type"];
type StudyOptions = Pick<Study, "example" | "position" | "unit" | "axis" | "site" | "token" | "unembed" | "norm" | "method">;

/** The last message of a study, and the last one with something in it. */
export interface StudyResult<T extends Message> {
  readonly latest: T;
  readonly found: T | null;
}

export class StudiesState {
  readonly lens = signal<StudyResult<Lens> | null>(null);
  readonly logits = signal<StudyResult<Logits> | null>(null);
  readonly attribution = signal<StudyResult<Attributed> | null>(null);
  readonly examples = signal<StudyResult<UnitExamples> | null>(null);
  /** The picture of what each pixel counts. */
  readonly pixels: PixelsState;
  /** The request that was refused, and why. */
  readonly refused = signal<{ readonly what: StudyKind; readonly why: string } | null>(null);
  /** What is under way, in its order: all but the first wait. */
  readonly queue = signal<readonly StudyKind[]>([]);
  readonly options = signal<StudyOptions>({
    site: "", example: 0, position: -1, unit: 0, axis: -1, token: null, unembed: "", norm: "", method: "gradient_times_input",
  });

  constructor(
    private readonly kernel: (request: KernelRequest, settle: (error: string | null) => void) => number,
    private readonly inputs: InputsState,
  ) {
    this.pixels = new PixelsState(() => this.attribution.value?.found ?? null, inputs);
  }

  receive(message: Message): void {
    const of = this[message.type] as Signal<StudyResult<Message> | null>;
    const empty = message.running || message.error !== "";
    const none = message.type === "logits" && !empty && message.bars.length === 0; // of a lens that is gone
    of.value = none ? null : { latest: message, found: empty ? (of.value?.found ?? null) : message };
    if (message.type === "examples" && !empty) this.setOptions({ unit: message.unit, axis: message.axis }); // perhaps chosen in Python
    this.noteProgress(message.type, message.running);
  }

  /** A study begins or ends: what it, or its end, has overtaken is no longer refused. */
  noteProgress(what: StudyKind, running: boolean): void {
    if (!running || this.refused.value?.what === what) this.refused.value = null;
    const others = this.queue.value.filter((one) => one !== what);
    if (!running) this.queue.value = others;
    else if (!this.queue.value.includes(what)) this.queue.value = [...others, what];
  }

  setOptions(wish: Partial<StudyOptions>): void {
    this.options.value = { ...this.options.value, ...wish };
  }

  /** Compute a study, or with `again` false show another part of the last one. */
  request(what: Study["what"], wish: Partial<StudyOptions>, again: boolean): void {
    if (what !== "logits") this.setOptions(wish); // its position is not that of an attribution
    this.kernel({ type: "study", what, again, ...this.options.value, ...wish }, this.settle(what));
  }

  /** Takes the reply to a request. */
  settle(what: StudyKind): (error: string | null) => void {
    return (why) => {
      if (why !== null) this.refused.value = { what, why };
    };
  }

  /** Whether what was found is of another batch than the one that a study would look at now. */
  isOutdated(found: Message | null | undefined): boolean {
    const now = this.inputs.inputs.value;
    return !!found && !!now && found.batch >= 0 && found.batch !== now.number;
  }

  /** Show the chosen example of what was found. */
  useExample(what: "lens" | "attribution", example: number, live: boolean): void {
    const shown = this[what].value;
    const found = shown?.found;
    const other = live && shown !== null && found && found.example !== example && !this.isOutdated(found) && !shown.latest.running && shown.latest.error === "";
    useEffect(() => {
      if (other) this.request(what, { example }, false);
    }, [other, example]);
  }

  stop(): void {
    this.kernel({ type: "stop_study" }, () => undefined);
  }
}
