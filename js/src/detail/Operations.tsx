// A button that shows what happens within the selected call as rows below it, or hides them.
// Invariant: it waits for the kernel's answer, which may need a compilation, and says so.
import { useState } from "preact/hooks";
import { isOperation, type Sites } from "../kernel/sites";
import type { Store } from "../store";

/** The kind of an operation that a function computes, or that the user has named. */
const NAMED_VALUE = "named value";

export function Operations({ store, sites, index }: { store: Store; sites: Sites; index: number }) {
  const [waits, setWaits] = useState("");
  const site = sites.list[index];
  if (site.single || site.calls === 0 || site.layer >= 0 || (isOperation(site.key) && site.kind !== NAMED_VALUE)) return null;
  const shown = sites.children[index].some((child) => isOperation(sites.list[child].key));
  const waiting = waits === site.key;
  return (
    <button
      type="button"
      class="nni-button"
      aria-pressed={shown}
      disabled={waits !== ""}
      title={shown ? "Hide the operations within this call" : "Show the operations within this call (softmax, attention, matrix products …) as rows of the tree, 200 at most. What a function like @softmax computes is shown by the same button on its row"}
      data-testid="nni-operations"
      onClick={() => {
        setWaits(site.key);
        store.showOperations(site.key, !shown, () => setWaits(""));
      }}
    >
      {waiting ? "Operations …" : shown ? "Hide operations" : "Operations"}
    </button>
  );
}
