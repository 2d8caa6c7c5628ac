// Which rows of a long list are in view. Invariant: rows are ROW_HEIGHT high, all of them.

export const ROW_HEIGHT = 24;
/** Of the heads, which stay above the rows. */
export const HEAD_HEIGHT = 22;
const SPARE = 6;

export function windowOf(scrollTop: number, height: number, rows: number): [first: number, end: number] {
  const first = Math.max(Math.floor(scrollTop / ROW_HEIGHT) - SPARE, 0);
  const end = Math.min(Math.ceil((scrollTop + height) / ROW_HEIGHT) + SPARE, rows);
  return [Math.min(first, end), end];
}

/** Where to scroll so that a row is in view; as little as possible. */
export function scrollTo(row: number, scrollTop: number, height: number): number {
  const top = row * ROW_HEIGHT;
  if (top < scrollTop) return top;
  if (top + ROW_HEIGHT > scrollTop + height) return top + ROW_HEIGHT - height;
  return scrollTop;
}
