// The tree of sites: search, menus, column heads, and the rows in view.
// Invariant: the DOM holds only the rows in view, whatever the size of the model; one frame renders
// those rows once.
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Store } from "../store";
import { ids } from "../ui/testids";
import { gridOf } from "./columns";
import { Head } from "./Head";
import { actionOf } from "./keyboard";
import { Row, rowId } from "./rows/Row";
import { Tip, useTip } from "./rows/Tip";
import { Toolbar } from "./Toolbar";
import { HEAD_HEIGHT, ROW_HEIGHT, scrollTo, windowOf } from "./visible";

export function Tree({ store }: { store: Store }) {
  const scroller = useRef<HTMLDivElement>(null);
  const [scrollTop, setScrollTop] = useState(0);
  const [sideways, setSideways] = useState(false);
  const [height, setHeight] = useState(400);
  const { tree } = store;
  const sites = store.sites.value;
  const rows = tree.rows.value;
  const open = tree.open.value;
  const columns = tree.columns.value;
  const { grid, least } = useMemo(() => gridOf(columns, sites?.list ?? []), [columns, sites]);
  const listed = tree.sort.value !== null;
  const selected = store.selectedIndex.value;
  const reveal = store.reveal.value;
  const [tip, told] = useTip(selected);

  useLayoutEffect(() => {
    const element = scroller.current!;
    let before = 0;
    const measure = (): void => {
      const [height, top] = [element.clientHeight - HEAD_HEIGHT, element.scrollTop];
      const row = tree.rows.value.indexOf(store.selectedIndex.value);
      // the selected row stays in view when the widget becomes narrow, unless it was scrolled away
      const kept = before <= 0 || scrollTo(row, top, before) === top;
      if (row >= 0 && height > 0 && kept) element.scrollTop = scrollTo(row, top, height);
      before = height;
      setHeight(height);
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, [store, tree]);

  useEffect(() => {
    const element = scroller.current!;
    const row = tree.rows.value.indexOf(store.selectedIndex.value);
    if (row < 0 || element.clientHeight === 0) return;
    element.scrollTop = scrollTo(row, element.scrollTop, element.clientHeight - HEAD_HEIGHT);
  }, [reveal, sites, tree.sort.value, tree.narrowed.value, store, tree]);

  const onKeyDown = useCallback(
    (event: KeyboardEvent) => {
      const current = store.sites.value;
      if (!current || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target !== event.currentTarget) return; // a head handles its own keys
      if (event.key === "Escape") return told.hide();
      const flat = tree.sort.value !== null;
      const action = actionOf(event.key, current, tree.rows.value, tree.open.value, store.selectedIndex.value, flat);
      if (!action) return;
      event.preventDefault();
      event.stopPropagation();
      if (action.do === "openAll") return store.openAll(true);
      const site = current.list[action.index];
      if (action.do === "go") {
        told.keyed(action.index);
        store.select(site.key);
      } else if (action.do !== "toggle") store.setOpen(site.key, action.do === "open");
      else if (site.perturbable) store.togglePerturbation(site.key);
    },
    [store, tree, told],
  );

  const [first, end] = windowOf(scrollTop, height, rows.length);
  const inView = rows.slice(first, end);
  const activeRow = selected >= 0 && inView.includes(selected);
  const tipRow = tip === null ? -1 : inView.indexOf(tip);
  return (
    <section
      class="nni-tree"
      aria-label="Modules"
      style={{ "--nni-grid": grid, "--nni-least": `${least}px` }}
    >
      <Toolbar store={store} />
      <div
        ref={scroller}
        class="nni-rows"
        style={{ "--nni-count": rows.length }}
        role="treegrid"
        tabIndex={0}
        aria-label="Modules"
        aria-rowcount={rows.length + 1}
        aria-colcount={columns.length + 1}
        aria-activedescendant={activeRow ? rowId(sites!, selected) : undefined}
        aria-describedby={tipRow >= 0 && tip === selected ? TIP : undefined}
        data-testid={ids.tree}
        data-sideways={sideways}
        onKeyDown={onKeyDown}
        onBlur={told.hide}
        onPointerLeave={told.hide}
        onScroll={(event) => {
          setScrollTop(event.currentTarget.scrollTop);
          setSideways(event.currentTarget.scrollLeft > 0);
          told.scrolled();
        }}
      >
        <Head store={store} columns={columns} />
        <div class="nni-body-rows" style={{ height: `${rows.length * ROW_HEIGHT}px` }} role="rowgroup">
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
                hover={told.hovered}
              />
            ))}
        </div>
        {sites && rows.length === 0 && <p class="nni-empty">No module matches.</p>}
        {!sites && <p class="nni-empty">Nothing to show yet.</p>}
      </div>
      {sites && tip !== null && tipRow >= 0 && (
        <Tip id={TIP} store={store} sites={sites} index={tip} row={(first + tipRow) * ROW_HEIGHT - scrollTop} scroller={scroller} />
      )}
    </section>
  );
}

const TIP = "nni-tip";
