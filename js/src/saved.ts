// The last state that the kernel puts beside a view, for a notebook without a kernel (last_state.py).
// Invariant: it is hidden while a view of the same inspector has something to show, and no longer.
import { effect } from "@preact/signals";
import type { Model } from "./kernel/bridge";
import type { Store } from "./store";

/** Hides it while there is something live; call what it returns to end that. */
export function coverSaved(inspector: string, store: Store): () => void {
  if (!/^[\w-]+$/.test(inspector)) return () => undefined;
  const style = document.createElement("style");
  style.textContent =
    `.nni-of-${inspector} { display: none; }\n` + // and the host's frame around it, where it has one
    `.jp-OutputArea-child:has(.nni-of-${inspector}) { display: none; }`;
  const stop = effect(() => {
    if (store.sites.value) document.head.append(style);
    else style.remove();
  });
  return () => {
    stop();
    style.remove();
  };
}

/** The front end of a widget that was restored from a notebook: the last state is beside it. */
const RESTORED = 'export default { render({ el }) { el.style.display = "none"; } };';

/** Takes the front end, which runs by now, out of what JupyterLab saves of a model in the notebook's
 * metadata: 0.13 MB for each inspector. It is loaded from the kernel only. Silent: anywidget would
 * load another front end in place of this one. */
export function lighten(model: Model): void {
  if (document.body.getAttribute("data-jp-theme-light") === null) return; // other hosts know no silence
  model.set?.("_esm", RESTORED, { silent: true });
  model.set?.("_css", "", { silent: true });
}
