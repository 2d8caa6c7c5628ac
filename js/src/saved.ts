// The last state that the kernel puts beside a view, for a notebook without a kernel (snapshot.py).
// Invariant: it is hidden while a view of the same inspector has something to show, and no longer.
import { effect } from "@preact/signals";
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
