// What follows the size of an element.

/** Calls `measure` now and whenever the size of an element changes; call the returned function to end. */
export function observeSize(element: Element, measure: () => void): () => void {
  measure();
  const observer = new ResizeObserver(measure);
  observer.observe(element);
  return () => observer.disconnect();
}
