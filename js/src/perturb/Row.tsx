// One perturbation: its switch, what it is, where, how strong, what it waits for, and a cross.
// Invariant: every part has a column of its own, so that nothing moves when one of them changes.
import { useCopy } from "../copy";
import { count } from "../format";
import { label, rowOf } from "../sites";
import type { Perturbation } from "../protocol";
import type { Store } from "../store";
import { ids } from "../testids";
import { Strength } from "./Strength";

export function Row({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const [copy, said] = useCopy(p.expression);
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
      <button
        type="button"
        class="nni-kind"
        title={`${p.expression}\nClick to copy`}
        aria-label={`${p.kind}: copy ${p.expression}`}
        data-testid={ids.expression}
        data-value={p.expression}
        onClick={copy}
      >
        {p.kind}
      </button>
      <Where perturbation={p} store={store} />
      <Amount name={name} perturbation={p} store={store} />
      <span class="nni-waits" role="status">
        {said || <Waits perturbation={p} />}
      </span>
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

function Where({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const sites = store.sites.value;
  const row = sites && [p.site, ...p.sites].map((key) => rowOf(sites, key)).find((key) => key !== undefined);
  const all = p.reach > p.sites.length ? [...p.sites, `… ${count(p.reach)} sites`] : p.sites;
  const extra = [p.at === "output" ? "" : p.at, p.reach > 1 ? `${count(p.reach)} sites` : ""].filter(Boolean).join(", ");
  return (
    <span class="nni-where" title={p.reach > 1 ? all.join("\n") : p.site}>
      {row === undefined || row === null ? (
        <span class="nni-site">{label(p.site)}</span>
      ) : (
        <button type="button" class="nni-link nni-site" onClick={() => store.select(row)}>
          {label(p.site)}
        </button>
      )}
      {extra && <span class="nni-extra">{extra}</span>}
    </span>
  );
}

function Amount({ name, perturbation: p, store }: { name: string; perturbation: Perturbation; store: Store }) {
  if (p.units > 0) {
    return (
      <span class="nni-strength nni-units" data-testid={ids.units}>
        mask: {count(p.units_off)} of {count(p.units)} off
      </span>
    );
  }
  if (p.strength === null) return <span class="nni-strength" />;
  return (
    <Strength
      name={`${p.strength_name} of ${name}`}
      value={p.strength}
      low={p.low}
      high={p.high}
      slider={ids.strength}
      number={ids.strengthNumber}
      change={(strength) => store.adjust(p.id, p.enabled, strength)}
    />
  );
}

function Waits({ perturbation: p }: { perturbation: Perturbation }) {
  if (p.compiling) {
    return (
      <span title="The running program has no place for it yet: another one is being compiled, and this one goes on" data-testid={ids.rowCompiling}>
        compiling
      </span>
    );
  }
  if (!p.pending) return null;
  return (
    <span title="The loop takes it over at its next step" data-testid={ids.pending}>
      next step
    </span>
  );
}
