// The panel of all perturbations: which are on, their strengths, how a change reaches the loop, and
// the effect beside them. Invariants: active perturbations are always visible, whatever is selected
// or scrolled; texts that come and go (pending, compiling, the effect) have a reserved place.
import type { Bridge } from "../kernel/bridge";
import type { Perturbation, State } from "../kernel/protocol";
import type { Store } from "../store";
import { count } from "../ui/format";
import { ids } from "../ui/testids";
import { EffectView } from "./EffectView";
import { Row } from "./Row";

const LISTENING: Readonly<Record<State["listening"], string>> = {
  during: "Changes act at the next step, even while a cell runs.",
  thread: "Changes act at the next step: the loop runs in a thread of its own.",
  after:
    "This kernel handles changes when the cell has finished; run the loop with insp.background(train) to change things meanwhile.",
};

export function Perturbations({ store, bridge }: { store: Store; bridge: Bridge }) {
  const state = store.state.value;
  const all = store.perturbations.value;
  if (!state || (state.recorded && all.length === 0)) return null; // its file says which passes were perturbed
  const empty = all.length === 0;
  const listening = bridge.settled.value && !store.replay.value ? LISTENING[state.listening] : "";
  return (
    <section class={empty ? "nni-panel nni-panel-empty" : state.recorded ? "nni-panel nni-panel-recorded" : "nni-panel"} aria-label="Perturbations" style={{ "--nni-count": all.length }}>
      <div class="nni-panel-head">
        <Master all={all} store={store} />
        <span class="nni-listening" title={listening} data-testid={ids.listening} data-value={state.listening}>
          {listening}
        </span>
        <Compiling programs={state.compiling} />
      </div>
      {!empty && (
        <>
          <ul class="nni-perturbations">
            {all.map((p) => (
              <Row key={p.id} perturbation={p} store={store} />
            ))}
          </ul>
          {state.recorded ? <p class="nni-faint nni-small">{state.no_effect}</p> : <EffectView state={state} store={store} />}
        </>
      )}
    </section>
  );
}

function Master({ all, store }: { all: readonly Perturbation[]; store: Store }) {
  if (all.length === 0) return <span class="nni-master nni-faint">Nothing is perturbed.</span>;
  const on = all.filter((p) => p.enabled).length;
  return (
    <span class="nni-master">
      {!store.fixed.value && (
        <button
          type="button"
          class="nni-button"
          data-testid={ids.switchAll}
          title={on > 0 ? "Switch every perturbation off" : "Switch every perturbation on"}
          onClick={() => store.switchAll(on === 0)}
        >
          {on > 0 ? "All off" : "All on"}
        </button>
      )}
      <span class={on > 0 ? "nni-change" : "nni-faint"}>
        {count(on)} of {count(all.length)} on
      </span>
    </span>
  );
}

function Compiling({ programs }: { programs: number }) {
  return (
    <span class="nni-compiling" role="status" data-testid={ids.compiling} data-value={programs}>
      {programs > 0 && (
        <>
          <span class="nni-moving" aria-hidden="true" />
          <span title="The running program has no place for it yet. It goes on until a new one is compiled.">
            {programs === 1 ? "compiling" : `compiling ${count(programs)}`}
          </span>
        </>
      )}
    </span>
  );
}
