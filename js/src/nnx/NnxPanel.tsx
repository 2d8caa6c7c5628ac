// The selected module as NNX sees it: structure (graphdef) beside state (Variables), shared objects,
// changes, and the modes that can be switched. Invariant: while it is shown, it asks the kernel when
// the selection or the step changes; it never shows another site's data as this one's.
import { useEffect } from "preact/hooks";
import { UNREACHABLE } from "../kernel/bridge";
import type { Site } from "../kernel/protocol";
import { useSiteQuery } from "../kernel/queries";
import type { Store } from "../store";
import { Graphdef } from "./Graphdef";
import { VariableTypes } from "./VariableTypes";
import { ModeList } from "./ModeList";
import { Variables } from "./Variables";

export function NnxPanel({ store, site }: { store: Store; site: Site }) {
  const { nnx, queries } = store;
  useSiteQuery(queries, "nnx", site.key, `${store.progress.value?.step} ${store.frame.value?.header.seq}`);
  useEffect(() => () => void (nnx.marked.value = 0), [nnx]);

  const result = queries.nnx.value?.site === site.key ? queries.nnx.value : null;
  const page = result?.data;
  const failed = nnx.error.value?.site === site.key ? nnx.error.value.text : "";
  // What is here can be viewed without a kernel, and the banner reports a missing one.
  const error = failed || (result?.error === UNREACHABLE ? "" : (result?.error ?? ""));
  return (
    <div class="nni-nnx" data-testid="nni-nnx" data-value={page?.site} aria-busy={!page && error === ""}>
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
