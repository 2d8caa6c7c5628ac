// The last state that the kernel puts beside a view, for a notebook without a kernel (last_state.py).
// Invariant: it is hidden exactly as long as a view of the same inspector has something to show. In a
// copy of a notebook as a page, where no kernel can ever answer, it is the view that is hidden.
import { effect } from "@preact/signals";
import type { Model } from "./kernel/bridge";
import type { Store } from "./store";

/** What nbconvert and Sphinx put into a page: the state of the notebook's widgets. */
const CONVERTED_PAGE = 'script[type="application/vnd.jupyter.widget-state+json"]';

/** Hides it while the view in `place` is alive; call the returned function to show it again. */
export function hideSavedState(inspector: string, store: Store, place: HTMLElement): () => void {
  if (!/^[\w-]+$/.test(inspector)) return () => undefined;
  const style = document.createElement("style");
  style.textContent =
    `.nni-of-${inspector} { display: none; }\n` + // and the host's frame around it, if any
    `.jp-OutputArea-child:has(.nni-of-${inspector}) { display: none; }`;
  const stop = effect(() => {
    const alive = store.sites.value !== null;
    if (alive) document.head.append(style);
    else style.remove();
    place.hidden = !alive && document.querySelector(CONVERTED_PAGE) !== null && document.querySelector(`.nni-of-${inspector}`) !== null;
  });
  return () => {
    stop();
    style.remove();
  };
}

/** The front end of a widget that was restored from a notebook: the last state is beside it. */
const RESTORED_SOURCE = 'export default { render({ el }) { el.style.display = "none"; } };';

/** Removes the front end, which is running by now, from the model that JupyterLab saves in the
 * notebook's metadata: 0.13 MB for each inspector. The kernel still has it. The change is silent,
 * because anywidget would otherwise load another front end in place of this one. */
export function dropSource(model: Model): void {
  if (document.body.getAttribute("data-jp-theme-light") === null) return; // other hosts have no silent changes
  model.set?.("_esm", RESTORED_SOURCE, { silent: true });
  model.set?.("_css", "", { silent: true });
}
