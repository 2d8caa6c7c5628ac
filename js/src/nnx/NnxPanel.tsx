// The selected module as NNX sees it: structure (graphdef) beside state (Variables), shared objects,
// changes, and the modes that can be switched. Invariant: while it is shown, it asks the kernel when
// the selection or the step changes; it never shows another site's data as this one's.
import { useEffect } from "preact/hooks";
import type { Site } from "../kernel/protocol";
import type { Store } from "../store";
import { Graphdef } from "./Graphdef";
import { VariableTypes } from "./VariableTypes";
import { ModeList } from "./ModeList";
import { Variables } from "./Variables";

export function NnxPanel({ store, site }: { store: Store; site: Site }) {
  const { nnx } = store;
  const step = store.progress.value?.step;
  const frame = store.frame.value?.header.seq;
  useEffect(() => nnx.ask(site.key), [nnx, site.key, step, frame]);
  useEffect(() => () => nnx.leave(), [nnx]);

  const page = nnx.page.value?.site === site.key ? nnx.page.value : null;
  const error = nnx.error.value?.site === site.key ? nnx.error.value.text : "";
  return (
    <div class="nni-nnx" data-testid="nni-nnx" data-value={page?.site} aria-busy={nnx.asking.value && !page}>
      {error !== "" && (
        <p class="nni-nnx-error" role="status">
          {error}
        </p>
      )}
      {!page && error === "" && <p class="nni-empty">Reading the module …</p>}
      {page && (
        <>
          <div class="nni-nnx-sides">
            <Graphdef store={store} page={page} />
            <div class="nni-nnx-side">
              <VariableTypes page={page} />
              <ModeList store={store} page={page} />
            </div>
          </div>
          <Variables store={store} page={page} />
          <p class="nni-faint nni-small nni-nnx-about">
            <code>nnx.split</code> takes a module apart into a <b>graphdef</b>, its structure (static: a different one needs a new
            compiled program), and a <b>state</b>, its Variables. <code>nnx.merge</code> puts them together again.
          </p>
        </>
      )}
    </div>
  );
}
