// The tree of sites: its head with the search, and the rows in view.
// Invariants: the DOM holds only the rows in view, whatever the size of the model; one frame renders
// those rows once; only a selection scrolls the rows, which brings its row into sight, and a new order.
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Store } from "../store";
import { ROW_HEIGHT, type Layout } from "../frame/layout";
import { observeSize } from "../ui/observeSize";
import { columnGrid } from "./columns";
import { TreeHead } from "./TreeHead";
import { keyAction } from "./keyboard";
import { Row, rowId } from "./rows/Row";
import { TreeStatus } from "./Finder";
import { scrollTo, rowsInView } from "./visible";

export function Tree({ store, layout }: { store: Store; layout: Layout }) {
  const scroller = useRef<HTMLDivElement>(null);
  const whole = useRef<HTMLElement>(null);
  const head = useId();
  const [scrollTop, setScrollTop] = useState(0);
  const [sideways, setSideways] = useState(false);
  const [height, setHeight] = useState(400);
  const { tree } = store;
  const sites = store.sites.value;
  const rows = tree.rows.value;
  const open = tree.open.value;
  const columns = tree.columnsFor(layout);
  const names = columns.map(({ id }) => id).join(" ");
  const { grid, least } = useMemo(() => columnGrid(columns, sites?.list ?? []), [names, sites]);
  const listed = tree.sort.value !== null;
  const selected = store.selectedIndex.value;
  const reveal = store.revealCount.value;

  useLayoutEffect(() => {
    const element = scroller.current!;
    let before = 0;
    const measure = (): void => {
      const [height, top] = [element.clientHeight, element.scrollTop];
      const row = tree.rows.value.indexOf(store.selectedIndex.value);
      // the selected row stays in view when the tree becomes lower, unless it was scrolled away
      const kept = before <= 0 || scrollTo(row, top, before) === top;
      if (row >= 0 && height > 0 && kept) element.scrollTop = scrollTo(row, top, height);
      before = height;
      setHeight(height);
      whole.current!.style.setProperty("--nni-gutter", `${element.offsetWidth - element.clientWidth}px`);
    };
    return observeSize(element, measure);
  }, [store, tree]);

  useEffect(() => {
    const element = scroller.current!;
    const row = tree.rows.value.indexOf(store.selectedIndex.value);
    if (row < 0 || element.clientHeight === 0) return;
    element.scrollTop = scrollTo(row, element.scrollTop, element.clientHeight);
  }, [reveal, sites, tree.sort.value === null, tree.narrowed.value, store, tree]);
  useEffect(() => {
    // after the effect above: what is first is what was asked for, wherever the selected row is
    if (tree.sort.value) scroller.current!.scrollTop = 0;
  }, [tree.sort.value, tree]);

  const onKeyDown = useCallback(
    (event: KeyboardEvent) => {
      const current = store.sites.value;
      if (!current || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target !== event.currentTarget) return; // a button in a row handles its own keys
      const flat = tree.sort.value !== null;
      const action = keyAction(event.key, current, tree.rows.value, tree.open.value, store.selectedIndex.value, flat);
      if (!action) return;
      event.preventDefault();
      event.stopPropagation();
      if (action.do === "openAll") return store.openAll(true);
      const site = current.list[action.index];
      if (action.do === "go") store.select(site.key);
      else if (action.do !== "toggle") store.setOpen(site.key, action.do === "open");
      else if (site.perturbable) store.togglePerturbation(site.key);
    },
    [store, tree],
  );
  const hover = useCallback((index: number) => (store.pointed.value = index), [store]);

  const [first, end] = rowsInView(scrollTop, height, rows.length);
  const inView = rows.slice(first, end);
  const activeRow = selected >= 0 && inView.includes(selected);
  return (
    <section ref={whole} class="nni-tree" aria-label="Modules" style={{ "--nni-grid": grid, "--nni-least": `${least}px` }}>
      <div class="nni-grid" data-sideways={sideways}>
        <TreeHead id={head} store={store} columns={columns} layout={layout} />
        <div
          ref={scroller}
          class="nni-rows"
          role="treegrid"
          tabIndex={0}
          aria-label="Modules"
          aria-owns={head}
          aria-rowcount={rows.length + 1}
          aria-colcount={columns.length + 1}
          aria-activedescendant={activeRow ? rowId(sites!, selected) : undefined}
          data-testid="nni-tree"
          onKeyDown={onKeyDown}
          onPointerLeave={() => (store.pointed.value = -1)}
          onScroll={(event) => {
            const { scrollTop, scrollLeft } = event.currentTarget;
            setScrollTop(scrollTop);
            setSideways(scrollLeft > 0);
            whole.current!.style.setProperty("--nni-left", `${scrollLeft}px`);
          }}
        >
          <div class="nni-body-rows" role="rowgroup" style={{ height: `${rows.length * ROW_HEIGHT}px` }}>
            {sites &&
              inView.map((index, i) => (
                <Row
                  key={`${sites.id} ${index}`} // a click ends on the element on which it began, wherever the row is by then
                  store={store}
                  sites={sites}
                  index={index}
                  at={first + i}
                  columns={columns}
                  listed={listed}
                  open={(!listed && tree.narrowed.value) || open.has(sites.list[index].key)}
                  selected={index === selected}
                  hover={hover}
                />
              ))}
          </div>
          {sites && rows.length === 0 && <p class="nni-empty">No module matches.</p>}
          {!sites && <p class="nni-empty">Nothing to show yet.</p>}
        </div>
      </div>
      <TreeStatus store={store} />
    </section>
  );
}
