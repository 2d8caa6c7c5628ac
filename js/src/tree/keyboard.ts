// The action of a key in the tree, after the ARIA treegrid pattern for rows; space toggles the
// perturbation. Invariant: only decides; the caller acts. A key without an action gives null.
import type { Sites } from "../kernel/sites";

type TreeAction =
  | { do: "go"; index: number }
  | { do: "open" | "close"; index: number }
  | { do: "toggle"; index: number }
  | { do: "openAll" };

/** A list (`flat`) has nothing to open or close. */
export function keyAction(
  key: string,
  sites: Sites,
  rows: readonly number[],
  open: ReadonlySet<string>,
  selected: number,
  flat = false,
): TreeAction | null {
  if (rows.length === 0) return null;
  const at = rows.indexOf(selected);
  const go = (row: number): TreeAction => ({ do: "go", index: rows[Math.min(Math.max(row, 0), rows.length - 1)] });
  switch (key) {
    case "ArrowDown":
      return go(at + 1);
    case "ArrowUp":
      return go(at < 0 ? 0 : at - 1);
    case "PageDown":
      return go(at + 12);
    case "PageUp":
      return go(at - 12);
    case "Home":
      return go(0);
    case "End":
      return go(rows.length - 1);
    case "*":
      return flat ? null : { do: "openAll" };
    case " ":
      return at < 0 ? null : { do: "toggle", index: selected };
  }
  if (at < 0 || flat) return null;
  const below = sites.children[selected];
  const isOpen = open.has(sites.list[selected].key);
  switch (key) {
    case "ArrowRight":
      if (below.length === 0) return null;
      return isOpen ? go(at + 1) : { do: "open", index: selected };
    case "ArrowLeft":
      if (below.length > 0 && isOpen) return { do: "close", index: selected };
      return sites.list[selected].parent >= 0 ? { do: "go", index: sites.list[selected].parent } : null;
    case "Enter":
      return below.length > 0 ? { do: isOpen ? "close" : "open", index: selected } : null;
    default:
      return null;
  }
}
