// A small button that opens the form to add a perturbation, beside any site on screen.
import { label } from "../kernel/sites";
import type { Store } from "../store";

export function AddButton({ store, site }: { store: Store; site: string }) {
  if (store.isReadOnly.value) return null;
  return (
    <button
      type="button"
      class="nni-icon nni-add-here"
      tabIndex={-1} // the rows are a single tab stop, where the space key perturbs
      aria-label={`Perturb ${label(site)} …`}
      title="Perturb …"
      data-testid="nni-add-here"
      onClick={(event) => {
        event.stopPropagation();
        store.select(site, false);
        store.openMenuCount.value += 1;
      }}
    >
      +
    </button>
  );
}
