// One view: the top line with findings and perturbations below it, then time, tree and detail, and the
// bottom line. Invariants: the view has a fixed height, and only its rows, its panel and lists scroll,
// so the tree never leaves; an error in one part shows its text in that part's place and leaves the rest
// alone; a key pressed here never triggers a shortcut of the host.
import { render } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Detail } from "./detail/Detail";
import { chooseGroup } from "./detail/groups";
import { Findings } from "./findings/Findings";
import { Header } from "./header/Header";
import { Bridge } from "./kernel/bridge";
import { Banner } from "./notices/Banner";
import { Notices } from "./notices/Notices";
import { Perturbations } from "./perturb/Perturbations";
import { Footer } from "./python/Footer";
import { Store } from "./store";
import { TimePanel } from "./time/TimePanel";
import { Tree } from "./tree/Tree";
import { Boundary } from "./frame/Boundary";
import { fillPane } from "./frame/pane";
import { isStacked, ROW_HEIGHT, useLayout, type Layout } from "./frame/layout";
import { Split } from "./frame/Split";
import { dark, paletteOf, readTheme, watchTheme } from "./ui/theme";

interface Props {
  store: Store;
  bridge: Bridge;
}

/** A store, the bridge that fills it, and a function that ends both. */
export function connect(): Props & { close(): void } {
  const bridge = new Bridge();
  const store = new Store(bridge);
  bridge.receiver = store;
  return {
    store,
    bridge,
    close() {
      bridge.close();
      store.close();
    },
  };
}

/** Shows a view in `place`; call the returned function to end it. */
export function mount({ store, bridge }: Props, place: HTMLElement): () => void {
  readTheme();
  render(<App store={store} bridge={bridge} />, place);
  // Read before there is anything to style: with the first data, every row would be styled twice.
  paletteOf(place.querySelector(".nni-root")!);
  return () => render(null, place);
}

/** The least height of the detail, and its least width beside the tree. */
const [DETAIL_HEIGHT, DETAIL_WIDTH] = [240, 400];
const [TREE_HEAD, TREE_WIDTH] = [32, 280];

function App({ store, bridge }: Props) {
  const root = useRef<HTMLDivElement>(null);
  const view = useRef<HTMLDivElement>(null);
  const layout = useLayout(view);
  useLayoutEffect(watchTheme, []);
  const [docked, setDocked] = useState(false);
  const [here, setHere] = useState(false);
  useLayoutEffect(() => fillPane(view.current!, setDocked), []);
  useLayoutEffect(() => {
    if (!docked) return undefined;
    store.docked.value += 1;
    return () => void (store.docked.value -= 1);
  }, [docked]);
  const away = store.docked.value > 0 && !docked && !here;
  const alone = bridge.connection.value === "absent" && !store.sites.value;

  const onKeyDown = (event: KeyboardEvent): void => {
    const { target } = event;
    const typing = target instanceof HTMLInputElement && target.type !== "range" && target.type !== "checkbox";
    if (typing || target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") root.current!.querySelector<HTMLInputElement>(`[data-testid="nni-search"]`)?.focus();
    else if (!/^[1-5]$/.test(event.key) || !chooseGroup(store, Number(event.key) - 1)) return;
    event.preventDefault();
    event.stopPropagation();
  };

  // Lumino looks for the attribute from the focused element upwards, but tests its selectors (which
  // end in `:focus`) on the way: an element above the focused one is too late.
  const onFocusIn = (event: FocusEvent): void => {
    if (event.target instanceof Element) event.target.setAttribute("data-lm-suppress-shortcuts", "true");
  };

  return (
    <div
      ref={root}
      class={dark.value ? "nni-root nni-dark" : "nni-root"}
      data-testid="nni-root"
      data-lm-suppress-shortcuts="true"
      onFocusIn={onFocusIn}
      onKeyDown={onKeyDown}
    >
      <div ref={view} class={away || alone ? "nni-view nni-one-line" : "nni-view"} style={{ "--nni-row": `${ROW_HEIGHT}px` }}>
        {away ? (
          <p role="status" data-testid="nni-shown-elsewhere">
            {store.sites.value?.model ?? "The model"} is shown beside the notebook.
            <button type="button" class="nni-button" onClick={() => setHere(true)}>
              Show it here too
            </button>
          </p>
        ) : alone ? (
          <Banner store={store} bridge={bridge} />
        ) : (
          <Sections store={store} bridge={bridge} layout={layout} root={root} />
        )}
      </div>
    </div>
  );
}

function Sections({ store, bridge, layout, root }: Props & { layout: Layout; root: { readonly current: HTMLElement | null } }) {
  const [findings, setFindings] = useState(false);
  const closeFindings = (): void => {
    setFindings(false);
    root.current!.querySelector<HTMLElement>(`[data-testid="nni-findings"]`)?.focus();
  };

  return (
    <>
      <Boundary name="the header"><Header store={store} bridge={bridge} open={findings} setOpen={setFindings} /></Boundary>
      {findings && <Boundary name="the findings"><Findings store={store} close={closeFindings} /></Boundary>}
      <Boundary name="the notices"><Banner store={store} bridge={bridge} /></Boundary>
      <Boundary name="the notices"><Notices store={store} bridge={bridge} /></Boundary>
      <Boundary name="the perturbations"><Perturbations store={store} bridge={bridge} /></Boundary>
      <Body store={store} layout={layout} />
      <Boundary name="the bottom line"><Footer store={store} /></Boundary>
    </>
  );
}

/** Time, tree and detail, with the bars between them. */
function Body({ store, layout }: { store: Store; layout: Layout }) {
  const stacked = isStacked(layout);
  const sizes = store.sizes.value;
  const [tree, above] = [`tree ${layout}`, `time ${layout}`];
  const rows = TREE_HEAD + 3 * ROW_HEIGHT;
  const size = (name: string): string | undefined => (name in sizes ? `${sizes[name]}px` : undefined);
  return (
    <div
      class={stacked ? "nni-body nni-stacked" : "nni-body nni-side-by-side"}
      style={{
        "--nni-count": store.tree.rows.value.length,
        "--nni-shown": store.perturbations.value.length > 0 ? 6 : 7,
        "--nni-metrics": store.curves.value.length,
        "--nni-tree-size": size(tree),
        "--nni-tree-height": stacked ? undefined : size(above),
      }}
    >
      <Boundary name="time"><TimePanel store={store} layout={layout} /></Boundary>
      <Boundary name="the tree"><Tree store={store} layout={layout} /></Boundary>
      {!stacked && (
        <Split label="Height of the tree" sizes={store.sizes} name={above} sideways={false} part=".nni-tree" leastSize={rows} leastRest={100} />
      )}
      <Split
        label={stacked ? "Height of the tree" : "Width of the tree"}
        testid="nni-split"
        sizes={store.sizes}
        name={tree}
        sideways={!stacked}
        part=".nni-tree"
        leastSize={stacked ? rows : TREE_WIDTH}
        leastRest={stacked ? DETAIL_HEIGHT : DETAIL_WIDTH}
      />
      <Boundary name="the detail"><Detail store={store} /></Boundary>
    </div>
  );
}
