// The width class of one view, which decides how its parts stand: below 800 pixels one below another,
// from there on side by side. Invariant: it is that of the container, never of the window, so two
// views of one inspector may differ; styles use the same bounds (`@container nni-view`).
import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";
import { observeSize } from "../ui/observeSize";

export type Layout = "narrow" | "medium" | "side" | "wide";

/** The least width of each in pixels, widest first. */
const LEAST_WIDTHS: readonly (readonly [number, Layout])[] = [
  [1200, "wide"],
  [800, "side"],
  [560, "medium"],
];

export function layoutOf(width: number): Layout {
  return LEAST_WIDTHS.find(([least]) => width >= least)?.[1] ?? "narrow";
}

/** Whether the tree stands above the detail. */
export const isStacked = (layout: Layout): boolean => layout === "narrow" || layout === "medium";

/** The layout for an element's width, from the first frame on. */
export function useLayout(element: RefObject<HTMLElement>): Layout {
  const [layout, set] = useState<Layout>("narrow");
  useLayoutEffect(() => {
    const box = element.current!;
    return observeSize(box, () => set(layoutOf(box.clientWidth)));
  }, [element]);
  return layout;
}

/** The height of a row of the tree: taller where a finger points. */
export const ROW_HEIGHT = globalThis.matchMedia?.("(pointer: coarse)").matches ? 32 : 24;
