// One row: name, type, output, sparkline, size of the gradient, and badges for what is special.
// Invariant: its columns are where they are whatever the numbers; text only, never markup.
import { useCallback } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { paintSparkline } from "../charts/sparkline";
import { statistic } from "../decode";
import { NOT_MEASURED, real, shortType } from "../format";
import { QUANTITIES, SPARK, type Site } from "../protocol";
import { label, type Sites } from "../sites";
import type { Store } from "../store";
import { ids } from "../testids";
import { Badges } from "./Badges";

interface Props {
  store: Store;
  sites: Sites;
  index: number;
  top: number;
  open: boolean;
  selected: boolean;
}

const STEP = 14;
const DEEPEST = 14;
/** Of the column: what is left is for the name and its badges. */
const DEEPEST_SHARE = "40%";

export const rowId = (sites: Sites, index: number): string => `nni-row-${sites.id}-${index}`;

export function Row({ store, sites, index, top, open, selected }: Props) {
  const site = sites.list[index];
  const hasChildren = sites.children[index].length > 0;
  const siblings = site.parent >= 0 ? sites.children[site.parent] : sites.roots;
  const classes = ["nni-row", selected && "nni-row-selected", site.unseen && "nni-row-unseen"].filter(Boolean).join(" ");
  return (
    <div
      id={rowId(sites, index)}
      class={classes}
      role="treeitem"
      aria-level={site.depth + 1}
      aria-expanded={hasChildren ? open : undefined}
      aria-selected={selected}
      aria-setsize={siblings.length}
      aria-posinset={siblings.indexOf(index) + 1}
      data-testid={ids.row}
      data-site={site.key}
      style={{ transform: `translateY(${top}px)` }}
      onClick={() => store.select(site.key, false)}
      onDblClick={() => hasChildren && store.setOpen(site.key, !open)}
    >
      <span class="nni-c-name" style={{ paddingLeft: `min(${Math.min(site.depth, DEEPEST) * STEP}px, ${DEEPEST_SHARE})` }}>
        <span
          class={hasChildren ? (open ? "nni-twist nni-twist-open" : "nni-twist") : "nni-twist nni-leaf"}
          aria-hidden="true"
          onClick={(event) => {
            event.stopPropagation();
            if (hasChildren) store.setOpen(site.key, !open);
          }}
        />
        <span class="nni-name" title={`${label(site.key)}: ${site.kind}`}>
          {site.name || label(site.key)}
        </span>
        <Badges site={site} bad={store.bad.value[index]} open={open} on={store.perturbed.value.get(site.key)} />
      </span>
      <span class="nni-c-type" title={site.kind}>
        {site.kind}
      </span>
      <span class="nni-c-shape" title={site.output}>
        {shortType(site.output)}
      </span>
      <Numbers store={store} index={index} site={site} />
    </div>
  );
}

/** What changes with every frame, apart from what does not. */
function Numbers({ store, index, site }: { store: Store; index: number; site: Site }) {
  const frame = store.frame.value;
  const from = index * QUANTITIES.length * SPARK;
  const paint = useCallback(
    (area: Area) => {
      if (frame) paintSparkline(area, frame.sparklines.subarray(from, from + SPARK), area.palette.output);
    },
    [frame, from],
  );
  const norm = frame ? statistic(frame, index, 1, "norm") : NaN;
  const measured = frame !== null && !Number.isNaN(statistic(frame, index, 0, "size"));
  return (
    <>
      <span class="nni-c-spark">
        {measured ? (
          <Canvas width={64} height={18} label={`Activations of ${label(site.key)}`} paint={paint} />
        ) : (
          <span class="nni-faint" title={site.unseen || "not measured"}>
            {NOT_MEASURED}
          </span>
        )}
      </span>
      <span class="nni-c-gradient" title={Number.isNaN(norm) ? "no gradient measured" : String(norm)}>
        {real(norm)}
      </span>
    </>
  );
}
