// The menu that perturbs the selected site: where it acts, then a line for each kind with its strength.
// Invariants: nothing acts before a kind is pressed, because a training may be running; the place and the
// strengths stay when another site is selected.
import { useEffect, useRef, useState } from "preact/hooks";
import { OFFERS, type Offer, type Perturb, type Site } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { ButtonGroup } from "../ui/ButtonGroup";
import { NumberInput } from "../ui/NumberInput";
import { useMenu } from "../ui/useMenu";

const PLACES = ["output", "input"] as const;
const GROUPS = [
  ["value", "Values"],
  ["gradient", "Gradients"],
] as const;

/** The kinds for which each program of a run that happens elsewhere has room. */
const REMOTE_KINDS = new Set(["Zero", "Scale"]);

export function PerturbMenu({ store, site }: { store: Store; site: Site }) {
  const menu = useMenu();
  const [at, setAt] = useState<Perturb["at"]>("output");
  const [strengths, setStrengths] = useState<Readonly<Record<string, number>>>({});
  const list = useRef<HTMLDivElement>(null);
  const asked = store.openMenuCount.value;
  const seen = useRef(asked);
  const { setOpen } = menu;
  useEffect(() => {
    if (asked !== seen.current) setOpen(true);
    seen.current = asked;
  }, [asked, setOpen]);
  useEffect(() => {
    if (menu.open) list.current?.querySelector<HTMLElement>(".nni-perturb-kind")?.focus({ preventScroll: true });
  }, [menu.open]);

  const why = site.single ? "A perturbation acts on every array of the call: add it at the row above." : site.perturbable ? "" : "This module cannot be perturbed here.";
  const recorded = store.state.value?.recorded ?? null;
  const offers = OFFERS.filter((o) => recorded === null || REMOTE_KINDS.has(o.kind));
  const place = recorded === null ? at : "output";
  const onKeyDown = (event: KeyboardEvent): void => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by === undefined || !(event.target instanceof HTMLButtonElement)) return;
    const kinds = [...list.current!.querySelectorAll<HTMLButtonElement>(".nni-perturb-kind")].filter((kind) => !kind.disabled);
    event.preventDefault();
    event.stopPropagation();
    kinds[(kinds.indexOf(event.target) + by + kinds.length) % kinds.length]?.focus();
  };
  return (
    <span class="nni-menu-anchor" {...menu.around}>
      <button
        {...menu.button}
        type="button"
        class="nni-button"
        disabled={why !== ""}
        title={why || `Perturb ${label(site.key)}`}
        aria-expanded={menu.open}
        data-testid="nni-perturb"
      >
        ◆ Perturb ▾
      </button>
      {menu.open && why === "" && (
        <div class="nni-menu-list nni-perturb-menu" role="group" aria-label={`Perturb ${label(site.key)}`} tabIndex={-1} ref={list} onKeyDown={onKeyDown}>
          {recorded === null && (
            <span class="nni-perturb-at">
              <span class="nni-faint">at the</span>
              <ButtonGroup label="Where it acts" testid="nni-perturb-at" value={at} options={PLACES} choose={setAt} />
            </span>
          )}
          {GROUPS.map(([group, words]) => {
            const kinds = offers.filter((o) => o.group === group);
            if (kinds.length === 0) return null;
            return (
              <div key={group} role="group" aria-label={words}>
                {kinds.map((offer) => (
                  <KindLine
                    key={offer.kind}
                    offer={offer}
                    strength={strengths[offer.kind] ?? offer.strength}
                    there={isAdded(store, site, offer, place)}
                    change={(strength) => setStrengths({ ...strengths, [offer.kind]: strength })}
                    add={(strength) => {
                      store.perturb(site.key, offer.kind, strength, place);
                      menu.close();
                    }}
                  />
                ))}
              </div>
            );
          })}
        </div>
      )}
    </span>
  );
}

interface KindProps {
  offer: Offer;
  strength: number | null;
  there: boolean;
  change: (strength: number) => void;
  add: (strength: number | null) => void;
}

function KindLine({ offer, strength, there, change, add }: KindProps) {
  const low = offer.least !== null && strength !== null && strength < offer.least ? `Its ${offer.strength_name} is at least ${offer.least}.` : "";
  const why = low || (there ? "It is already in the list." : "");
  return (
    <span class="nni-perturb-line">
      <button type="button" class="nni-perturb-kind" disabled={why !== ""} title={why || `Will ${offer.does}.`} data-testid={`nni-perturb-${offer.kind}`} onClick={() => add(strength)}>
        <b>{offer.kind}</b> <span class="nni-faint">{why || offer.does}</span>
      </button>
      {offer.kind === "Zero" && <kbd class="nni-faint nni-small">space</kbd>}
      {strength !== null && (
        <NumberInput
          step="any"
          value={strength}
          aria-label={`${offer.strength_name} of the ${offer.kind} to add`}
          title={offer.strength_name}
          data-testid={`nni-add-strength-${offer.kind}`}
          change={change}
          onKeyDown={(event) => {
            if (event.key === "Enter" && why === "") add(strength);
          }}
        />
      )}
    </span>
  );
}

function isAdded(store: Store, site: Site, offer: Offer, at: string): boolean {
  return store.perturbations.value.some((p) => p.site === site.key && p.kind === offer.kind && p.at === at && !p.expression.includes(".only("));
}
