// The rows to show: rows in open branches, or on the way to a match, and among them those in view.
// Invariant: every row is ROW_HEIGHT high; nothing here walks the DOM.
import type { Sites } from "../kernel/sites";
import { ROW_HEIGHT } from "../frame/layout";

const SPARE_ROWS = 6;

/** The most rows that are open at first. */
const MOST_OPEN_ROWS = 500;
/** A stack of more layers than this is closed at first. */
const MOST_OPEN_LAYERS = 16;

/** As many whole levels as stay readable, by keys, so that they survive a new layout. */
export function initiallyOpen(sites: Sites): Set<string> {
  const open = new Set<string>();
  let level = sites.roots;
  let shown = level.length;
  while (level.length > 0) {
    const opened = level.filter((i) => sites.children[i].length > 0 && !isLongStack(sites, i) && sites.list[i].layer < 0 && sites.list[i].kind !== "optimizer");
    const next = opened.flatMap((i) => sites.children[i]);
    if (shown + next.length > MOST_OPEN_ROWS && open.size > 0) break;
    for (const i of opened) open.add(sites.list[i].key);
    shown += next.length;
    level = next;
  }
  return open;
}

/** Whether a site has the rows of many single layers. */
function isLongStack(sites: Sites, index: number): boolean {
  return sites.children[index].filter((i) => sites.list[i].layer >= 0).length > MOST_OPEN_LAYERS && sites.list[index].layer < 0;
}

/** Indices of the rows to show, top to bottom; with `matches`, these and the rows above them. */
export function visibleRows(sites: Sites, open: ReadonlySet<string>, matches: ReadonlySet<number> | null): number[] {
  const shown = matches ? withAncestors(sites, matches) : null;
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

function withAncestors(sites: Sites, matches: ReadonlySet<number>): Set<number> {
  const shown = new Set<number>();
  for (const i of matches) for (let at = i; at >= 0 && !shown.has(at); at = sites.list[at].parent) shown.add(at);
  return shown;
}

export function rowsInView(scrollTop: number, height: number, rows: number): [first: number, end: number] {
  const first = Math.max(Math.floor(scrollTop / ROW_HEIGHT) - SPARE_ROWS, 0);
  const end = Math.min(Math.ceil((scrollTop + height) / ROW_HEIGHT) + SPARE_ROWS, rows);
  return [Math.min(first, end), end];
}

/** The scroll position that brings a row into view with the least movement. */
export function scrollTo(row: number, scrollTop: number, height: number): number {
  const top = row * ROW_HEIGHT;
  if (top < scrollTop) return top;
  if (top + ROW_HEIGHT > scrollTop + height) return top + ROW_HEIGHT - height;
  return scrollTop;
}
