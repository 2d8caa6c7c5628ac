// The head of the tree: the search field with its menu over the names, and the heads of the columns;
// a click sorts by a column, largest first, then smallest first, then not.
// Invariant: a head says whether its column shows the figure itself or its comparison.
import type { Store } from "../store";
import { HEAD_SIGNS, comparisonText } from "../time/comparison";
import { pinnedName } from "../time/passNames";
import type { Layout } from "../frame/layout";
import type { Column } from "./columns";
import { SearchField, TreeMenu } from "./Finder";

interface Props {
  /** By which the grid of the rows owns it. */
  id: string;
  store: Store;
  columns: readonly Column[];
  layout: Layout;
}

export function TreeHead({ id, store, columns, layout }: Props) {
  const pinned = pinnedName(store);
  return (
    <div id={id} class="nni-columns" role="row" aria-rowindex={1}>
      <span class="nni-find" role="columnheader" aria-sort={ariaSort(store, "name")}>
        <SearchField store={store} />
        <SortButton store={store} id="name" title="↕" name="Path" />
        <TreeMenu store={store} layout={layout} />
      </span>
      {columns.map((column) => {
        const name = store.tree.compares(column)
          ? comparisonText(column.comparison!, column.name, pinned)
          : pinned && column.comparison
            ? `${column.name}, in this pass (${pinned}, pinned, has none)`
            : column.name;
        const fixed = column.id === "spark";
        return (
          <span key={column.id} class={column.show ? "nni-c-number" : `nni-c-${column.id}`} role="columnheader" aria-sort={fixed ? undefined : ariaSort(store, column.id)}>
            {fixed ? (
              <span title={name}>{column.title}</span>
            ) : (
              <SortButton store={store} id={column.id} title={store.tree.compares(column) ? `${HEAD_SIGNS[column.comparison!]} ${column.title}` : column.title} name={name} />
            )}
          </span>
        );
      })}
    </div>
  );
}

function ariaSort(store: Store, id: string): "none" | "ascending" | "descending" {
  const sort = store.tree.sort.value;
  return sort?.by !== id ? "none" : sort.rising ? "ascending" : "descending";
}

function SortButton({ store, id, title, name }: { store: Store; id: string; title: string; name: string }) {
  return (
    <button type="button" class="nni-head" title={`Sort by: ${name}`} aria-label={id === "name" ? "Sort by path" : undefined} data-testid={`nni-sort-${id}`} onClick={() => store.tree.sortBy(id)}>
      {title}
    </button>
  );
}
