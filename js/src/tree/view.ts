// The rows of the tree that are shown, and their order: open rows, search, filters and sorting.
// Invariants: a sorted tree is a list of matches, with unmeasured sites last; figures of a running
// loop reorder and filter it once in REORDER_MS, so that rows can be read and clicked.
import { computed, effect, signal, type ReadonlySignal, type Signal } from "@preact/signals";
import { statistic, type FrameData } from "../kernel/decode";
import { QUANTITIES, ROW_STATS } from "../kernel/protocol";
import type { Sites } from "../kernel/sites";
import { compareValues } from "../time/comparison";
import type { Layout } from "../frame/layout";
import { COLUMNS, defaultColumns, zeroFraction, type Column, type OutputChanges } from "./columns";
import { parseQuery } from "./search";
import { visibleRows } from "./visible";

export interface TreeSort {
  readonly by: string;
  readonly rising: boolean;
}

export type Filter = "nonfinite" | "perturbed" | "below" | "above" | "unmeasured" | "dead";

/** The share of zeros from which a site counts as dead. */
const DEAD_FRACTION = 0.99;
const REORDER_MS = 1000;
const UPDATE = ROW_STATS.indexOf("update_ratio");
const NO_CHANGES: OutputChanges = new Map();
const GRADIENT = QUANTITIES.indexOf("gradient");

/** The signals that the rows depend on besides the choices made here. */
interface Dependencies {
  readonly sites: Signal<Sites | null>;
  readonly frame: Signal<FrameData | null>;
  readonly pinned: Signal<FrameData | null>;
  readonly held: Signal<number | null>;
  readonly bad: ReadonlySignal<Uint8Array>;
  readonly perturbed: ReadonlySignal<ReadonlyMap<string, boolean>>;
  /** Whether the effect of perturbations is measured: that of a run which happens elsewhere is not. */
  readonly effects: ReadonlySignal<boolean>;
  readonly moved: ReadonlySignal<OutputChanges>;
}

export class TreeView {
  readonly open = signal<ReadonlySet<string>>(new Set());
  readonly query = signal("");
  /** The columns that were chosen or left out; the others depend on the width. */
  readonly choices = signal<ReadonlyMap<string, boolean>>(new Map());
  readonly sort = signal<TreeSort | null>(null);
  readonly filters = signal<ReadonlySet<Filter>>(new Set());
  readonly below = signal(1e-6);
  readonly above = signal(1e3);

  /** Whether anything is left out or reordered. */
  readonly narrowed = computed(() => this.query.value.trim() !== "" || this.filters.value.size > 0);

  /** Whether the update of a parameter was ever seen; until then its column would be empty. */
  private readonly updates = signal(false);
  /** The frame whose figures order and filter the rows. */
  private readonly basis = signal<FrameData | null>(null);
  private timer: ReturnType<typeof setTimeout> | undefined;
  private reorderedAt = -Infinity;
  private readonly stop: () => void;

  constructor(private readonly deps: Dependencies) {
    this.stop = effect(() => this.frameChanged(deps.frame.value, deps.held.value));
  }

  close(): void {
    this.stop();
    clearTimeout(this.timer);
  }

  /** The sites that pass search and filters; null for all. */
  readonly matches = computed<ReadonlySet<number> | null>(() => {
    const sites = this.deps.sites.value;
    if (!sites || !this.narrowed.value) return null;
    const test = parseQuery(this.query.value);
    const filters = [...this.filters.value];
    const found = new Set<number>();
    sites.list.forEach((site, i) => {
      if ((!test || test(site)) && filters.every((filter) => this.passesFilter(filter, sites, i))) found.add(i);
    });
    return found;
  });

  readonly rows = computed<readonly number[]>(() => {
    const sites = this.deps.sites.value;
    if (!sites) return [];
    const matches = this.matches.value;
    const sort = this.sort.value;
    const column = COLUMNS.find((c) => c.id === sort?.by);
    if (!sort || (!column && sort.by !== "name")) return visibleRows(sites, this.open.value, matches);
    const listed = matches ? [...matches] : sites.list.map((_, i) => i);
    return sortRows(listed, (i) => (column ? (column.text?.(sites.list[i]) ?? this.sortValue(column, sites, i)) : sites.list[i].key), sort.rising);
  });

  /** The columns that compare with the pinned pass: those whose quantity that pass has. */
  private readonly comparing = computed<ReadonlySet<string>>(() => {
    const [sites, pinned] = [this.deps.sites.value, this.deps.pinned.value];
    if (!sites || !pinned) return new Set();
    const has = (column: Column): boolean => sites.list.some((site, i) => !Number.isNaN(column.value!(site, pinned, i, NO_CHANGES)));
    return new Set(COLUMNS.filter((column) => column.comparison && has(column)).map((column) => column.id));
  });

