// The search field at the head of the tree, and its menu: filters, columns, and opening all.
import type { Store } from "../store";
import type { Layout } from "../frame/layout";
import { Menu } from "../ui/Menu";
import { NumberInput } from "../ui/NumberInput";
import { count } from "../ui/format";
import { COLUMNS } from "./columns";
import type { Filter } from "./view";

const FILTER_NAMES: readonly (readonly [Filter, string])[] = [
  ["nonfinite", "has NaN or Inf"],
  ["perturbed", "perturbed"],
  ["below", "gradient norm below"],
  ["above", "gradient norm above"],
  ["unmeasured", "not measured"],
  ["dead", "dead: zeros ≥ 99 %"],
];

export function SearchField({ store }: { store: Store }) {
  const { tree } = store;
  return (
    <input
      type="search"
      placeholder="Modules /"
      title={"Path, type, glob or shape:\nattn   Conv   blocks/*/mlp   float32[*,64]"}
      aria-label="Search modules by path, type, glob (blocks/*/mlp) or shape (float32[*,64])"
      spellcheck={false}
      value={tree.query.value}
      data-testid="nni-search"
      onInput={(event) => (tree.query.value = event.currentTarget.value)}
      onKeyDown={(event) => {
        if (!["Escape", "ArrowDown", "Enter"].includes(event.key)) return;
        event.stopPropagation();
        if (event.key === "Escape") {
          tree.query.value = "";
          return;
        }
        event.preventDefault();
        const matches = tree.matches.value;
        const first = tree.rows.value.find((i) => !matches || matches.has(i));
        if (first !== undefined) store.select(store.sites.value!.list[first].key);
        event.currentTarget.closest(".nni-tree")?.querySelector<HTMLElement>("[role=treegrid]")?.focus({ preventScroll: true });
      }}
    />
  );
}

export function TreeMenu({ store, layout }: { store: Store; layout: Layout }) {
  const { tree } = store;
  const filters = tree.filters.value;
  const columns = new Set(tree.columnsFor(layout).map(({ id }) => id));
  return (
    <Menu label="Filter, columns, open all" testid="nni-tree-menu" on={filters.size > 0}>
      <span class="nni-menu-line">
        <button type="button" class="nni-button" onClick={() => store.openAll(true)}>
          ⊞ Open all
        </button>
        <button type="button" class="nni-button" onClick={() => store.openAll(false)}>
          ⊟ Close all
        </button>
      </span>
      <fieldset>
        <legend>Filter</legend>
        {FILTER_NAMES.map(([filter, words]) => (
          <label key={filter}>
            <input type="checkbox" checked={filters.has(filter)} data-testid={`nni-filter-${filter}`} onChange={(event) => tree.filter(filter, event.currentTarget.checked)} />
            {words}
            {(filter === "below" || filter === "above") && (
              <NumberInput
                step="any"
                min={0}
                aria-label={`${words} this`}
                value={tree[filter].value}
                data-testid={`nni-filter-${filter}-number`}
                change={(bound) => (tree[filter].value = bound)}
              />
            )}
          </label>
        ))}
      </fieldset>
      <fieldset>
        <legend>Columns</legend>
        {COLUMNS.map(({ id, name }) => (
          <label key={id}>
            <input type="checkbox" checked={columns.has(id)} data-testid={`nni-column-${id}`} onChange={(event) => tree.choose(id, event.currentTarget.checked)} />
            {name}
          </label>
        ))}
      </fieldset>
    </Menu>
  );
}

/** The text that says that rows are left out or sorted, with a way back to the whole tree. */
export function TreeStatus({ store }: { store: Store }) {
  const { tree } = store;
  const total = store.sites.value?.list.length ?? 0;
  const sort = tree.sort.value;
  const column = sort && COLUMNS.find((c) => c.id === sort.by);
  const filters = FILTER_NAMES.filter(([filter]) => tree.filters.value.has(filter)).map(([filter, words]) =>
    filter === "below" || filter === "above" ? `${words} ${tree[filter].value}` : words,
  );
  if (!sort && !tree.narrowed.value) return null;
  return (
    <p class="nni-tree-status" role="status">
      <b data-value={String(tree.matched.value)}>
        {tree.narrowed.value ? `${count(tree.matched.value)} of ${count(total)} match` : `${count(total)} modules`}
      </b>
      {filters.length > 0 && <span>{filters.join("; ")}</span>}
      {sort && (
        <span title={column?.name}>
          by {column?.title ?? "path"}, {sort.rising ? "rising" : "falling"}
        </span>
      )}
      <span class="nni-grow" />
      <button type="button" class="nni-link" data-testid="nni-clear" onClick={() => tree.clear()}>
        Clear
      </button>
    </p>
  );
}
