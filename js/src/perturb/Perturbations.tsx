// The strip of all perturbations, there whenever there is one, with their effect beside them.
// Invariant: what is on is always visible, whatever is selected or scrolled.
import { label } from "../sites";
import type { Perturbation } from "../protocol";
import type { Store } from "../store";
import { ids } from "../testids";
import { EffectView } from "./EffectView";
import { Strength } from "./Strength";

export function Perturbations({ store }: { store: Store }) {
  const all = store.perturbations.value;
  if (all.length === 0) return null;
  return (
    <section class="nni-strip" aria-label="Perturbations">
      <ul class="nni-perturbations">
        {all.map((p) => (
          <Row key={p.id} perturbation={p} store={store} />
        ))}
      </ul>
      <EffectView state={store.state.value} />
    </section>
  );
}

function Row({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const name = `${p.kind} on ${label(p.site)}`;
  return (
    <li class={p.enabled ? "nni-perturbation nni-on" : "nni-perturbation"} data-testid={ids.perturbation} data-id={p.id} data-site={p.site}>
      <button
        type="button"
        role="switch"
        class="nni-switch"
        aria-checked={p.enabled}
        aria-label={name}
        title={p.enabled ? "On: switch it off" : "Off: switch it on"}
        data-testid={ids.switch}
        onClick={() => store.adjust(p.id, !p.enabled, null)}
      >
        <span />
      </button>
      <span class="nni-kind">{p.kind}</span>
      <button type="button" class="nni-link nni-site" title={p.site} onClick={() => store.select(p.site)}>
        {label(p.site)}
      </button>
      {p.strength !== null && (
        <Strength name={name} value={p.strength} change={(strength) => store.adjust(p.id, p.enabled, strength)} />
      )}
      {p.pending && (
        <span class="nni-pending" data-testid={ids.pending}>
          from the next step
        </span>
      )}
      <button
        type="button"
        class="nni-icon"
        aria-label={`Remove ${name}`}
        title="Remove"
        data-testid={ids.remove}
        onClick={() => store.remove(p.id)}
      >
        ×
      </button>
    </li>
  );
}
