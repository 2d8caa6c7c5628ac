// The heads of the columns: clicks sort by a column, largest first, then smallest first, then not.
// Invariant: a head says whether its column shows the figure itself or its comparison.
import type { Store } from "../store";
import { IN_HEAD, inWords } from "../time/compare";
import { pinnedName } from "../time/names";
import { ids } from "../ui/testids";
import type { Column } from "./columns";

export function Head({ store, columns }: { store: Store; columns: readonly Column[] }) {
  const pinned = pinnedName(store);
  return (
    <div class="nni-columns" role="row" aria-rowindex={1}>
      <One store={store} id="name" title="module" name="Path" look="" />
      {columns.map((column) => (
        <One
          key={column.id}
          store={store}
          id={column.id}
          title={store.tree.compares(column) ? `${IN_HEAD[column.comparison!]} ${column.title}` : column.title}
          name={
            store.tree.compares(column)
              ? inWords(column.comparison!, column.name, pinned)
              : pinned && column.comparison
                ? `${column.name}, in this pass (${pinned}, pinned, has none)`
                : column.name
          }
          look={column.show ? "nni-c-number" : `nni-c-${column.id}`}
          fixed={column.id === "spark"}
        />
      ))}
    </div>
  );
}

interface OneProps {
  store: Store;
  id: string;
  title: string;
  name: string;
  look: string;
  /** It cannot be sorted. */
  fixed?: boolean;
}

function One({ store, id, title, name, look, fixed = false }: OneProps) {
  const sort = store.tree.sort.value;
  const order = sort?.by !== id ? "none" : sort.rising ? "ascending" : "descending";
  return (
    <span class={look} role="columnheader" aria-sort={fixed ? undefined : order}>
      {fixed ? (
        <span title={name}>{title}</span>
      ) : (
        <button type="button" class="nni-head" title={`Sort by: ${name}`} data-testid={ids.sort(id)} onClick={() => store.tree.sortBy(id)}>
          {title}
        </button>
      )}
    </span>
  );
}
