// The bar of all perturbations: a chip for each, then their effect; the button at its end opens the whole
// table below it. Invariants: nothing is there while there are none; active perturbations are always in
// sight, whatever is selected or scrolled; switching one moves nothing, for what comes and goes (pending,
// compiling, the effect) has a place of its own.
import { useState } from "preact/hooks";
import type { Bridge } from "../kernel/bridge";
import type { Perturbation, State } from "../kernel/protocol";
import type { Store } from "../store";
import { count } from "../ui/format";
import { label } from "../kernel/sites";
import { Chip, PendingNote } from "./Chip";
import { EffectLine } from "./EffectLine";
import { EffectTable } from "./EffectTable";

export function Perturbations({ store, bridge }: { store: Store; bridge: Bridge }) {
  const state = store.state.value;
  const all = store.perturbations.value;
  const [open, setOpen] = useState(false);
  const adding = store.pendingNote.value ? store.pendingPerturbations.value : [];
  if (!state || all.length + adding.length === 0) return null;
  const waits = state.listening === "after" && bridge.settled.value && store.replayNote.value === "" && store.progress.value?.running;
  return (
    <section class="nni-perturb" aria-label="Perturbations" data-testid="nni-perturb-bar">
      <ul class="nni-chips" aria-label="Perturbations">
        {all.map((p) => (
          <Chip key={p.id} perturbation={p} store={store} />
        ))}
        {adding.map(({ kind, site }, i) => (
          <li key={`${i} ${kind} ${site}`} class="nni-chip nni-faint" role="status" data-testid="nni-adding" data-site={site}>
            {kind} <bdi>{label(site)}</bdi> <PendingNote store={store} />
          </li>
        ))}
      </ul>
      <div class="nni-effect-bar">
        <Compiling programs={state.compiling} />
        {waits ? (
          <span class="nni-effect-items" title="Run the loop with insp.background(train) to change things meanwhile">
            Changes act when the cell has ended: insp.background(train) lets them act meanwhile.
          </span>
        ) : state.recorded ? (
          <span class="nni-effect-items nni-faint" title={state.no_effect}>
            {state.no_effect}
          </span>
        ) : (
          <EffectLine state={state} store={store} />
        )}
        <button
          type="button"
          class="nni-icon"
          aria-label="The effect in full"
          aria-expanded={open}
          title={open ? "Close the table of the effect" : "The effect in full"}
          data-testid="nni-effect-more"
          onClick={() => setOpen(!open)}
        >
          {open ? "▴" : "▾"}
        </button>
      </div>
      {open && (
        <div class="nni-effect-full">
          <SwitchAll all={all} store={store} />
          {!state.recorded && <EffectTable state={state} store={store} />}
        </div>
      )}
    </section>
  );
}

function SwitchAll({ all, store }: { all: readonly Perturbation[]; store: Store }) {
  const on = all.filter((p) => p.enabled).length;
  return (
    <p class="nni-switch-all-line">
      {!store.isReadOnly.value && (
        <button
          type="button"
          class="nni-button"
          data-testid="nni-switch-all"
          title={on > 0 ? "Switch every perturbation off" : "Switch every perturbation on"}
          onClick={() => store.switchAll(on === 0)}
        >
          {on > 0 ? "All off" : "All on"}
        </button>
      )}
      <span class={on > 0 ? "nni-change" : "nni-faint"}>
        {count(on)} of {count(all.length)} on
      </span>
    </p>
  );
}

function Compiling({ programs }: { programs: State["compiling"] }) {
  const text = programs === 1 ? "compiling" : `compiling ${count(programs)}`;
  return (
    <span class="nni-compiling" role="status" title={programs > 0 ? `${text}: the running program has no place for it yet, and goes on until a new one is compiled.` : undefined} data-testid="nni-compiling" data-value={programs}>
      {programs > 0 && (
        <>
          <span class="nni-compiling-bar" aria-hidden="true" />
          <span class="nni-hidden">{text}</span>
        </>
      )}
    </span>
  );
}
