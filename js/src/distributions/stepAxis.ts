// The steps of the run as the charts of the detail show them: up to the newest one, with the pass on
// screen, the pinned one and the perturbed ones.
import { useMemo } from "preact/hooks";
import type { StepAxis } from "../charts/history";
import { OTHER } from "../kernel/protocol";
import type { Store } from "../store";
import { perturbedSteps } from "../time/passes";

export function useStepAxis(store: Store): StepAxis {
  const passes = store.timeline.passes.value;
  const shown = store.frame.value?.header.step ?? null;
  const pin = store.timeline.pinned.value?.header;
  const pinned = pin && pin.number !== OTHER ? pin.step : null;
  const perturbed = useMemo(() => perturbedSteps(passes), [passes]);
  const newest = Math.max(passes.count > 0 ? passes.step(passes.count - 1) : 0, shown ?? 0);
  return useMemo(() => ({ newest, shown, pinned, perturbed }), [newest, shown, pinned, perturbed]);
}
