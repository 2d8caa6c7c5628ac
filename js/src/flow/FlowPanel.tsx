// The panel "Flow": the module and the way out of it, the graph, the figure that colours it, and the
// modules that are not in it. Invariant: measurements change colours and sparklines, never positions;
// a graph that cannot be laid out is shown as a list.
import { computed, type ReadonlySignal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { ancestors, label } from "../kernel/sites";
import type { Store } from "../store";
import { exact, percent, real, count } from "../ui/format";
import { Select } from "../ui/Select";
import { COLOURINGS, colourScale, nodeValue, type ColourScale } from "./colouring";
import { Graph, type ZoomAction } from "./Graph";
import { FlowList } from "./FlowList";
import { showOuterFlow, selectNode } from "./navigation";

export function FlowOptions({ store }: { store: Store }) {
  const { figure } = store.flow;
  return <Select label="Colour by" testid="nni-flow-figure" value={figure.value} options={COLOURINGS} choose={(chosen) => (figure.value = chosen)} word={(one) => (one === "none" ? "no colour" : one)} />;
}

export function FlowPanel({ store }: { store: Store }) {
  const state = store.flow;
  const selected = store.selected.value;
  const sites = store.sites.value;
  const hold = useRef<ZoomAction | null>(null);
  useEffect(() => state.follow(selected), [state, selected, sites?.id]);

  const drawing = state.drawing.value;
  const flow = state.flow.value;
  const problem = state.problem.value;
  const colours = useMemo(() => computed(() => nodeColours(store)), [store]);
  return (
    <section class="nni-section nni-flow-panel" aria-label="Flow">
      <div class="nni-flow-head">
        <Crumbs store={store} />
        <span class="nni-grow" />
        <span class="nni-button-group" role="group" aria-label="Zoom">
          {(["out", "fit", "in"] as const).map((which) => (
            <button
              key={which}
              type="button"
              aria-label={{ out: "Zoom out", fit: "Show all", in: "Zoom in" }[which]}
              title={{ out: "Zoom out", fit: "Show all", in: "Zoom in (or ctrl and the wheel)" }[which]}
              data-testid={`nni-flow-${which}`}
              onClick={() => hold.current?.(which)}
            >
              {{ out: "−", fit: "fit", in: "+" }[which]}
            </button>
          ))}
        </span>
      </div>
      {problem !== "" && <p class="nni-unseen">{problem}</p>}
      {problem !== "" && flow ? (
        <FlowList flow={flow} />
      ) : drawing && drawing.flow.nodes.length > 0 ? (
        <Graph store={store} drawing={drawing} colours={colours} zoomAction={hold} />
      ) : (
        <p class="nni-flow-view nni-flow-empty">
          {drawing ? "None of these modules is called by the example." : "Laying out …"}
        </p>
      )}
      <Legend store={store} colours={colours} />
      {flow && flow.absent.length > 0 && <AbsentModules store={store} />}
    </section>
  );
}

function nodeColours(store: Store): ColourScale {
  const figure = store.flow.figure.value;
  const [frame, sites] = [figure === "none" ? null : store.frame.value, store.sites.value];
  const effect = figure === "effect" ? (store.state.value?.effect ?? null) : null;
  const values = new Map<string, number>();
  for (const key of store.flow.byKey.value.keys()) {
    const index = sites?.byKey.get(key);
    if (index !== undefined) values.set(key, nodeValue(figure, frame, index, effect, key));
  }
  return colourScale(figure, values);
}

function Crumbs({ store }: { store: Store }) {
  const scope = store.flow.scope.value;
  const sites = store.sites.value;
  const index = scope === null ? undefined : sites?.byKey.get(scope);
  if (!sites || index === undefined) return null;
  const above = ancestors(sites, index).reverse();
  return (
    <nav class="nni-crumbs" aria-label="Path to this flow">
      {above.map((key) => (
        <>
          <button key={key} type="button" class="nni-link" data-testid="nni-flow-crumb" data-site={key} onClick={() => showOuterFlow(store, key)}>
            {sites.list[sites.byKey.get(key)!].name || label(key)}
          </button>
          <span aria-hidden="true">›</span>
        </>
      ))}
      <b aria-current="location" data-testid="nni-flow" data-value={scope!}>
        {sites.list[index].name || label(scope!)}
      </b>
    </nav>
  );
}

/** The scale, and the figure of the node under the pointer or with the focus. Reads every frame. */
function Legend({ store, colours: signal }: { store: Store; colours: ReadonlySignal<ColourScale> }) {
  const figure = store.flow.figure.value;
  const colours = signal.value;
  const pointed = store.flow.pointed.value;
  const text = figure === "effect" ? percent : figure === "NaN and Inf" ? count : real;
  const known = Number.isFinite(colours.high);
  return (
    <div class="nni-flow-legend" data-figure={figure}>
      {figure === "none" ? (
        <span>
          Drag to move, double-click to go in. Arrows follow the edges, Enter goes in, Backspace out
          {!store.isReadOnly.value && ", Space switches Zero"}.
        </span>
      ) : known ? (
        <>
          <span>{figure}</span>
          <span data-testid="nni-flow-low" data-value={exact(colours.low)}>
            {text(colours.low)}
          </span>
          <span class="nni-flow-ramp" data-bad={figure === "NaN and Inf"} aria-hidden="true" />
          <span data-testid="nni-flow-high" data-value={exact(colours.high)}>
            {text(colours.high)}
          </span>
          <span class="nni-faint">{colours.log ? "logarithmic; " : ""}grey: not measured</span>
          <span class="nni-grow" />
          {pointed !== null && (
            <span class="nni-flow-under-pointer" role="status">
              {label(pointed)}: {colours.values.has(pointed) ? text(colours.values.get(pointed)!) : "not measured"}
            </span>
          )}
        </>
      ) : (
        <span>{figure === "effect" ? "There is no effect yet: perturb something, then call insp.run or insp.step." : `No ${figure} was measured here.`}</span>
      )}
    </div>
  );
}

function AbsentModules({ store }: { store: Store }) {
  const absent = store.flow.flow.value?.absent ?? [];
  return (
    <div class="nni-flow-absent">
      <span class="nni-faint">Not called here: </span>
      {absent.map(({ site, why }, i) => (
        <span key={site}>
          {i > 0 && ", "}
          <button type="button" class="nni-link" title={why} data-testid="nni-flow-absent" data-site={site} onClick={() => selectNode(store, site)}>
            {label(site)}
          </button>
          <span class="nni-faint"> ({why})</span>
        </span>
      ))}
    </div>
  );
}
