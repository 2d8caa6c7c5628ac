// The five groups of panels, and the panel that each shows: the one that it showed last.
// Invariant: a panel is offered only where it can work, and a group without any is not offered.
import { batch } from "@preact/signals";
import type { Site } from "../kernel/protocol";
import type { Store } from "../store";

export const GROUPS = ["Look", "Units", "Test", "Explain", "Structure"] as const;
export type Group = (typeof GROUPS)[number];

/** The group of each panel, in the order of the tabs. */
export const GROUP_OF: Readonly<Record<string, Group>> = {
  overview: "Look",
  values: "Look",
  attention: "Look",
  experts: "Look",
  words: "Look",
  units: "Units",
  examples: "Units",
  sweep: "Test",
  compare: "Test",
  precision: "Test",
  attribution: "Explain",
  lens: "Explain",
  flow: "Structure",
  code: "Structure",
  nnx: "Structure",
};

/** The panels that a site has, in the order of the tabs. */
export function availablePanels({ replayNote, missingPanels, inputs, sites, studies, choices }: Store, site: Site): readonly string[] {
  const chosen = choices.value.filter((one) => sites.value?.list[one.header.site] === site);
  return Object.keys(GROUP_OF).filter((name) => {
    if (site.single) return name === "overview"; // one array of what a call returns: statistics only
    if (name === "experts" || name === "attention") {
      if (chosen.some((one) => one.header.experts === (name === "experts"))) return true;
      if (name === "experts" || !sites.value?.attending.has(site.key)) return false;
    }
    if (name === "lens" && !sites.value?.sequences && !studies.lens.value?.found) return false;
    if (name === "words" && !inputs.inputs.value?.tokens) return false;
    if ((name === "examples" || name === "lens" || name === "attribution") && replayNote.value) return (studies[name].value?.found ?? null) !== null;
    return !replayNote.value || !missingPanels.value.has(name === "attention" ? "values" : name);
  });
}

/** Shows a panel, which its group remembers. */
export function choosePanel(store: Store, name: string): void {
  batch(() => {
    store.panel.value = name;
    store.lastPanels.value = new Map(store.lastPanels.value).set(GROUP_OF[name]!, name);
  });
}

/** Shows the panel that a group, given by its number, showed last; whether it has one. */
export function chooseGroup(store: Store, number: number): boolean {
  const site = store.sites.value?.list[store.selectedIndex.value];
  const group = GROUPS[number];
  const panels = site ? availablePanels(store, site).filter((name) => GROUP_OF[name] === group) : [];
  if (panels.length === 0) return false;
  const last = store.lastPanels.value.get(group!);
  choosePanel(store, last !== undefined && panels.includes(last) ? last : panels[0]!);
  return true;
}
