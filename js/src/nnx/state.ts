// The selected module as NNX sees it, requested while the panel is shown.
// Invariants: one request at a time, then a pause as long as its answer took, so that a fast run does
// not overload the kernel; an answer to any request but the last is dropped.
import { batch, signal } from "@preact/signals";
import { UNREACHABLE, type Kernel } from "../kernel/bridge";
import type { Nnx } from "../kernel/protocol";

/** The shortest time between two requests, in milliseconds. */
export const LEAST_PAUSE_MS = 500;

export class NnxState {
  /** The last answer. */
  readonly page = signal<Nnx | null>(null);
  readonly error = signal<{ readonly site: string; readonly text: string } | null>(null);
  readonly asking = signal(false);
  /** The reference number under the pointer or with the focus; 0 for none. */
  readonly marked = signal(0);
  readonly switching = signal<string | null>(null);

  private wanted: string | null = null;
  private expected = 0;
  private pauseTimer: ReturnType<typeof setTimeout> | undefined;
  private askedAt = 0;

  constructor(private readonly kernel: Kernel) {}

  receive(message: Nnx): void {
    if (message.id !== this.expected) return;
    batch(() => {
      this.page.value = message;
      this.error.value = null;
    });
  }

  /** Request a site, now or when the request before has been answered. */
  ask(site: string): void {
    this.wanted = site;
    const other = this.page.peek() !== null && this.page.peek()!.site !== site;
    if (other) {
      clearTimeout(this.pauseTimer);
      this.pauseTimer = undefined;
    }
    if (!this.asking.peek() && this.pauseTimer === undefined) this.send();
  }

  /** Stop requesting, because the panel is no longer shown. */
  leave(): void {
    this.wanted = null;
    clearTimeout(this.pauseTimer);
    this.pauseTimer = undefined;
    this.marked.value = 0;
  }

  switchMode(module: string, name: string, value: boolean | null): void {
    const site = this.page.peek()?.site ?? "";
    this.switching.value = `${module}\n${name}`;
    this.kernel.ask({ type: "switch_mode", module, name, value }, (error) => {
      batch(() => {
        this.switching.value = null;
        this.error.value = error ? { site, text: `Could not switch ${name}: ${error}` } : null;
      });
      if (!error) this.ask(site);
    });
  }

  private send(): void {
    const site = this.wanted;
    if (site === null) return;
    this.wanted = null;
    this.asking.value = true;
    this.askedAt = performance.now();
    let failed: string | null | undefined;
    const id = this.kernel.ask({ type: "show_nnx", site }, (error) => {
      failed = error;
      batch(() => {
        this.asking.value = false;
        if (error && error !== UNREACHABLE) this.error.value = { site, text: error };
      });
      const took = performance.now() - this.askedAt;
      this.pauseTimer = setTimeout(() => {
        this.pauseTimer = undefined;
        this.send();
      }, Math.max(LEAST_PAUSE_MS, 2 * took));
    });
    if (failed === undefined) this.expected = id;
  }
}
