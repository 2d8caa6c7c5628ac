// The structure: every node with its type, and its static attributes.
import type { Nnx, NnxAttribute, NnxNode } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { Truncation } from "./Truncation";
import { SharedReference } from "./SharedReference";

const DEEPEST = 8;

export function Graphdef({ store, page }: { store: Store; page: Nnx }) {
  return (
    <section class="nni-nnx-side" aria-label="Graphdef">
      <h4>
        graphdef <span class="nni-faint nni-small">structure and static attributes</span>
      </h4>
      <ul class="nni-nodes">
        {page.nodes.map((node) => (
          <NodeRow key={node.path} store={store} node={node} own={page.site} />
        ))}
      </ul>
      <Truncation shown={page.nodes.length} total={page.nodes_total} what="nodes" />
    </section>
  );
}

function NodeRow({ store, node, own }: { store: Store; node: NnxNode; own: string }) {
  const isLink = node.module !== null && node.module !== own && store.sites.value?.byKey.has(node.module);
  const name = node.depth === 0 ? label(node.name) : node.name;
  const marked = node.reference !== 0 && store.nnx.marked.value === node.reference;
  return (
    <li
      class={marked ? "nni-marked" : undefined}
      style={{ paddingLeft: `${Math.min(node.depth, DEEPEST) * 12 + 2}px` }}
      data-testid="nni-nnx-node"
      data-path={node.path}
    >
      <span class="nni-node-head">
        {isLink ? (
          <button type="button" class="nni-link nni-path-text" title={`Select ${node.module}`} onClick={() => store.select(node.module!)}>
            {name}
          </button>
        ) : (
          <span class="nni-path-text" title={node.path}>
            {name}
          </span>
        )}
        <span class="nni-faint nni-path-text">{node.type}</span>
        <SharedReference store={store} shared={node} />
        {node.first !== null && <span class="nni-faint nni-small nni-path-text">the same as {label(node.first)}</span>}
      </span>
      {node.attributes.length > 0 && (
        <details class="nni-attributes" open={node.depth === 0}>
          <summary title="Static attributes">
            {[...node.attributes].sort(compareAttributes).map((a) => (
              <span key={a.name} class={isUninformative(a) ? "nni-faint" : undefined}>
                {a.name}={a.text}
              </span>
            ))}
            {node.attributes.length < node.attributes_total && <span>… {node.attributes_total - node.attributes.length} more</span>}
          </summary>
        </details>
      )}
    </li>
  );
}

/** The least informative attributes come last: None, and the functions that the module calls. */
const isUninformative = (a: NnxAttribute): boolean => a.text === "None" || a.text === a.name;
const compareAttributes = (a: NnxAttribute, b: NnxAttribute): number => Number(isUninformative(a)) - Number(isUninformative(b));
