// Above the rows: the search, the menus of columns and filters, and a text about rows left out.
import type { ComponentChildren } from "preact";
import type { Store } from "../store";
import { count } from "../ui/format";
import { useMenu } from "../ui/menu";
import { ids } from "../ui/testids";
import { COLUMNS } from "./columns";
import type { Filter } from "./view";

const WORDS: readonly (readonly [Filter, string])[] = [
  ["nonfinite", "has NaN or Inf"],
  ["perturbed", "perturbed"],
  ["below", "gradient norm below"],
  ["above", "gradient norm above"],
  ["unmeasured", "not measured"],
  ["dead", "dead: zeros ≥ 99 %"],
];

export function Toolbar({ store }: { store: Store }) {
  const { tree } = store;
  const filters = tree.filters.value;
  return (
    <>
      <div class="nni-search">
        <Search store={store} />
        <Menu label="Filter" on={filters.size > 0} testid={ids.filters}>
          {WORDS.map(([filter, words]) => (
            <label key={filter}>
              <input
                type="checkbox"
                checked={filters.has(filter)}
                data-testid={ids.filter(filter)}
                onChange={(event) => tree.filter(filter, event.currentTarget.checked)}
              />
              {words}
              {(filter === "below" || filter === "above") && (
                <input
                  type="number"
                  step="any"
                  min={0}
                  aria-label={`${words} this`}
                  value={tree[filter].value}
                  data-testid={ids.bound(filter)}
                  onInput={(event) => {
                    const bound = event.currentTarget.valueAsNumber;
                    if (!Number.isNaN(bound)) tree[filter].value = bound;
                  }}
                />
              )}
            </label>
          ))}
        </Menu>
        <Menu label="Columns" on={false} testid={ids.columns}>
          {COLUMNS.map(({ id, name }) => (
            <label key={id}>
              <input
                type="checkbox"
                checked={tree.chosen.value.has(id)}
                data-testid={ids.column(id)}
                onChange={(event) => tree.choose(id, event.currentTarget.checked)}
              />
              {name}
            </label>
          ))}
        </Menu>
        <button type="button" class="nni-icon" title="Open all" aria-label="Open all" onClick={() => store.openAll(true)}>
          ⊞
        </button>
        <button type="button" class="nni-icon" title="Close all" aria-label="Close all" onClick={() => store.openAll(false)}>
          ⊟
        </button>
      </div>
      <Narrowed store={store} />
    </>
  );
}

/** The text that says that rows are left out or sorted, with a way back to the whole tree. */
function Narrowed({ store }: { store: Store }) {
  const { tree } = store;
  const total = store.sites.value?.list.length ?? 0;
  const sort = tree.sort.value;
  const column = sort && (COLUMNS.find((c) => c.id === sort.by)?.name ?? "Path");
  const filters = WORDS.filter(([filter]) => tree.filters.value.has(filter)).map(([filter, words]) =>
    filter === "below" || filter === "above" ? `${words} ${tree[filter].value}` : words,
  );
  if (!sort && !tree.narrowed.value) return null;
  return (
    <p class="nni-narrowed" role="status">
      <b data-testid={ids.matches} data-value={String(tree.matched.value)}>
        {tree.narrowed.value ? `${count(tree.matched.value)} of ${count(total)} match` : `${count(total)} modules`}
      </b>
      {filters.length > 0 && <span>{filters.join("; ")}</span>}
      {sort && <span>a list by {column?.toLowerCase()}, {sort.rising ? "rising" : "falling"}</span>}
      <span class="nni-grow" />
      <button type="button" class="nni-link" data-testid={ids.clear} onClick={() => tree.clear()}>
        Clear
      </button>
    </p>
  );
}

function Search({ store }: { store: Store }) {
  const { tree } = store;
  return (
    <input
      type="search"
      placeholder="Search  ( / )"
      title={"Path, type, glob or shape:\nattn   Conv   blocks/*/mlp   float32[*,64]"}
      aria-label="Search modules by path, type, glob (blocks/*/mlp) or shape (float32[*,64])"
      spellcheck={false}
      value={tree.query.value}
      data-testid={ids.search}
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
        event.currentTarget.closest(".nni-tree")?.querySelector<HTMLElement>(".nni-rows")?.focus();
      }}
    />
  );
}

interface MenuProps {
  label: string;
  /** Whether its setting is in force. */
  on: boolean;
  testid: string;
  children: ComponentChildren;
}

/** A button with a list of checkboxes below it. */
function Menu({ label, on, testid, children }: MenuProps) {
  const menu = useMenu();
  return (
    <span class="nni-menu" {...menu.around}>
      <button type="button" class="nni-button" aria-expanded={menu.open} data-on={on} data-testid={testid} {...menu.button}>
        {label}
      </button>
      {menu.open && (
        // A press on a label clears the focus, but is still inside the list.
        <span class="nni-menu-list" role="group" aria-label={label} tabIndex={-1}>
          {children}
        </span>
      )}
    </span>
  );
}
