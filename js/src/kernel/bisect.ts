/** The last of `count` ascending values that is not above `limit`; -1 if there is none. */
export function lastAtMost(count: number, at: (i: number) => number, limit: number): number {
  let [low, high] = [-1, count];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at(middle) <= limit) low = middle;
    else high = middle;
  }
  return low;
}
