// The examined batch as people read it: the words of its examples, and which example is looked at.
// Invariant: a word is given only for an axis that is known to hold the positions of the tokens, and
// for a known example; every other place keeps its number.
import { batch, signal } from "@preact/signals";
import type { KernelRequest } from "../kernel/bridge";
import type { Inputs, Pictures } from "../kernel/protocol";
import { withoutLayers } from "../kernel/sites";

/** The names of axes that hold positions; `values/axes.py` gives them, and counts repeated ones. */
const POSITION_AXIS = /^(position|query|key)( \d+)?$/;

const CHOOSE_MS = 100;

export class InputsState {
  readonly inputs = signal<Inputs | null>(null);
  /** The example that all panels look at. */
  readonly example = signal(0);
  /** The line of Python of the open panel that looks at one example; "" if none is open. */
  readonly line = signal("");
  /** Whether the last click chose an example, so that this line says what was clicked. */
  readonly clicked = signal(false);

  private userChose = false;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** `shown` gives the site and the part whose arrays are on screen. */
  constructor(
    private readonly ask?: (request: KernelRequest) => void,
    private readonly shownArrays: () => readonly [site: string, part: string] = () => ["", "output"],
  ) {}

  choose(example: number): void {
    if (example === this.example.value) return;
    this.userChose = true;
    batch(() => {
      this.example.value = example;
      this.clicked.value = true;
    });
    clearTimeout(this.timer); // a slider passes many
    this.timer = setTimeout(() => this.ask?.({ type: "choose_example", example }), CHOOSE_MS);
  }

  take(message: Inputs): void {
    batch(() => {
      this.inputs.value = message;
      if (!this.userChose) this.example.value = message.example;
      if (this.example.value >= message.batch) this.example.value = 0;
    });
  }

  /** Let all panels look at the batch of the last forward pass, or of the last step. */
  chooseBatch(which: Inputs["kind"]): void {
    this.ask?.({ type: "choose_batch", which });
  }

  /** The pictures of a batch, if it is still the one that is looked at; null for any other. */
  picturesOf(batch: number): Pictures | null {
    const inputs = this.inputs.value;
    return inputs?.number === batch ? (inputs.pictures ?? null) : null;
  }

  /** Whether examples that are those of the batch stand in a row of pictures or texts. */
  hasExampleRow(ofBatch: boolean): boolean {
    const inputs = this.inputs.value;
    return ofBatch && inputs !== null && Math.max(inputs.pictures?.count ?? 0, inputs.examples.length) > 0;
  }

  /** The words of an example; [] if there are none. */
  words(example: number): readonly string[] {
    return this.inputs.value?.examples[example]?.words ?? [];
  }

  /** The beginning of a text. */
  beginning(words: readonly string[], letters: number): string {
    const gap = areWholeWords(words) ? " " : "";
    let text = "";
    for (const word of words) {
      if (text.length + word.length > letters) return `${text}…`;
      text += (text && gap) + visibleText(word);
    }
    return text;
  }

  /** The word at each axis of an element of an array; null where there is none. */
  labels(axes: readonly string[], shape: readonly number[], at: readonly number[]): (string | null)[] {
    const example = exampleAt(axes, shape, at, this.inputs.value);
    return axes.map((name, axis) => this.positionLabel(name, shape[axis]!, at[axis]!, example));
  }

  /** The words along an axis, "position (12)", over which all examples are measured: those of the only one. */
  axisWords(axis: string | undefined): readonly string[] | undefined {
    const [, name, length] = /^(.*) \((\d+)\)$/.exec(axis ?? "") ?? [];
    return name !== undefined && this.inputs.value?.batch === 1 && this.isPositionAxis(name, Number(length)) ? this.words(0) : undefined;
  }

  /** Whether an axis of this name and length holds the positions of the tokens. */
  isPositionAxis(axis: string, length: number): boolean {
    const inputs = this.inputs.value;
    if (inputs === null || inputs.tokens === "" || length !== inputs.positions || !POSITION_AXIS.test(axis)) return false;
    const [site, part] = this.shownArrays();
    const whole = withoutLayers(site);
    return !inputs.apart.some((one) => one === "*" || one === whole || (part === "input" && one === `${whole} input`));
  }

  /** The word at an index of an axis; null if the place has no word. */
  positionLabel(axis: string, length: number, index: number, example: number): string | null {
    return this.isPositionAxis(axis, length) ? (this.words(example)[index] ?? null) : null;
  }
}

/** Whether these are whole words, or numbers, which have no spaces of their own, unlike letters and parts of words. */
export function areWholeWords(words: readonly string[]): boolean {
  if (words.every((word) => /^-?\d+$/.test(word))) return true;
  return words.some((word) => word.length > 1) && !words.some((word) => /\s|^[▁Ġ]|^##/.test(word));
}

/** A word as text on a picture, short enough for its place. */
export function shortenWord(word: string, letters: number): string {
  const signs = [...visibleText(word)];
  return signs.length > letters ? `${signs.slice(0, letters - 1).join("")}…` : signs.join("");
}

/** The example that a slice of an array shows; -1 if it is not one of the batch. */
export function exampleAt(axes: readonly string[], shape: readonly number[], at: readonly number[], inputs: Inputs | null): number {
  const axis = axes.indexOf("batch");
  if (!inputs) return -1;
  if (axis >= 0) return shape[axis] === inputs.batch ? (at[axis] ?? -1) : -1;
  return inputs.batch === 1 ? 0 : -1;
}

/** A word in which whitespace and control characters are visible; it is shown as text only. */
export function visibleText(word: string): string {
  if (word === "") return "∅";
  return word.replace(/[\s\p{Cc}\u200b\u200c\u2060]/gu, (c) => SPACE_SIGNS[c] ?? controlSign(c.codePointAt(0)!));
}

const SPACE_SIGNS: Readonly<Record<string, string>> = { " ": "·", "\n": "⏎", "\t": "⇥", "\u007f": "␡" };
const controlSign = (code: number): string => (code < 32 ? String.fromCodePoint(0x2400 + code) : "⍽");
