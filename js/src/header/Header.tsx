// The top line: the model, the progress of the run, whether training is perturbed, the findings and
// the cost.
import { Findings } from "../findings/Findings";
import type { Store } from "../store";
import { ids } from "../ui/testids";
import { CostCorner } from "./CostCorner";
import { RunProgress } from "./RunProgress";

export function Header({ store }: { store: Store }) {
  const sites = store.sites.value;
  const state = store.state.value;
  return (
    <header class="nni-header">
      <strong class="nni-model" title={sites?.model}>
        {sites?.model ?? "nnx_inspector"}
      </strong>
      <RunProgress store={store} />
      {state?.training_perturbed && (
        <span class="nni-training" role="status" data-testid={ids.trainingPerturbed}>
          training is perturbed
        </span>
      )}
      <span class="nni-grow" />
      <Findings store={store} />
      {state && <CostCorner cost={state.cost} />}
    </header>
  );
}
