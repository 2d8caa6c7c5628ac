// One view: header, findings and perturbations, with the tree and the detail below them.
// Invariants: an error in one part shows its text in that part's place and leaves the rest alone;
// a key pressed here never triggers a shortcut of the host.
import { render, type ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Detail } from "./detail/Detail";
import { Header } from "./header/Header";
import { Bridge } from "./kernel/bridge";
import { Metrics } from "./metrics/Metrics";
import { Banner } from "./notices/Banner";
import { Notices } from "./notices/Notices";
import { Perturbations } from "./perturb/Perturbations";
import { PythonLine } from "./python/PythonLine";
import { Store } from "./store";
import { TimeStrip } from "./time/TimeStrip";
import { Tree } from "./tree/Tree";
import { Boundary } from "./ui/Boundary";
import { ids } from "./ui/testids";
import { dark, paletteOf, readTheme, watchTheme } from "./ui/theme";

interface Props {
  store: Store;
  bridge: Bridge;
}

/** A store, the bridge that fills it, and a function that ends both. */
export function connected(): Props & { close(): void } {
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

function App({ store, bridge }: Props) {
  const root = useRef<HTMLDivElement>(null);
  useLayoutEffect(watchTheme, []);

  const onKeyDown = (event: KeyboardEvent): void => {
    const typing = event.target instanceof HTMLInputElement;
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    root.current!.querySelector<HTMLInputElement>(`[data-testid="${ids.search}"]`)?.focus();
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
      data-testid={ids.root}
      data-lm-suppress-shortcuts="true"
      onFocusIn={onFocusIn}
      onKeyDown={onKeyDown}
    >
      <div class="nni-view">
        <Part name="the header" view={<Header store={store} />} />
        <Part name="the time strip" view={<TimeStrip store={store} />} />
        <Part name="the notices" view={<Banner store={store} bridge={bridge} />} />
        <Part name="the notices" view={<Notices store={store} bridge={bridge} />} />
        <Part name="the perturbations" view={<Perturbations store={store} bridge={bridge} />} />
        <div class="nni-body">
          <div class="nni-side">
            <Part name="the tree" view={<Tree store={store} />} />
            <Part name="the metrics" view={<Metrics store={store} />} />
          </div>
          <Part name="the detail" view={<Detail store={store} />} />
        </div>
        <Part name="the line of Python" view={<PythonLine store={store} />} />
      </div>
    </div>
  );
}

function Part({ name, view }: { name: string; view: ComponentChildren }) {
  return <Boundary name={name}>{view}</Boundary>;
}
