// The comparison of two passes, and the pass of another run to compare with.
// Invariants: another run's pass is pinned once, when it arrives; one request at a time; a comparison
// names its two passes. The kernel computes; nothing is derived here.
import { batch, signal, type Signal } from "@preact/signals";
import type { KernelRequest } from "../kernel/bridge";
import type { FrameData } from "../kernel/decode";
import { OTHER, type Compared, type Other, type Weights } from "../kernel/protocol";
import type { Timeline } from "../time/timeline";

/** The parts of the store that it needs. */
interface Dependencies {
  readonly frame: Signal<FrameData | null>;
  readonly timeline: Timeline;
  readonly panel: Signal<string>;
  ask(request: KernelRequest, settle: (error: string | null) => void): void;
}

export class CompareState {
  readonly other = signal<Other | null>(null);
  readonly result = signal<Compared | null>(null);
  readonly weights = signal<Weights | null>(null);
  readonly busy = signal(false);
  readonly error = signal("");
  /** The quantity that is ranked. */
  readonly quantity = signal("output");
  private lastOffer = 0;
  private lastRequest = "";

  constructor(private readonly deps: Dependencies) {}

  takeOther(message: Other): void {
    const { timeline, panel } = this.deps;
    const isNew = message.number > this.lastOffer; // sent again to a reloaded page
    this.lastOffer = message.number;
    batch(() => {
      this.other.value = message.name === "" ? null : message;
      if (!isNew) return;
      this.lastRequest = "";
      if (this.result.value?.pinned === OTHER) this.result.value = null;
      if (message.name === "") {
        if (timeline.pinned.value?.header.number === OTHER) timeline.unpin();
        return;
      }
      timeline.pinOther();
      panel.value = "compare";
    });
  }

  takeWeights(message: Weights): void {
    // what comes before the first frame, or again, was compared before the page was opened
    const again = JSON.stringify(message) === JSON.stringify(this.weights.value);
    const shows = message.name !== "" && !again && this.deps.frame.value !== null;
    batch(() => {
      this.weights.value = message.name === "" ? null : message;
      if (shows) this.deps.panel.value = "compare";
    });
  }

  take(message: Compared): void {
    this.result.value = message;
  }

  /** Compare the pass on screen with the pinned one; the same two passes again only if `again`. */
  ask(again = true): void {
    const number = this.deps.frame.value?.header.number;
    const pinned = this.deps.timeline.pinned.value?.header.number;
    const two = `${number} ${pinned}`;
    if (number === undefined || pinned === undefined || this.busy.value || (two === this.lastRequest && !again)) return;
    this.lastRequest = two;
    batch(() => {
      this.busy.value = true;
      this.error.value = "";
    });
    this.deps.ask({ type: "compare", number, pinned }, (error) => {
      batch(() => {
        this.busy.value = false;
        this.error.value = error ?? "";
      });
    });
  }
}
