// One perturbation: its switch, kind, site and strength, its state or its own effect, and a cross to
// remove it.
// Invariant: every part has a column of its own, so that nothing moves when one of them changes.
import type { Perturbation } from "../kernel/protocol";
import { label, rowOf } from "../kernel/sites";
import type { Store } from "../store";
import { useCopy } from "../python/copy";
import { NOT_MEASURED, count, exact, percent, real, signed } from "../ui/format";
import { ids } from "../ui/testids";
import { Strength } from "./Strength";

export function Row({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const python = p.python || p.expression;
  const [copy, said] = useCopy(python);
  const name = `${p.kind} on ${label(p.site)}`;
  return (
    <li class={p.enabled ? "nni-perturbation nni-on" : "nni-perturbation"} data-testid={ids.perturbation} data-id={p.id} data-site={p.site}>
      <button
        type="button"
        role="switch"
        class="nni-switch"
        aria-checked={p.enabled}
        aria-label={name}
        title={store.fixed.value ? (p.enabled ? "On" : "Off") : p.enabled ? "On: switch it off" : "Off: switch it on"}
        disabled={store.fixed.value}
        data-testid={ids.switch}
        onClick={() => store.adjust(p.id, !p.enabled, null)}
      >
        <span />
      </button>
      <button
        type="button"
        class="nni-kind"
        title={`${python}\nClick to copy`}
        aria-label={`${p.kind}: copy ${python}`}
        data-testid={ids.expression}
        data-value={p.expression}
        onClick={copy}
      >
        {p.kind}
      </button>
      <Where perturbation={p} store={store} />
      <Amount name={name} perturbation={p} store={store} />
      <span class="nni-waits" role="status">
        {said || <Status perturbation={p} store={store} />}
      </span>
      {!store.fixed.value && (
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
      )}
    </li>
  );
}

function Status({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  if (p.pending || p.compiling) return <Waits perturbation={p} />;
  if (!p.enabled || !p.not_acting) return <Alone perturbation={p} store={store} />;
  return (
    <span class="nni-not-acting" title={`Not acting here: ${p.not_acting}.`} data-testid={ids.notActing} data-value={p.not_acting}>
      not acting here<span class="nni-hidden">: {p.not_acting}</span>
    </span>
  );
}

/** Its own effect, if there are others; the effect of all together is beside the list. */
function Alone({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const one = store.state.value?.effect?.alone.find((a) => a.perturbation === p.id);
  if (!one || !p.enabled || store.wished.value) return null; // the effect is older than the change
  const [name, text] = one.loss_change === null ? ["output", part(one.output_change)] : ["loss", change(one.loss_change)];
  const all = [
    `${p.kind} alone:`,
    `loss ${change(one.loss_change)}`,
    `output ${part(one.output_change)}`,
    `KL divergence ${one.kl === null ? NOT_MEASURED : real(one.kl)}`,
    `top-1 changed ${part(one.top1_changed)}`,
  ];
  return (
    <span class="nni-alone" title={all.join("\n")} data-testid={ids.alone} data-value={exact(one.loss_change ?? one.output_change)}>
      <span class="nni-hidden">{name} alone </span>
      {text}
    </span>
  );
}

const change = (by: number | null): string => (by === null ? NOT_MEASURED : by === 0 ? "no change" : signed(by));
const part = (by: number | null): string => (by === null ? NOT_MEASURED : percent(by));

function Where({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const sites = store.sites.value;
  const row = sites && [p.site, ...p.sites].map((key) => rowOf(sites, key)).find((key) => key !== undefined);
  const all = p.reach > p.sites.length ? [...p.sites, `… ${count(p.reach)} sites`] : p.sites;
  const extra = [p.at === "output" ? "" : p.at, p.reach > 1 ? `${count(p.reach)} sites` : "", partOf(p)].filter(Boolean).join(", ");
  return (
    <span class="nni-where" title={[...(p.reach > 1 ? all : [p.site]), extra].filter(Boolean).join("\n")}>
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

/** The units and the example to which it is confined, in the words of its Python; "8–15" for a run. */
function partOf({ expression }: Perturbation): string {
  const parts = [...expression.matchAll(/\.only\(([^()]*)\)/g)].map(([, part]) => part.replace(/=/g, " "));
  return parts.join(", ").replace(/\d+(, \d+){2,}/g, (list) => runs(list.split(", ").map(Number)).join(", "));
}

function runs(numbers: readonly number[]): string[] {
  const found: [number, number][] = [];
  for (const n of numbers) {
    const last = found.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.flatMap(([from, to]) => (to - from < 2 ? [...new Set([from, to])].map(String) : [`${from}–${to}`]));
}

function Amount({ name, perturbation: p, store }: { name: string; perturbation: Perturbation; store: Store }) {
  if (p.units > 0) {
    return (
      <span class="nni-strength nni-units" data-testid={ids.units}>
        <MaskOf perturbation={p} store={store} />
      </span>
    );
  }
  if (p.strength === null) return <span class="nni-strength" />;
  if (store.fixed.value) return <span class="nni-strength">{`${p.strength_name} ${real(p.strength)}`}</span>;
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

/** The units that a mask switches off, with a link to the strip if that can edit it. */
function MaskOf({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const text = `mask: ${count(p.units_off)} of ${count(p.units)} off`;
  const row = store.sites.value?.byKey.has(p.site) && p.mask !== "" && p.at === "output";
  if (!row) return <>{text}</>;
  const edit = (): void => {
    store.select(p.site);
    store.panel.value = p.columns > 0 ? "values" : "units";
    if (p.columns === 0) store.unitsAxis.value = { site: p.site, axis: p.axis };
    store.editingMask.value = true;
  };
  return (
    <button type="button" class="nni-link" title={p.columns > 0 ? "Edit it on the picture" : "Edit it on the strip of units"} onClick={edit}>
      {text}
    </button>
  );
}

function Waits({ perturbation: p }: { perturbation: Perturbation }) {
  if (p.compiling) {
    return (
      <span title="The running program has no place for it yet. It goes on until a new one is compiled." data-testid={ids.rowCompiling}>
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
