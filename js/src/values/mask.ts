// The mask over the picture of a site's output.
import type { Site } from "../kernel/protocol";
import { overPicture } from "../masks/drawn";
import type { Store } from "../store";
import type { Drawn } from "./Picture";

/** The mask that can be drawn on the picture of a site's output; null if none can. */
export function maskOf(store: Store, site: Site): Drawn | null {
  const [part, array, shown] = [store.values.part.value, store.values.array.value, store.values.shown.value];
  if (!site.perturbable || part !== "output" || store.replay.value !== "" || !array || !shown || shown.over >= 0) return null;
  const found = overPicture(array.axes, array.shape, shown.rows, shown.columns);
  if (!found) return null;
  const over = { site: site.key, ...found };
  return { mask: store.masks.of(over), columns: found.columns, editing: store.editingMask.value, change: (mask) => store.masks.set(over, mask) };
}

/** Whether a mask is being drawn, or some places are off: then what belongs to it is in sight. */
export const isEdited = (store: Store, mask: Uint8Array): boolean => store.editingMask.value || mask.includes(0);
