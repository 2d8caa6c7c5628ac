// The pass on screen: the newest (following), or a held one; and a pinned one to compare with.
// Invariants: a requested frame is used only while it is still wanted; at most one request for each
// role is under way, and the last wish is always sent; a live frame never replaces a held pass. The
// kernel keeps none of this: two pages may show two passes.
import { batch, effect, signal, type Signal } from "@preact/signals";
import type { FrameData } from "../kernel/decode";
import { CLEAN, OTHER } from "../kernel/protocol";
import { NO_PASSES, type PassTable } from "./passes";

/** The parts of the store that a timeline needs. */
interface Dependencies {
  readonly frame: Signal<FrameData | null>;
  readonly selected: Signal<string | null>;
  showPass(number: number, site: string, settle: (error: string | null) => void): void;
  /** Draw the newest live frame, if there is one. */
  showNewest(): void;
  reportProblem(text: string): void;
}

type FrameRole = "held" | "pinned";

/** Passes per second. */
export const SPEEDS = [1, 2, 5, 10, 20] as const;
const SELECT_MS = 80;

export class Timeline {
  readonly passes = signal<PassTable>(NO_PASSES);
  /** The number of the held pass; null while following. */
  readonly held = signal<number | null>(null);
  readonly pinned = signal<FrameData | null>(null);
  /** The last pass without its perturbations that the kernel has sent. */
  readonly clean = signal<FrameData | null>(null);
  readonly playing = signal(false);
  readonly speed = signal<number>(5);
  /** The step under the pointer in any chart over the steps, which all of them read out; null for none. */
  readonly pointed = signal<number | null>(null);

  private pinnedNumber: number | null = null;
  private readonly requests = new Map<FrameRole, { again: boolean }>();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private selecting: ReturnType<typeof setTimeout> | undefined;
  private site: string | null = null;
  private readonly stopEffect: () => void;

  constructor(private readonly deps: Dependencies) {
    this.stopEffect = effect(() => this.selectionChanged(deps.selected.value));
  }

  close(): void {
    this.stopEffect();
    clearTimeout(this.timer);
    clearTimeout(this.selecting);
  }

  // ---- messages ----

  /** Whether a frame may be drawn now. */
  admits(frame: FrameData): boolean {
    const held = this.held.value;
    return held === null ? !frame.header.held : frame.header.number === held;
  }

  /** Take a frame that is not the newest pass; a pinned one is kept here, and one without perturbations. */
  takeFrame(frame: FrameData): void {
    if (frame.header.number <= CLEAN) this.clean.value = frame;
    if (frame.header.number === this.pinnedNumber) this.pinned.value = frame;
  }

  /** Drop everything that was decoded for the old rows. */
  layoutChanged(): void {
    this.pinned.value = this.clean.value = null;
    this.requestAgain();
  }

  // ---- actions of the user ----

  hold(): void {
    const shown = this.deps.frame.value;
    if (shown && this.held.value === null) this.held.value = shown.header.number;
    this.stop();
  }

  follow(): void {
    this.stop();
    this.held.value = null;
    this.deps.showNewest();
  }

  /** Show the pass at this place of the strip. */
  goTo(index: number): void {
    const passes = this.passes.value;
    if (passes.count === 0) return;
    this.held.value = passes.number(Math.min(Math.max(index, 0), passes.count - 1));
    this.request("held");
  }

  /** Show the last pass of this step, or of the step before if that was thinned out. */
  goToStep(step: number): void {
    const passes = this.passes.value;
    let found = -1;
    const better = (i: number) =>
      found < 0 || passes.step(i) > passes.step(found) || (passes.step(i) === passes.step(found) && (!passes.perturbed(i) || passes.perturbed(found)));
    for (let i = 0; i < passes.count; i++) if (passes.step(i) <= step && better(i)) found = i;
    const shown = this.held.value === null && found === passes.count - 1; // the newest: go on following
    if (found < 0 || shown) return;
    this.stop();
    this.goTo(found);
  }

  /** Hold the pass whose step is nearest; of several passes of one step, the last. */
  goNear(step: number): void {
    const passes = this.passes.value;
    let found = -1;
    const off = (i: number): number => Math.abs(passes.step(i) - step);
    for (let i = 0; i < passes.count; i++) if (found < 0 || off(i) <= off(found)) found = i;
    if (found < 0) return;
    this.stop();
    this.goTo(found);
  }

  stepBy(by: number): void {
    this.stop();
    this.goTo(this.index() + by);
  }

  /** Show one pass after another from the one on screen; after the newest, follow. */
  play(): void {
    if (this.index() >= this.passes.value.count - 1) this.goTo(0);
    this.playing.value = true;
    this.playNext();
  }

  stop(): void {
    this.playing.value = false;
    clearTimeout(this.timer);
  }

  pin(): void {
    const shown = this.deps.frame.value;
    if (!shown) return;
    this.pinnedNumber = shown.header.number;
    this.pinned.value = shown;
  }

  /** Compare with the pass of another run once the kernel has sent it. */
  pinOther(): void {
    this.pinnedNumber = OTHER;
    this.request("pinned");
  }

  unpin(): void {
    this.pinnedNumber = null;
    this.pinned.value = null;
  }

  /** The place of the pass on screen on the strip. */
  index(): number {
    const passes = this.passes.value;
    const number = this.held.value ?? this.deps.frame.value?.header.number;
    return number === undefined ? passes.count - 1 : Math.max(passes.indexOf(number), 0);
  }

  // ---- internals ----

  private playNext(): void {
    this.timer = setTimeout(() => {
      if (!this.playing.value) return;
      const index = this.index();
      if (index >= this.passes.value.count - 1) return this.follow();
      if (!this.requests.has("held")) this.goTo(index + 1); // if the kernel is behind, skip nothing
      this.playNext();
    }, 1000 / this.speed.value);
  }

  private selectionChanged(site: string | null): void {
    if (site === this.site) return;
    this.site = site;
    clearTimeout(this.selecting);
    this.selecting = setTimeout(() => this.requestAgain(), SELECT_MS);
  }

  private requestAgain(): void {
    if (this.held.value !== null) this.request("held");
    if (this.pinnedNumber !== null) this.request("pinned");
  }

  private request(role: FrameRole): void {
    const number = role === "held" ? this.held.value : this.pinnedNumber;
    if (number === null) return;
    const running = this.requests.get(role);
    if (running) {
      running.again = true;
      return;
    }
    const entry = { again: false };
    this.requests.set(role, entry);
    this.deps.showPass(number, this.deps.selected.value ?? "", (error) => {
      this.requests.delete(role);
      const wanted = role === "held" ? this.held.value : this.pinnedNumber;
      if (error && wanted === number && !entry.again) {
        this.deps.reportProblem(error);
        if (role === "held") this.keepShownPass();
        else this.unpin();
      }
      if (entry.again) this.request(role);
    });
  }

  /** Keep the pass on screen, because the requested one is gone. */
  private keepShownPass(): void {
    batch(() => {
      this.stop();
      this.held.value = this.deps.frame.value?.header.number ?? null;
    });
  }
}