  get moved(): OutputChanges {
    return this.deps.moved.value;
  }

  compares(column: Column): boolean {
    return this.comparing.value.has(column.id);
  }

  /** How many sites match; all of them if nothing is left out. */
  readonly matched = computed(() => this.matches.value?.size ?? this.deps.sites.value?.list.length ?? 0);

  /** Sort after a click on a head: largest first (A to Z), smallest first, the tree's own order. */
  sortBy(id: string): void {
    const now = this.sort.value;
    const first = id === "name" || COLUMNS.find((c) => c.id === id)?.text !== undefined;
    if (now?.by !== id) this.sort.value = { by: id, rising: first };
    else this.sort.value = now.rising === first ? { by: id, rising: !first } : null;
  }

  private readonly profiled = computed(() => this.deps.sites.value?.list.some((site) => site.step_ms !== null) ?? false);

  /** The columns in a view of this layout. */
  columnsFor(layout: Layout): readonly Column[] {
    const usual = defaultColumns(layout, this.deps.effects.value && this.deps.perturbed.value.size > 0, this.updates.value, this.profiled.value);
    return COLUMNS.filter(({ id }) => this.choices.value.get(id) ?? usual.has(id));
  }

  choose(id: string, shown: boolean): void {
    this.choices.value = new Map(this.choices.value).set(id, shown);
    if (!shown && this.sort.value?.by === id) this.sort.value = null;
  }

  filter(filter: Filter, on: boolean): void {
    const others = [...this.filters.value].filter((one) => one !== filter);
    this.filters.value = new Set(on ? [...others, filter] : others);
  }

  /** Show all rows, in the tree's order. */
  clear(): void {
    this.query.value = "";
    this.filters.value = new Set();
    this.sort.value = null;
  }

  // ---- internals ----

  private frameChanged(frame: FrameData | null, held: number | null): void {
    if (frame && !this.updates.peek()) this.updates.value = frame.rows.some((_, i) => i % ROW_STATS.length === UPDATE && !Number.isNaN(frame.rows[i]));
    clearTimeout(this.timer);
    const wait = this.reorderedAt + REORDER_MS - performance.now();
    const now = held !== null || frame === null || this.basis.peek() === null || wait <= 0;
    if (now) this.setBasis(frame);
    else this.timer = setTimeout(() => this.setBasis(this.deps.frame.peek()), wait);
  }

  private setBasis(frame: FrameData | null): void {
    this.reorderedAt = performance.now();
    this.basis.value = frame;
  }

  /** The frame, if it belongs to these sites: the layout may have changed since. */
  private currentFrame(sites: Sites): FrameData | null {
    const basis = this.basis.value;
    return basis && basis.header.layout === sites.id ? basis : null;
  }

  private sortValue(column: Column, sites: Sites, index: number): number {
    const value = column.value;
    if (!value) return column.id === "spark" ? this.size(sites, index) : NaN;
    const site = sites.list[index];
    const now = value(site, this.currentFrame(sites), index, this.deps.moved.value);
    const pinned = this.deps.pinned.value;
    return pinned && this.compares(column) ? compareValues(column.comparison!, now, value(site, pinned, index, NO_CHANGES)) : now;
  }

  private size(sites: Sites, index: number): number {
    const frame = this.currentFrame(sites);
    return frame ? statistic(frame, index, 0, "size") : NaN;
  }

  private passesFilter(filter: Filter, sites: Sites, index: number): boolean {
    if (filter === "perturbed") return this.deps.perturbed.value.has(sites.list[index].key);
    const frame = this.currentFrame(sites);
    const gradient = frame ? statistic(frame, index, GRADIENT, "norm") : NaN;
    switch (filter) {
      case "nonfinite":
        return (this.deps.bad.value[index] & 1) !== 0;
      case "below":
        return gradient < this.below.value;
      case "above":
        return gradient > this.above.value;
      case "unmeasured":
        return Number.isNaN(this.size(sites, index));
      case "dead":
        return zeroFraction(frame, index) >= DEAD_FRACTION;
    }
  }
}

/** Stable; unknown values come last in either direction. */
function sortRows<T extends number | string>(rows: number[], value: (index: number) => T, rising: boolean): number[] {
  const sign = rising ? 1 : -1;
  const known: { index: number; value: T }[] = [];
  const rest: number[] = [];
  for (const index of rows) {
    const found = value(index);
    if (Number.isNaN(found) || found === "") rest.push(index);
    else known.push({ index, value: found });
  }
  known.sort((a, b) => (a.value < b.value ? -sign : a.value > b.value ? sign : a.index - b.index));
  return [...known.map((k) => k.index), ...rest];
}
