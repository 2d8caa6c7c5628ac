// The form that adds a perturbation to the selected site: kind, place, strength, then a button.
// Invariants: nothing acts before the button is pressed, because a training may be running; the
// choice stays when another site is selected; the button and everything below keep their places.
import { useEffect, useRef, useState } from "preact/hooks";
import { OFFERS, type Offer, type Perturb, type Site } from "../kernel/protocol";
import type { Store } from "../store";
import { Choice } from "../ui/Choice";
import { ids } from "../ui/testids";
import { Strength } from "./Strength";

const PARTS = ["output", "input"] as const;
const GROUPS = [
  ["value", "Values"],
  ["gradient", "Gradients"],
] as const;

/** The kinds for which each program of a run that happens elsewhere has room. */
const STEERED = new Set(["Zero", "Scale"]);

export function Add({ store, site }: { store: Store; site: Site }) {
  const [kind, setKind] = useState(OFFERS[0].kind);
  const [at, setAt] = useState<Perturb["at"]>("output");
  const [strengths, setStrengths] = useState<Readonly<Record<string, number>>>({});
  const first = useRef<HTMLSelectElement>(null);
  const asked = store.adding.value;
  const seen = useRef(asked);
  useEffect(() => {
    if (asked !== seen.current) first.current?.focus();
    seen.current = asked;
  }, [asked]);
  if (site.single) return <p class="nni-add nni-faint nni-small">A perturbation acts on every array of the call: add it at the row above.</p>;
  if (!site.perturbable) return <p class="nni-add nni-faint nni-small">This module cannot be perturbed here.</p>;

  const recorded = store.state.value?.recorded ?? null;
  const offers = OFFERS.filter((o) => recorded === null || STEERED.has(o.kind));
  const offer = offers.find((o) => o.kind === kind) ?? offers[0]!;
  const strength = offer.strength === null ? null : (strengths[offer.kind] ?? offer.strength);
  const place = recorded === null ? at : "output";
  const why = whyNot(store, site, offer, place, strength);
  return (
    <form
      class="nni-add"
      noValidate // the number need not fit the slider's steps
      aria-label="Add a perturbation"
      onSubmit={(event) => {
        event.preventDefault();
        if (!why) store.perturb(site.key, offer.kind, strength, place);
      }}
    >
      <label class="nni-add-kind">
        Perturb
        <select ref={first} value={offer.kind} data-testid={ids.perturbKind} onChange={(event) => setKind(event.currentTarget.value)}>
          {GROUPS.filter(([group]) => offers.some((o) => o.group === group)).map(([group, words]) => (
            <optgroup key={group} label={words}>
              {offers.filter((o) => o.group === group).map((o) => (
                <option key={o.kind} value={o.kind}>
                  {o.kind}
                </option>
              ))}
            </optgroup>
          ))}
        </select>
      </label>
      {recorded === null && (
        <span class="nni-add-at">
          at
          <Choice label="Where it acts" testid={ids.perturbAt} value={at} options={PARTS} choose={setAt} />
        </span>
      )}
      <span class="nni-add-how">
        {strength !== null && (
          <>
            <span>{offer.strength_name}</span>
            <Strength
              name={`${offer.strength_name} of the ${offer.kind} to add`}
              value={strength}
              low={offer.low}
              high={offer.high}
              slider={ids.addStrength}
              number={ids.addStrengthNumber}
              change={(value) => setStrengths({ ...strengths, [offer.kind]: value })}
            />
          </>
        )}
        <span class="nni-faint nni-small" title={why || `Will ${offer.does}.`}>
          {why || `Will ${offer.does}.`}
        </span>
      </span>
      <button type="submit" class="nni-button" disabled={why !== ""} data-testid={ids.perturbAdd}>
        Add
      </button>
    </form>
  );
}

function whyNot(store: Store, site: Site, offer: Offer, at: string, strength: number | null): string {
  if (offer.least !== null && strength !== null && strength < offer.least) {
    return `Its ${offer.strength_name} is at least ${offer.least}.`;
  }
  const there = store.perturbations.value.some((p) => p.site === site.key && p.kind === offer.kind && p.at === at && !p.expression.includes(".only("));
  return there ? "It is already in the list." : "";
}
