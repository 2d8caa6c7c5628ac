// Everything about the selected site: its path, perturbing it, and the panels.
import { label } from "../kernel/sites";
import { Add } from "../perturb/Add";
import type { Store } from "../store";
import { ids } from "../ui/testids";
import { CopyPath } from "./CopyPath";
import { Operations } from "./Operations";
import { Panels } from "./Panels";

export function Detail({ store }: { store: Store }) {
  const sites = store.sites.value;
  const index = store.selectedIndex.value;
  const site = index >= 0 ? sites?.list[index] : undefined;
  if (!site) {
    return (
      <section class="nni-detail" data-testid={ids.detail}>
        <p class="nni-empty">{sites ? "Select a module to see inside it." : "Nothing to show yet."}</p>
      </section>
    );
  }
  return (
    <section class="nni-detail" aria-label="Selected module" data-testid={ids.detail}>
      <div class="nni-path">
        <h3 data-testid={ids.selected} data-value={site.key}>
          {label(site.key)}
        </h3>
        <CopyPath path={site.key} />
        {store.replay.value === "" && <Operations store={store} sites={sites!} index={index} />}
      </div>
      {!store.fixed.value && <Add store={store} site={site} />}
      {site.unseen !== "" && <p class="nni-unseen">Not seen: {site.unseen}</p>}
      <Panels store={store} site={site} index={index} />
    </section>
  );
}
