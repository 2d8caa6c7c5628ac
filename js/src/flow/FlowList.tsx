// A flow as a list, for hosts that cannot lay it out: each node in order, with the nodes it feeds.
import type { Flow } from "../kernel/protocol";
import { shortType } from "../ui/format";
import { nodeTitle } from "./Node";
import { neighbours } from "./paths";

export function FlowList({ flow }: { flow: Flow }) {
  const { next } = neighbours(flow);
  return (
    <ol class="nni-flow-view nni-flow-list" data-testid="nni-flow-list">
      {flow.nodes.map(
        (node, i) =>
          node.role !== "join" && (
            <li key={i}>
              <b>{nodeTitle(node)}</b> <span class="nni-faint">{[node.kind, shortType(node.output)].filter(Boolean).join(", ")}</span>
              {next[i].length > 0 && <> → {next[i].map((to) => nodeTitle(flow.nodes[to])).join(", ")}</>}
            </li>
          ),
      )}
    </ol>
  );
}
