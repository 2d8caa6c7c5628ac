// What is chosen in the panel of the selected module as NNX sees it. Its data comes by `SiteQueries`.
import { batch, signal } from "@preact/signals";
import type { Kernel } from "../kernel/bridge";
import type { SiteQueries } from "../kernel/queries";

export class NnxState {
  /** The reference number under the pointer or with the focus; 0 for none. */
  readonly marked = signal(0);
  /** The mode that is being switched, and why the last one could not be. */
  readonly switching = signal<string | null>(null);
  readonly error = signal<{ readonly site: string; readonly text: string } | null>(null);

  constructor(
    private readonly kernel: Kernel,
    private readonly queries: SiteQueries,
  ) {}

  switchMode(site: string, module: string, name: string, value: boolean | null): void {
    this.switching.value = `${module}\n${name}`;
    this.kernel.ask({ type: "switch_mode", module, name, value }, (error) => {
      batch(() => {
        this.switching.value = null;
        this.error.value = error ? { site, text: `Could not switch ${name}: ${error}` } : null;
      });
      if (!error) this.queries.request("nnx", site);
    });
  }
}
