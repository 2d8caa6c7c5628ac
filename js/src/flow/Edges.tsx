// The edges of a drawing: one path for each kind of edge, and the edges of one node again on top.
// Invariant: labels are text in the drawing's own coordinates. Edges are hidden from screen readers,
// because the nodes name the nodes that they feed.
import { useMemo } from "preact/hooks";
import { edgeLabel, labelWidth } from "./layout/sizes";
import { arrowHead, edgeLine } from "./paths";
import type { Drawing } from "./state";

export function Edges({ drawing, of }: { drawing: Drawing; of: number }) {
  const { flow, arranged } = drawing;
  const drawn = useMemo(() => {
    const lines = arranged.edges.map(({ points }) => edgeLine(points));
    const heads = arranged.edges.map(({ points }, i) => (flow.nodes[flow.edges[i].consumer].role === "join" ? "" : arrowHead(points)));
    return { lines, heads };
  }, [drawing]);
  const some = (parts: readonly string[], which: (i: number) => boolean): string => parts.filter((_, i) => which(i)).join("");
  const loop = (i: number): boolean => flow.edges[i].loop;
  const plain = useMemo(() => [some(drawn.lines, (i) => !loop(i)), some(drawn.lines, loop), drawn.heads.join("")], [drawn]);
  const touches = (i: number): boolean => flow.edges[i].producer === of || flow.edges[i].consumer === of;
  return (
    <svg class="nni-flow-edges" width={arranged.width} height={arranged.height} aria-hidden="true">
      <path class="nni-flow-edge" d={plain[0]} />
      <path class="nni-flow-edge nni-flow-loop" d={plain[1]} />
      <path class="nni-flow-head" d={plain[2]} />
      <path class="nni-flow-edge nni-flow-near" d={some(drawn.lines, (i) => touches(i) && !loop(i))} />
      <path class="nni-flow-edge nni-flow-near nni-flow-loop" d={some(drawn.lines, (i) => touches(i) && loop(i))} />
      <path class="nni-flow-head nni-flow-near" d={some(drawn.heads, touches)} />
      {useMemo(
        () =>
          flow.edges.map((edge, i) => {
            const at = arranged.edges[i].label;
            if (!at) return null;
            const text = edgeLabel(flow, edge);
            const width = labelWidth(text);
            return (
              <g key={i}>
                <rect x={at.x - width / 2} y={at.y - 7} width={width} height={14} />
                <text x={at.x} y={at.y + 3.5}>
                  {text}
                </text>
              </g>
            );
          }),
        [drawing],
      )}
    </svg>
  );
}
