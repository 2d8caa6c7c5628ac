// One perturbation as a chip: its switch, kind, amount and site, and a cross that removes it. A click on
// the amount opens it for editing. Invariant: no part of it becomes wider by being switched, or while it
// is compiled; only a change without an answer says in words what it waits for.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Perturbation } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { useCopy } from "../python/copy";
import { count, decimal } from "../ui/format";
import { SiteLink } from "../ui/SiteLink";
import { Strength } from "./Strength";

export function Chip({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const python = p.python || p.expression;
  const [copy, outcome] = useCopy(python);
  const name = `${p.kind} on ${label(p.site)}`;
  const fixed = store.isReadOnly.value;
  return (
    <li class={p.enabled ? "nni-chip nni-on" : "nni-chip"} data-testid="nni-perturbation" data-id={p.id} data-site={p.site}>
      <button
        type="button"
        role="switch"
        class="nni-switch"
        aria-checked={p.enabled}
        aria-label={name}
        title={fixed ? (p.enabled ? "On" : "Off") : p.enabled ? "On: switch it off" : "Off: switch it on"}
        disabled={fixed}
        data-testid="nni-switch"
        onClick={() => store.adjust(p.id, !p.enabled, null)}
      >
        <span />
      </button>
      <button
        type="button"
        class="nni-kind"
        title={outcome || `${python}\nClick to copy`}
        aria-label={`${p.kind}: copy ${python}`}
        data-testid="nni-expression"
        data-value={p.expression}
        onClick={copy}
      >
        {p.kind}
        <span class="nni-hidden" role="status">
          {outcome}
        </span>
      </button>
      <StrengthField name={name} perturbation={p} store={store} />
      <PerturbedSites perturbation={p} store={store} />
      {store.unanswered.value.has(p.id) && <PendingNote store={store} />}
      <ChipStatus perturbation={p} />
      {!fixed && (
        <button type="button" class="nni-icon" aria-label={`Remove ${name}`} title="Remove" data-testid="nni-remove" onClick={() => store.remove(p.id)}>
          ×
        </button>
      )}
    </li>
  );
}

/** When a change acts that has had no answer for a while. */
export function PendingNote({ store }: { store: Store }) {
  const words = store.pendingNote.value;
  if (!words) return null;
  return (
    <span class="nni-faint nni-chip-waits" role="status" data-testid="nni-waits">
      {words}
    </span>
  );
}

/** How far a change has come: a sign in a place of its own, and the words for it. */
function ChipStatus({ perturbation: p }: { perturbation: Perturbation }) {
  const [sign, id, words] = p.compiling
    ? ["◌", "nni-row-compiling", "compiling: the running program has no place for it yet, and goes on until a new one is compiled"]
    : p.pending
      ? ["…", "nni-pending", "next step: the loop takes it over at its next step"]
      : p.enabled && p.not_acting
        ? ["!", "nni-not-acting", `not acting here: ${p.not_acting}`]
        : ["", undefined, ""];
  return (
    <span class={sign === "!" ? "nni-chip-status nni-not-acting" : "nni-chip-status"} role="status" title={words || undefined}>
      {sign && (
        <>
          <span aria-hidden="true">{sign}</span>
          <span class="nni-hidden" data-testid={id} data-value={p.not_acting}>
            {words}
          </span>
        </>
      )}
    </span>
  );
}

function PerturbedSites({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
  const all = p.reach > p.sites.length ? [...p.sites, `… ${count(p.reach)} sites`] : p.sites;
  const extra = [p.at === "output" ? "" : p.at, p.reach > 1 ? `${count(p.reach)} sites` : "", confinementText(p)].filter(Boolean).join(", ");
  const title = [...(p.reach > 1 ? all : [label(p.site)]), extra].filter(Boolean).join("\n");
  return (
    <span class="nni-perturbed-site" title={title}>
      <SiteLink store={store} site={p.site} title={title} of={[p.site, ...p.sites]} />
      {extra && <span class="nni-confinement">{extra}</span>}
    </span>
  );
}

/** The units and the example to which it is confined, in the words of its Python; "8–15" for a run, "head 2" of an
 * attention. */
function confinementText({ expression, site }: Perturbation): string {
  const partText = (part: string): string => (site.includes("@attention") ? part.replace(/units \[(.*)\], axis -3/, "head $1") : part);
  const parts = [...expression.matchAll(/\.only\(([^()]*)\)/g)].map(([, part]) => partText(part!.replace(/=/g, " ")));
  return parts.join(", ").replace(/\d+(, \d+){2,}/g, (list) => runTexts(list.split(", ").map(Number)).join(", "));
}

function runTexts(numbers: readonly number[]): string[] {
  const found: [number, number][] = [];
  for (const n of numbers) {
    const last = found.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.flatMap(([from, to]) => (to - from < 2 ? [...new Set([from, to])].map(String) : [`${from}–${to}`]));
}

function StrengthField({ name, perturbation: p, store }: { name: string; perturbation: Perturbation; store: Store }) {
  const [open, setOpen] = useState(false);
  const place = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    if (open) place.current?.querySelector<HTMLElement>("input[type=number]")?.focus();
  }, [open]);
  if (p.units > 0) {
    return (
      <span data-testid="nni-units">
        <MaskLink perturbation={p} store={store} />
      </span>
    );
  }
  if (p.strength === null) return null;
  const text = p.strength_name === "factor" ? `× ${decimal(p.strength, 4)}` : `${p.strength_name} ${decimal(p.strength, 4)}`;
  if (store.isReadOnly.value) return <span>{text}</span>;
  if (!open) {
    const title = `${p.strength_name} of ${name}: ${decimal(p.strength, 4)}. Click to change it.`;
    return (
      <button type="button" class="nni-amount" aria-label={title} title={title} data-testid="nni-amount" onClick={() => setOpen(true)}>
        {text}
      </button>
    );
  }
  return (
    <span
      ref={place}
      onFocusOut={({ currentTarget, relatedTarget }) => {
        if (!(relatedTarget instanceof Node && currentTarget.contains(relatedTarget))) setOpen(false);
      }}
      onKeyDown={(event) => {
        if (event.key !== "Escape" && event.key !== "Enter") return;
        event.stopPropagation();
        setOpen(false);
      }}
    >
      <Strength
        name={`${p.strength_name} of ${name}`}
        value={p.strength}
        low={p.low}
        high={p.high}
        slider="nni-strength"
        number="nni-strength-number"
        change={(strength) => store.adjust(p.id, p.enabled, strength)}
      />
    </span>
  );
}

/** The units that a mask switches off, with a link to the strip if that can edit it. */
function MaskLink({ perturbation: p, store }: { perturbation: Perturbation; store: Store }) {
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
