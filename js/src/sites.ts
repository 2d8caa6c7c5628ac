// A layout with what the tree needs of it: children, places by key, and which rows are shown.
// Invariant: built once a layout, in time linear in its sites; never walks the DOM.
import type { Layout, Site } from "./protocol";

export interface Sites {
  readonly id: number;
  readonly model: string;
  readonly list: readonly Site[];
  readonly children: readonly (readonly number[])[];
  readonly roots: readonly number[];
  readonly byKey: ReadonlyMap<string, number>;
}

/** So many rows may be open before anybody has opened one. */
const OPEN_AT_FIRST = 500;

/** The children of every leaf. */
const NONE: number[] = [];

export function toSites(layout: Layout): Sites {
  const children = new Array<number[]>(layout.sites.length).fill(NONE);
  const roots: number[] = [];
  const byKey = new Map<string, number>();
  layout.sites.forEach((site, i) => {
    byKey.set(site.key, i);
    if (site.parent >= 0 && site.parent < layout.sites.length && site.parent !== i) {
      if (children[site.parent] === NONE) children[site.parent] = [i];
      else children[site.parent].push(i);
    } else roots.push(i);
  });
  return { id: layout.layout, model: layout.model, list: layout.sites, children, roots, byKey };
}

/** A stack of more layers than this is closed at first. */
const LAYERS_AT_FIRST = 16;

/** As many whole levels as stay readable. Keys, so that they survive a new layout. */
export function openAtFirst(sites: Sites): Set<string> {
  const open = new Set<string>();
  let level = sites.roots;
  let shown = level.length;
  while (level.length > 0) {
    const opened = level.filter((i) => sites.children[i].length > 0 && !isLong(sites, i) && sites.list[i].layer < 0);
    const next = opened.flatMap((i) => sites.children[i]);
    if (shown + next.length > OPEN_AT_FIRST && open.size > 0) break;
    for (const i of opened) open.add(sites.list[i].key);
    shown += next.length;
    level = next;
  }
  return open;
}

/** Whether a site has the rows of many single layers. */
function isLong(sites: Sites, index: number): boolean {
  return sites.children[index].filter((i) => sites.list[i].layer >= 0).length > LAYERS_AT_FIRST && sites.list[index].layer < 0;
}

/** Indices of the rows to show, top to bottom; of `matches`, these and what leads to them. */
export function visibleRows(sites: Sites, open: ReadonlySet<string>, matches: ReadonlySet<number> | null): number[] {
  const shown = matches ? leading(sites, matches) : null;
  const rows: number[] = [];
  const stack = [...sites.roots].reverse();
  while (stack.length > 0) {
    const i = stack.pop()!;
    if (shown && !shown.has(i)) continue;
    rows.push(i);
    if (shown || open.has(sites.list[i].key)) {
      const below = sites.children[i];
      for (let k = below.length - 1; k >= 0; k--) stack.push(below[k]);
    }
  }
  return rows;
}

function leading(sites: Sites, matches: ReadonlySet<number>): Set<number> {
  const shown = new Set<number>();
  for (const i of matches) for (let at = i; at >= 0 && !shown.has(at); at = sites.list[at].parent) shown.add(at);
  return shown;
}

/** Keys of everything above a site: open these and its row is shown. */
export function ancestors(sites: Sites, index: number): string[] {
  const keys: string[] = [];
  for (let at = sites.list[index].parent; at >= 0; at = sites.list[at].parent) keys.push(sites.list[at].key);
  return keys;
}

/** The key of the row that shows a site: its own, or for one layer of a stack the stack's. */
export function rowOf(sites: Sites, key: string): string | undefined {
  if (sites.byKey.has(key)) return key;
  const stack = key.replace(/\[[^[\]]*\]$/, "");
  return sites.byKey.has(stack) ? stack : undefined;
}

/** What a person reads for a site's key: the root has an empty one. */
export function label(key: string): string {
  return key === "" ? "(model)" : key;
}
