// The panels of the selected site, one at a time, and the tabs that choose one.
// Invariant: a hidden panel is not rendered, so it costs nothing. The keys are those of the ARIA
// tabs pattern (arrows, Home, End).
import type { FunctionComponent } from "preact";
import { CodePanel } from "../code/CodePanel";
import { CompareOptions, ComparePanel } from "../compare/ComparePanel";
import { Flow } from "../flow/Flow";
import { Examples } from "../inputs/Examples";
import type { Site } from "../kernel/protocol";
import { NnxPanel } from "../nnx/NnxPanel";
import type { Store } from "../store";
import { AttributionPanel } from "../studies/AttributionPanel";
import { ExamplesPanel } from "../studies/ExamplesPanel";
import { LensPanel } from "../studies/LensPanel";
import { SweepOptions, SweepPanel } from "../sweep/SweepPanel";
import { ids } from "../ui/testids";
import { UnitsPanel } from "../units/UnitsPanel";
import { ValuesPanel } from "../values/Values";
import { WordsPanel } from "../words/WordsPanel";
import { Distributions, DistributionsOptions } from "../distributions/Distributions";
import { Facts } from "./Facts";

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

/** The panels that look at an example of the last forward pass. */
const OF_STUDIES = new Set(["lens", "attribution"]);
/** The panels that look at one example; a saved page, which may have none of them, shows the batch first. */
const OF_EXAMPLES = new Set([...OF_STUDIES, "values", "words"]);
/** In the order of the tabs; the first one is shown initially. */
const panelsOf = ({ site, store: { replay, missing, inputs, studies } }: PanelProps): readonly Panel[] =>
  ALL.filter(({ name }) => {
    if (site.single) return name === "overview"; // one array of what a call returns: statistics only
    if (name === "words" && !inputs.inputs.value?.tokens) return false;
    if ((name === "examples" || name === "lens" || name === "attribution") && replay.value) return studies[name].value?.found !== null && studies[name].value !== null;
    return !replay.value || !missing.value.has(name);
  });
const ALL: readonly Panel[] = [
  { name: "overview", title: "Distributions", View: Overview, Options: DistributionsOptions },
  { name: "values", title: "Values", View: ValuesPanel },
  { name: "words", title: "Words", View: WordsPanel },
  { name: "units", title: "Units", View: UnitsPanel },
  { name: "examples", title: "Examples", View: ExamplesPanel },
  { name: "lens", title: "Lens", View: LensPanel },
  { name: "attribution", title: "Attribution", View: AttributionPanel },
  { name: "flow", title: "Flow", View: Flow },
  { name: "code", title: "Code", View: CodePanel },
  { name: "nnx", title: "NNX", View: NnxPanel },
  { name: "sweep", title: "Sweep", View: SweepPanel, Options: SweepOptions },
  { name: "compare", title: "Compare", View: ComparePanel, Options: CompareOptions },
];

/** The least height in pixels of the selected module in a narrow view. */
const ROOM = 450;

function Overview(props: PanelProps) {
  return (
    <>
      <Facts site={props.site} />
      <Distributions {...props} />
    </>
  );
}

export function Panels(props: PanelProps) {
  const panels = panelsOf(props);
  const chosen = props.store.panel.value;
  const at = Math.max(
    0,
    panels.findIndex((panel) => panel.name === chosen),
  );
  const { name, View, Options } = panels[at]!;
  if (panels.length === 1) return <View {...props} />;

  // in a narrow view the tree scrolls with the panel: if there is little room below it, it gives way
  const choose = (next: number, within: Element): void => {
    props.store.panel.value = panels[next]!.name;
    const body = within.closest(".nni-body")!;
    const [around, detail] = [body, within.closest(".nni-detail")!].map((part) => part.getBoundingClientRect());
    if (around.bottom - detail.top < ROOM) body.scrollTop += detail.top - around.top;
  };
  const show = (to: number, strip: Element): void => {
    const next = (to + panels.length) % panels.length;
    choose(next, strip);
    strip.querySelectorAll<HTMLElement>("[role=tab]")[next]!.focus({ preventScroll: true });
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: panels.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to, event.currentTarget as Element);
  };
  return (
    <>
      <div class="nni-tabs" role="tablist" aria-label="What to show of the module" onKeyDown={onKeyDown}>
        {panels.map((panel, i) => (
          <button
            key={panel.name}
            type="button"
            role="tab"
            aria-selected={panel.name === name}
            tabIndex={panel.name === name ? 0 : -1}
            data-testid={ids.tab(panel.name)}
            onClick={(event) => choose(i, event.currentTarget)}
          >
            {panel.title}
          </button>
        ))}
      </div>
      {Options && (
        <div class="nni-options">
          <Options {...props} />
        </div>
      )}
      {(OF_EXAMPLES.has(name) || (name === "overview" && props.store.replay.value !== "")) && <Examples store={props.store} studied={OF_STUDIES.has(name)} />}
      <div class="nni-tabpanel" role="tabpanel" aria-label={panels[at]!.title}>
        <View {...props} />
      </div>
    </>
  );
}
