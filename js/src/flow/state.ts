// The module whose flow is shown (the scope), the flow and its layout, requested when first needed.
// Invariant: the flow on screen belongs to the current layout and scope; a late answer to an older
// request changes nothing. A click in the graph selects and stays; a selection made elsewhere moves
// the scope to the selected module, or for a leaf to the module around it.
import { batch, computed, signal } from "@preact/signals";
import type { KernelRequest } from "../kernel/bridge";
import type { Flow, LayoutLibrary } from "../kernel/protocol";
import { label, type Sites } from "../kernel/sites";
import type { Colouring } from "./colouring";
import type { FlowLayout } from "./layout/arrange";
import { makeArranger, type Arranger } from "./layout/arranger";
import { linksOf, sizeOf } from "./layout/sizes";

/** The parts of the store and the bridge that it needs. */
interface Dependencies {
  sites(): Sites | null;
  ask(request: KernelRequest, settle: (error: string | null) => void): void;
}

export interface Drawing {
  readonly flow: Flow;
  readonly arranged: FlowLayout;
}

export class FlowState {
  readonly scope = signal<string | null>(null);
  readonly flow = signal<Flow | null>(null);
  readonly drawing = signal<Drawing | null>(null);
  /** Why there is no drawing. */
  readonly problem = signal("");
  readonly figure = signal<Colouring>("none");
  /** The site whose figure is shown: under the pointer, or focused. */
  readonly pointed = signal<string | null>(null);
  /** Site key -> its node's number in the drawing; a newer flow has other numbers until it is laid out. */
  readonly byKey = computed(() => {
    const found = new Map<string, number>();
    this.drawing.value?.flow.nodes.forEach((node, i) => {
      if (node.role === "module") found.set(node.site, i);
    });
    return found;
  });

  private wanted: { site: string; layout: number } | null = null;
  private picked: string | null = null;
  private lastSelected: string | null = null;
  private arranger: Arranger | null = null;
  private libraryRequested = false;

  constructor(
    private readonly deps: Dependencies,
    private readonly createArranger: (source: BlobPart) => Arranger = makeArranger,
  ) {}

  /** Follow a change of the selection or of the layout. */
  follow(selected: string | null): void {
    const sites = this.deps.sites();
    if (!sites || selected === null) return;
    const moved = selected !== this.lastSelected;
    this.lastSelected = selected;
    const scope = this.scope.peek();
    const stays = scope !== null && sites.byKey.has(scope) && (!moved || selected === this.picked);
    this.show(stays ? scope : scopeOf(sites, selected));
  }

  /** Keep the scope when a node is picked in the graph and then selected. */
  pick(site: string): void {
    this.picked = site;
  }

  /** Go to a module's flow, inwards or outwards. */
  show(site: string): void {
    const layout = this.deps.sites()?.id;
    if (layout === undefined) return;
    if (this.wanted?.site === site && this.wanted.layout === layout) return;
    const wanted = { site, layout };
    this.wanted = wanted;
    this.scope.value = site;
    this.deps.ask({ type: "show_flow", site }, (error) => {
      if (!error || this.wanted !== wanted) return;
      this.wanted = null; // so that it can be requested again
      this.problem.value = `The flow of ${label(site)} could not be loaded: ${error}`;
    });
  }

  takeFlow(message: Flow): void {
    if (message.site !== this.wanted?.site || message.layout !== this.deps.sites()?.id) return;
    batch(() => {
      this.flow.value = message;
      this.problem.value = "";
    });
    if (this.arranger) this.layOut(message, this.arranger);
    else this.getLibrary();
  }

  takeLibrary(_message: LayoutLibrary, buffer: DataView | undefined): void {
    if (this.arranger || !buffer) return;
    const copy = new Uint8Array(new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength));
    this.arranger = this.createArranger(copy);
    const flow = this.flow.peek();
    if (flow) this.layOut(flow, this.arranger);
  }

  close(): void {
    this.arranger?.close();
  }

  private getLibrary(): void {
    if (this.libraryRequested) return;
    this.libraryRequested = true;
    this.deps.ask({ type: "get_layout_library" }, (error) => {
      this.libraryRequested = false;
      if (error) this.problem.value = `The layout library could not be loaded: ${error}`;
    });
  }

  private layOut(flow: Flow, arranger: Arranger): void {
    arranger.arrange(flow.nodes.map(sizeOf), linksOf(flow)).then(
      (arranged) => {
        if (this.flow.peek() === flow) this.drawing.value = { flow, arranged };
      },
      (error: unknown) => {
        if (this.flow.peek() === flow) this.problem.value = error instanceof Error ? error.message : String(error);
      },
    );
  }
}

/** A module with others in it, for its own flow; for a leaf, the nearest called module around it. */
export function scopeOf(sites: Sites, key: string): string {
  let at = sites.byKey.get(key);
  if (at === undefined) return sites.roots.length > 0 ? sites.list[sites.roots[0]].key : "";
  if (sites.children[at].length > 0) return key;
  while (sites.list[at].parent >= 0) {
    at = sites.list[at].parent;
    if (sites.list[at].calls > 0) break;
  }
  return sites.list[at].key;
}
