// The tree of sites: search, column heads, and the rows in view.
// Invariant: the DOM holds the rows in view and no others, whatever the size of the model; one
// frame renders those rows once.
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Store } from "../store";
import { count } from "../format";
import { ids } from "../testids";
import { actionOf } from "./keyboard";
import { Row, rowId } from "./Row";
import { ROW_HEIGHT, scrollTo, windowOf } from "./virtual";

export function Tree({ store }: { store: Store }) {
  const scroller = useRef<HTMLDivElement>(null);
  const [scrollTop, setScrollTop] = useState(0);
  const [height, setHeight] = useState(400);
  const sites = store.sites.value;
  const rows = store.rows.value;
  const open = store.open.value;
  const selected = store.selectedIndex.value;
  const reveal = store.reveal.value;
  const searching = store.query.value.trim() !== "";

  useLayoutEffect(() => {
    const element = scroller.current!;
    const measure = (): void => setHeight(element.clientHeight);
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    const element = scroller.current!;
    const row = store.rows.value.indexOf(store.selectedIndex.value);
    if (row < 0 || element.clientHeight === 0) return;
    element.scrollTop = scrollTo(row, element.scrollTop, element.clientHeight);
  }, [reveal, sites, store]);

  const onKeyDown = useCallback(
    (event: KeyboardEvent) => {
      const current = store.sites.value;
      if (!current || event.ctrlKey || event.metaKey || event.altKey) return;
      const action = actionOf(event.key, current, store.rows.value, store.open.value, store.selectedIndex.value);
      if (!action) return;
      event.preventDefault();
      event.stopPropagation();
      if (action.do === "openAll") return store.openAll(true);
      const site = current.list[action.index];
      if (action.do === "go") store.select(site.key);
      else if (action.do !== "toggle") store.setOpen(site.key, action.do === "open");
      else if (site.perturbable) store.togglePerturbation(site.key);
    },
    [store],
  );

  const [first, end] = windowOf(scrollTop, height, rows.length);
  const activeRow = selected >= 0 && rows.slice(first, end).includes(selected);
  return (
    <section class="nni-tree" aria-label="Modules">
      <Search store={store} shown={rows.length} />
      <div class="nni-columns" aria-hidden="true">
        <span>module</span>
        <span class="nni-c-type">type</span>
        <span class="nni-c-shape">output</span>
        <span class="nni-c-spark">activations</span>
        <span class="nni-c-gradient">‖gradient‖</span>
      </div>
      <div
        ref={scroller}
        class="nni-rows"
        style={{ "--nni-count": rows.length }}
        role="tree"
        tabIndex={0}
        aria-label="Modules"
        aria-activedescendant={activeRow ? rowId(sites!, selected) : undefined}
        data-testid={ids.tree}
        onKeyDown={onKeyDown}
        onScroll={(event) => setScrollTop(event.currentTarget.scrollTop)}
      >
        <div style={{ height: `${rows.length * ROW_HEIGHT}px`, position: "relative" }} role="presentation">
          {sites &&
            rows
              .slice(first, end)
              .map((index, i) => (
                <Row
                  key={(first + i) % (end - first)} // rows that scroll out lend their elements
                  store={store}
                  sites={sites}
                  index={index}
                  top={(first + i) * ROW_HEIGHT}
                  open={searching || open.has(sites.list[index].key)}
                  selected={index === selected}
                />
              ))}
        </div>
        {sites && rows.length === 0 && <p class="nni-empty">No module's path or type matches.</p>}
        {!sites && <p class="nni-empty">Nothing to show yet.</p>}
      </div>
    </section>
  );
}

function Search({ store, shown }: { store: Store; shown: number }) {
  const total = store.sites.value?.list.length ?? 0;
  return (
    <div class="nni-search">
      <input
        type="search"
        placeholder="Search path or type  ( / )"
        aria-label="Search modules by path or type"
        spellcheck={false}
        value={store.query.value}
        data-testid={ids.search}
        onInput={(event) => (store.query.value = event.currentTarget.value)}
        onKeyDown={(event) => {
          if (!["Escape", "ArrowDown", "Enter"].includes(event.key)) return;
          event.stopPropagation();
          if (event.key === "Escape") {
            store.query.value = "";
            return;
          }
          event.preventDefault();
          const rows = store.rows.value;
          const hit = rows.findLast((i) => store.sites.value!.children[i].length === 0) ?? rows.at(-1);
          const firstHit = rows.find((i) => isMatch(store, i)) ?? hit;
          if (firstHit !== undefined) store.select(store.sites.value!.list[firstHit].key);
          event.currentTarget.closest(".nni-tree")?.querySelector<HTMLElement>(".nni-rows")?.focus();
        }}
      />
      <span class="nni-shown">
        {store.query.value.trim() === "" ? `${count(total)} modules` : `${count(shown)} of ${count(total)}`}
      </span>
      <button type="button" class="nni-icon" title="Open all" aria-label="Open all" onClick={() => store.openAll(true)}>
        ⊞
      </button>
      <button type="button" class="nni-icon" title="Close all" aria-label="Close all" onClick={() => store.openAll(false)}>
        ⊟
      </button>
    </div>
  );
}

function isMatch(store: Store, index: number): boolean {
  const site = store.sites.value!.list[index];
  const text = `${site.key}\n${site.name}\n${site.kind}`.toLowerCase();
  return store.query.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
