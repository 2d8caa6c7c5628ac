// The mask over the picture of a site's output.
import type { Site } from "../kernel/protocol";
import { maskedAxes } from "../masks/rectangle";
import type { Store } from "../store";
import type { PictureMask } from "./Picture";

/** The mask that can be drawn on the picture of a site's output; null if none can. */
export function pictureMask(store: Store, site: Site): PictureMask | null {
  const [part, array, shown] = [store.values.part.value, store.values.array.value, store.values.shown.value];
  if (!site.perturbable || part !== "output" || store.replayNote.value !== "" || !array || !shown || shown.over >= 0) return null;
  const found = maskedAxes(array.axes, array.shape, shown.rows, shown.columns);
  if (!found) return null;
  const over = { site: site.key, ...found };
  return { mask: store.masks.maskOf(over), columns: found.columns, editing: store.editingMask.value, change: (mask) => store.masks.set(over, mask) };
}

/** Whether a mask is being drawn, or some places are off: then what belongs to it is in sight. */
export const showsMask = (store: Store, mask: Uint8Array): boolean => store.editingMask.value || mask.includes(0);
