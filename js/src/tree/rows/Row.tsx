// One row: name and badges, then a cell for each chosen column.
// Invariants: its columns stay in place whatever the numbers; a figure that exists is shown, by
// itself if there is none to compare with; text only, never markup.
import { Sparkline } from "../../charts/Sparkline";
import { notFiniteCount, sparkline, statistic, type FrameData } from "../../kernel/decode";
import type { Site } from "../../kernel/protocol";
import { label, type Sites } from "../../kernel/sites";
import { AddButton } from "../../perturb/AddButton";
import type { Store } from "../../store";
import { compareValues, differenceText } from "../../time/comparison";
import { pinnedName } from "../../time/passNames";
import { NOT_MEASURED, exact, percent, shortType } from "../../ui/format";
import { ROW_HEIGHT } from "../../frame/layout";
import { columnText, type Column, type OutputChanges } from "../columns";
import { Badges } from "./Badges";

interface Props {
  store: Store;
  sites: Sites;
  index: number;
  /** Its place among all rows. */
  at: number;
  columns: readonly Column[];
  /** Whether it is in a list, where its path rather than its place identifies it. */
  listed: boolean;
  open: boolean;
  selected: boolean;
  hover: (index: number) => void;
}

const STEP = 12;
const DEEPEST = 14;
/** The width of the column that the name and its badges may fill. */
const DEEPEST_SHARE = "40%";

export const rowId = (sites: Sites, index: number): string => `nni-row-${sites.id}-${index}`;

export function Row({ store, sites, index, at, columns, listed, open, selected, hover }: Props) {
  const site = sites.list[index];
  const hasChildren = !listed && sites.children[index].length > 0;
  const classes = ["nni-row", selected && "nni-row-selected", site.unseen && "nni-row-unseen"].filter(Boolean).join(" ");
  const depth = listed ? 0 : site.depth;
  return (
    <div
      id={rowId(sites, index)}
      class={classes}
      role="row"
      aria-level={depth + 1}
      aria-expanded={hasChildren ? open : undefined}
      aria-selected={selected}
      aria-rowindex={at + 2}
      data-testid="nni-row"
      data-site={site.key}
      style={{ top: `${at * ROW_HEIGHT}px` }}
      onClick={() => store.select(site.key, false)}
      onDblClick={() => hasChildren && store.setOpen(site.key, !open)}
      onPointerEnter={() => hover(index)}
    >
      <span class="nni-c-name" role="gridcell" style={{ paddingLeft: `calc(6px + min(${Math.min(depth, DEEPEST) * STEP}px, ${DEEPEST_SHARE}))` }}>
        <span
          class={hasChildren ? (open ? "nni-twist nni-twist-open" : "nni-twist") : "nni-twist nni-leaf"}
          aria-hidden="true"
          onClick={(event) => {
            event.stopPropagation();
            if (hasChildren) store.setOpen(site.key, !open);
          }}
        />
        {listed ? (
          <span class="nni-name nni-name-path">
            <bdi>{label(site.key)}</bdi>
          </span>
        ) : (
          <span class="nni-name">{site.name || label(site.key)}</span>
        )}
        {site.perturbable && <AddButton store={store} site={site.key} />}
        <Badges site={site} bad={store.notFinite.value[index]} first={store.notFiniteOrigins.value.has(site.key)} open={open || listed} on={store.perturbed.value.get(site.key)} />
      </span>
      <Cells store={store} index={index} site={site} columns={columns} />
    </div>
  );
}

/** The part that changes with every frame. */
function Cells({ store, index, site, columns }: { store: Store; index: number; site: Site; columns: readonly Column[] }) {
  const frame = store.frame.value;
  const pinned = store.timeline.pinned.value;
  const named = pinnedName(store);
  const { moved } = store.tree;
  return (
    <>
      {columns.map((column) =>
        column.text ? (
          <span key={column.id} class={`nni-c-${column.id}`} role="gridcell">
            {column.id === "shape" ? shortType(column.text(site)) : column.text(site)}
          </span>
        ) : column.value ? (
          <Figure key={column.id} column={column} site={site} frame={frame} pinned={store.tree.compares(column) ? pinned : null} named={named} index={index} moved={moved} />
        ) : (
          <Spark key={column.id} site={site} frame={frame} index={index} />
        ),
      )}
    </>
  );
}

interface FigureProps {
  column: Column;
  site: Site;
  frame: FrameData | null;
  /** The frame to compare with; null if the column shows the figures themselves. */
  pinned: FrameData | null;
  named: string;
  index: number;
  moved: OutputChanges;
}

function Figure({ column, site, frame, pinned, named, index, moved }: FigureProps) {
  const now = column.value!(site, frame, index, moved);
  const before = pinned ? column.value!(site, pinned, index, moved) : NaN;
  const bad = column.bad?.(frame, index) ?? "";
  const against = Number.isNaN(now) || Number.isNaN(before) ? null : compareValues(column.comparison!, now, before);
  const alone = pinned !== null && against === null;
  const classes = ["nni-c-number", against !== null && "nni-c-compared", alone && "nni-c-uncompared", (bad !== "" || (column.alarming && now > 0)) && "nni-bad", column.meter && "nni-meter"];
  const both = `${columnText(column, now)} now, ${columnText(column, before)} in ${named} (pinned)`;
  return (
    <span
      class={classes.filter(Boolean).join(" ")}
      role="gridcell"
      title={against !== null ? both : alone && !Number.isNaN(now) ? `${both}: the figure by itself` : undefined}
      data-testid={`nni-cell-${column.id}`}
      data-value={exact(against ?? now)}
      style={column.meter ? { "--share": Number.isNaN(now) ? 0 : Math.min(now, 1) } : undefined}
    >
      {bad !== "" ? bad : against === null ? columnText(column, now) : differenceText(column.comparison!, against)}
    </span>
  );
}

function Spark({ site, frame, index }: { site: Site; frame: FrameData | null; index: number }) {
  const heights = sparkline(frame, index);
  const share = frame ? notFiniteCount((name) => statistic(frame, index, 0, name)) / statistic(frame, index, 0, "size") : 0;
  return (
    <span class="nni-c-spark" role="gridcell">
      {!heights ? (
        <span class="nni-faint">{NOT_MEASURED}</span>
      ) : share > 0 ? (
        <span class="nni-spark-bad" role="img" aria-label={`${percent(share)} of the activations of ${label(site.key)} are NaN or Inf`} title={`${percent(share)} are NaN or Inf`} style={{ "--share": share }} />
      ) : (
        <Sparkline heights={heights} width={72} height={18} label={`Activations of ${label(site.key)}`} />
      )}
    </span>
  );
}
