// The panels of the selected site, one at a time, and the tabs that choose one: five groups, and in the
// line of a group its panels, then the choices of the panel on show. Invariants: a hidden panel is not
// rendered, so it costs nothing; only the panel scrolls. The keys are those of the ARIA tabs pattern
// (arrows, Home, End), and 1 to 5 for the groups.
import type { FunctionComponent } from "preact";
import { AttentionPanel } from "../attention/AttentionPanel";
import { HeadStats } from "../attention/HeadStats";
import { CastsPanel } from "../casts/CastsPanel";
import { CodePanel } from "../code/CodePanel";
import { CompareOptions, ComparePanel } from "../compare/ComparePanel";
import { FlowPanel, FlowOptions } from "../flow/FlowPanel";
import type { Site } from "../kernel/protocol";
import { NnxPanel } from "../nnx/NnxPanel";
import type { Store } from "../store";
import { AttributionOptions, AttributionPanel } from "../studies/AttributionPanel";
import { ExamplesOptions, ExamplesPanel } from "../studies/ExamplesPanel";
import { LensOptions, LensPanel } from "../studies/LensPanel";
import { SweepOptions, SweepPanel } from "../sweep/SweepPanel";
import { UnitsOptions, UnitsPanel } from "../units/UnitsPanel";
import { AttentionOptions, ValuesOptions } from "../values/Options";
import { ValuesPanel } from "../values/ValuesPanel";
import { WordsOptions, WordsPanel } from "../words/WordsPanel";
import { Distributions, DistributionsOptions } from "../distributions/Distributions";
import { GROUPS, GROUP_OF, chooseGroup, choosePanel, availablePanels } from "./groups";

interface PanelProps {
  readonly store: Store;
  readonly site: Site;
  readonly index: number;
}

interface Panel {
  readonly name: string;
  readonly title: string;
  readonly View: FunctionComponent<PanelProps>;
  /** Its choices, at the end of the line of the tabs: a few words (`ui/Pick`), and the menu (`ui/More`). */
  readonly Options?: FunctionComponent<PanelProps>;
}

/** Every panel that `groups.ts` may offer. */
const PANELS: readonly Panel[] = [
  { name: "overview", title: "Distributions", View: Distributions, Options: DistributionsOptions },
  { name: "values", title: "Values", View: ValuesPanel, Options: ValuesOptions },
  { name: "attention", title: "Attention", View: AttentionPanel, Options: AttentionOptions },
  { name: "experts", title: "Experts", View: HeadStats },
  { name: "words", title: "Words", View: WordsPanel, Options: WordsOptions },
  { name: "units", title: "Units", View: UnitsPanel, Options: UnitsOptions },
  { name: "examples", title: "Examples", View: ExamplesPanel, Options: ExamplesOptions },
  { name: "attribution", title: "Attribution", View: AttributionPanel, Options: AttributionOptions },
  { name: "lens", title: "Lens", View: LensPanel, Options: LensOptions },
  { name: "flow", title: "Flow", View: FlowPanel, Options: FlowOptions },
  { name: "code", title: "Code", View: CodePanel },
  { name: "nnx", title: "State", View: NnxPanel },
  { name: "sweep", title: "Sweep", View: SweepPanel, Options: SweepOptions },
  { name: "compare", title: "Compare", View: ComparePanel, Options: CompareOptions },
  { name: "precision", title: "Precision", View: CastsPanel },
];

export function Panels(props: PanelProps) {
  const { store, site } = props;
  const names = availablePanels(store, site);
  const panels = PANELS.filter((panel) => names.includes(panel.name));
  const { name, title, View, Options } = panels.find((panel) => panel.name === store.panel.value) ?? panels[0]!;
  const group = GROUP_OF[name]!;
  const groups = GROUPS.filter((one) => names.some((panel) => GROUP_OF[panel] === one));
  const inGroup = panels.filter((panel) => GROUP_OF[panel.name] === group);
  return (
    <>
      {panels.length > 1 && (
        <div class="nni-tabs">
          <Tabs
            class="nni-groups"
            label="What to do with the module"
            names={groups}
            chosen={group}
            title={(one) => one}
            hint={(one) => `${one}: ${GROUPS.indexOf(one) + 1}`}
            testid="nni-group"
            choose={(one) => chooseGroup(store, GROUPS.indexOf(one))}
          />
          <Tabs
            class="nni-panel-tabs"
            label={group}
            names={inGroup.map((panel) => panel.name)}
            chosen={name}
            title={(one) => panels.find((panel) => panel.name === one)!.title}
            testid="nni-tab"
            choose={(one) => choosePanel(store, one)}
          />
          {Options && (
            <div class="nni-options">
              <Options {...props} />
            </div>
          )}
        </div>
      )}
      {/* it scrolls, and may have no other element that a key can reach */}
      <div key={name} class="nni-tabpanel" role="tabpanel" tabIndex={0} aria-label={title}>
        <View {...props} />
      </div>
    </>
  );
}

interface TabsProps<T extends string> {
  class: string;
  label: string;
  names: readonly T[];
  chosen: T;
  title: (name: T) => string;
  hint?: (name: T) => string;
  testid: string;
  choose: (name: T) => void;
}

function Tabs<T extends string>({ class: look, label, names, chosen, title, hint, testid, choose }: TabsProps<T>) {
  const onKeyDown = (event: KeyboardEvent): void => {
    const at = names.indexOf(chosen);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = (to + names.length) % names.length;
    choose(names[next]!);
    (event.currentTarget as Element).querySelectorAll<HTMLElement>("[role=tab]")[next]?.focus({ preventScroll: true });
  };
  return (
    <div class={look} role="tablist" aria-label={label} onKeyDown={onKeyDown}>
      {names.map((name) => (
        <button
          key={name}
          type="button"
          role="tab"
          aria-selected={name === chosen}
          tabIndex={name === chosen ? 0 : -1}
          title={hint?.(name)}
          data-testid={`${testid}-${name}`}
          onClick={() => choose(name)}
        >
          {title(name)}
        </button>
      ))}
    </div>
  );
}
