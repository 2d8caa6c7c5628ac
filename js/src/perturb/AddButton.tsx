// A small button that opens the form to add a perturbation, beside any site on screen.
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { ids } from "../ui/testids";

export function AddButton({ store, site }: { store: Store; site: string }) {
  if (store.fixed.value) return null;
  return (
    <button
      type="button"
      class="nni-icon nni-add-here"
      tabIndex={-1} // the rows are a single tab stop, where the space key perturbs
      aria-label={`Perturb ${label(site)} …`}
      title="Perturb …"
      data-testid={ids.addHere}
      onClick={(event) => {
        event.stopPropagation();
        store.select(site, false);
        store.adding.value += 1;
      }}
    >
      +
    </button>
  );
}
