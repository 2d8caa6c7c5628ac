// The steps of the run as the charts of the detail show them: up to the newest one, with the pass on
// screen, the pinned one and the perturbed ones.
import { useMemo } from "preact/hooks";
import type { Steps } from "../charts/overSteps";
import { OTHER } from "../kernel/protocol";
import type { Store } from "../store";
import type { PassList } from "../time/passes";

export function useSteps(store: Store): Steps {
  const passes = store.timeline.passes.value;
  const shown = store.frame.value?.header.step ?? null;
  const pin = store.timeline.pinned.value?.header;
  const pinned = pin && pin.number !== OTHER ? pin.step : null;
  const perturbed = useMemo(() => rangesOf(passes), [passes]);
  const newest = Math.max(passes.count > 0 ? passes.step(passes.count - 1) : 0, shown ?? 0);
  return useMemo(() => ({ newest, shown, pinned, perturbed }), [newest, shown, pinned, perturbed]);
}

/** The steps from which to which something was perturbed. */
function rangesOf(passes: PassList): (readonly [number, number])[] {
  const ranges: [number, number][] = [];
  let on = false;
  for (let i = 0; i < passes.count; i++) {
    if (passes.perturbed(i) && on) ranges.at(-1)![1] = passes.step(i);
    else if (passes.perturbed(i)) ranges.push([passes.step(i), passes.step(i)]);
    on = passes.perturbed(i);
  }
  return ranges;
}
