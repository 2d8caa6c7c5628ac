// One node: name, type, sparkline and special marks. Its name for a screen reader includes its output
// and the nodes it feeds. Invariant: text only; its position never depends on measurements.
import { Sparkline } from "../charts/Sparkline";
import { sparkline } from "../kernel/decode";
import type { FlowNode } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { Badge, PerturbedBadge } from "../ui/Badge";
import { shortType } from "../ui/format";
import { memo } from "../ui/memo";
import type { Point, Size } from "./layout/arrange";
import { subtitle, callNotes, callMarks } from "./layout/sizes";

interface Props {
  store: Store;
  node: FlowNode;
  number: number;
  place: Point;
  size: Size;
  /** The names of the nodes that it feeds. */
  feeds: string;
  selected: boolean;
  tab: boolean;
}

export function nodeTitle(node: FlowNode): string {
  return node.role === "module" ? label(node.site) : node.name;
}

/** Rendered again only if one of its own properties changes. */
export const Node = memo(NodeView);

function NodeView({ store, node, number, place, size, feeds, selected, tab }: Props) {
  const index = node.site !== "" || node.role === "module" ? (store.sites.value?.byKey.get(node.site) ?? -1) : -1;
  const style = {
    left: `${place.x - size.width / 2}px`,
    top: `${place.y - size.height / 2}px`,
    width: `${size.width}px`,
    height: `${size.height}px`,
  };
  const description = nodeDescription(node, feeds);
  if (node.role === "join") return <div class="nni-flow-join" style={style} aria-hidden="true" title={description} data-role="join" />;
  const module = node.role === "module";
  const on = module ? store.perturbed.value.get(node.site) : undefined;
  const classes = [
    "nni-flow-node",
    `nni-flow-${node.role}`,
    selected && "nni-flow-selected",
    on && "nni-flow-on",
  ];
  return (
    <div
      class={classes.filter(Boolean).join(" ")}
      style={style}
      role={module || node.role === "outside" ? "button" : "img"}
      tabIndex={tab ? 0 : -1}
      aria-label={`${description}${on ? ", perturbed" : ""}`}
      aria-pressed={module ? selected : undefined}
      title={description}
      data-testid="nni-flow-node"
      data-role={node.role}
      data-site={node.site}
      data-number={number}
    >
      <span class="nni-flow-line">
        <span class="nni-flow-name">{node.name}</span>
        {module && <Alarm store={store} index={index} />}
        <PerturbedBadge on={on} />
        {callMarks(node).map((mark) => (
          <Badge key={mark} sign={mark} title={description}>
            {mark}
          </Badge>
        ))}
      </span>
      <span class="nni-flow-line">
        <span class="nni-flow-kind">{module ? node.kind : subtitle(node)}</span>
        {module && <Spark store={store} index={index} />}
      </span>
    </div>
  );
}

function nodeDescription(node: FlowNode, feeds: string): string {
  const parts = [nodeTitle(node), node.kind, shortType(node.output), ...callNotes(node)];
  if (feeds !== "") parts.push(`feeds ${feeds}`);
  return parts.filter(Boolean).join(", ");
}

function Alarm({ store, index }: { store: Store; index: number }) {
  const bad = ((store.notFinite.value[index] ?? 0) & 1) !== 0;
  if (!bad) return null;
  return (
    <Badge look="bad" sign="NaN" title="Has NaN or infinite values">
      NaN/Inf
    </Badge>
  );
}

/** Only this part reads the frame: if no figure colours the nodes, a frame renders nothing else. */
function Spark({ store, index }: { store: Store; index: number }) {
  const heights = sparkline(store.frame.value, index);
  if (!heights) return <span class="nni-flow-spark nni-faint">–</span>;
  return <Sparkline heights={heights} width={56} height={17} label="" />;
}
