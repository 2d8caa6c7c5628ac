// The two buttons that put a perturbation on the selected site.
import type { Site } from "../protocol";
import type { Store } from "../store";
import { ids } from "../testids";

const FIRST_STRENGTH = 0.5;

export function Add({ store, site }: { store: Store; site: Site }) {
  if (!site.perturbable) return <span class="nni-faint nni-small">cannot be perturbed here</span>;
  const there = new Set(store.perturbations.value.filter((p) => p.site === site.key).map((p) => p.kind));
  return (
    <span class="nni-add">
      <span class="nni-faint nni-small">perturb</span>
      <button
        type="button"
        class="nni-button"
        disabled={there.has("Zero")}
        title={there.has("Zero") ? "Already in the list above" : "Replace its output by zeros (space in the tree)"}
        data-testid={ids.perturbZero}
        onClick={() => store.perturb(site.key, "Zero", null)}
      >
        Zero
      </button>
      <button
        type="button"
        class="nni-button"
        disabled={there.has("Scale")}
        title={there.has("Scale") ? "Already in the list above" : "Multiply its output by a factor"}
        data-testid={ids.perturbScale}
        onClick={() => store.perturb(site.key, "Scale", FIRST_STRENGTH)}
      >
        Scale
      </button>
    </span>
  );
}
