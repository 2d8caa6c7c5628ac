// The top line: the model, the progress of the run, whether training is perturbed, the findings and
// the cost.
import { Findings } from "../findings/Findings";
import type { Store } from "../store";
import { Badge } from "../ui/Badge";
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
        <Badge look="on" sign="◆" role="status" title="A perturbation acts on the real step, and hence on what the model learns" testid={ids.trainingPerturbed}>
          training is perturbed
        </Badge>
      )}
      <span class="nni-grow" />
      <Findings store={store} />
      {state?.cost && <CostCorner cost={state.cost} />}
    </header>
  );
}
