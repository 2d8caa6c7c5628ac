// Everything about the selected site: its path and facts, what can be done with it, and the panels.
// Invariant: the line of the site is 44 pixels high; a path that is too long loses its leading segments,
// and facts drop as a whole, from the right.
import { statistic } from "../kernel/decode";
import { groupDescription, isGroup, isState, label } from "../kernel/sites";
import type { Site } from "../kernel/protocol";
import { PerturbMenu } from "../perturb/PerturbMenu";
import type { Store } from "../store";
import { bytes, compact, count, shortType } from "../ui/format";
import { Menu } from "../ui/Menu";
import { CopyPath } from "./CopyPath";
import { Facts } from "./Facts";
import { Operations } from "./Operations";
import { Panels } from "./Panels";

export function Detail({ store }: { store: Store }) {
  const sites = store.sites.value;
  const index = store.selectedIndex.value;
  const site = index >= 0 ? sites?.list[index] : undefined;
  if (!site) {
    return (
      <section class="nni-detail" data-testid="nni-detail">
        <p class="nni-empty">{sites ? "Select a module to see inside it." : "Nothing to show yet."}</p>
      </section>
    );
  }
  const path = label(site.key);
  return (
    <section class="nni-detail" aria-label="Selected module" data-testid="nni-detail">
      <div class="nni-site-line">
        <div>
          <h3 title={path} data-testid="nni-selected" data-value={site.key}>
            <bdi>{path}</bdi>
          </h3>
          <p class="nni-site-facts">
            {siteFacts(store, site, index).map((fact) => (
              <span key={fact}>{fact}</span>
            ))}
          </p>
        </div>
        {!store.isReadOnly.value && <PerturbMenu store={store} site={site} />}
        <Menu label="More about this module" testid="nni-site-menu">
          <CopyPath path={site.key} />
          {store.replayNote.value === "" && <Operations store={store} sites={sites!} index={index} />}
          <Facts site={site} counted={maskText(store, site)} />
        </Menu>
      </div>
      {site.unseen !== "" && <p class="nni-unseen">Not seen: {site.unseen}</p>}
      <Panels store={store} site={site} index={index} />
    </section>
  );
}

/** Which positions the site's figures count; "" for all. */
function maskText(store: Store, site: Site): string {
  const where = store.sites.value?.where;
  return where && site.counted ? `counts only positions where ${where}` : "";
}

/** What is known of the module, the most wanted first. The pass on screen may have had another batch than the example. */
function siteFacts(store: Store, site: Site, index: number): readonly string[] {
  const [values, each] = arraySize(site.output) ?? [NaN, NaN];
  const frame = store.frame.value;
  const whole = site.calls === 1 && site.stacked <= 1 && !site.counted; // else the figures are of other values
  const measured = (whole && frame ? statistic(frame, index, 0, "size") : NaN) || values;
  return [
    isGroup(site) ? groupDescription(site) : `${site.kind} → ${shortType(site.output) || "nothing"}${(measured === values && !site.counted) || Number.isNaN(values) ? "" : " of the example"}`,
    maskText(store, site),
    isState(site) ? "" : `${count(site.parameters)} parameters`,
    Number.isNaN(measured) ? "" : `${bytes(measured * each)} of ${isState(site) ? "state" : "activations"}`,
    site.flops === null ? "" : `${compact(site.flops)} FLOPs`,
    site.calls > 1 ? `${count(site.calls)} calls` : "",
    site.stacked > 1 ? `${count(site.stacked)} layers` : "",
    site.source,
  ].filter(Boolean);
}

/** How many values "float32[64,8,8,24]" has, and the bytes of each; null if it is not one array of whole bytes. */
function arraySize(text: string): readonly [values: number, bytes: number] | null {
  const found = /^(bool|bfloat16|(?:float|u?int|complex)(\d+)\w*)\[([\d,]*)\]$/.exec(text);
  if (!found) return null;
  const bits = found[1] === "bool" ? 8 : found[1] === "bfloat16" ? 16 : Number(found[2]);
  if (bits % 8 !== 0) return null;
  return [found[3]!.split(",").reduce((size, length) => size * (length === "" ? 1 : Number(length)), 1), bits / 8];
}
