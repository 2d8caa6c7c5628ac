// The drawing: nodes as elements and edges as a few paths behind them, moved and zoomed by one
// transform. Invariant: moving and zooming render nothing; one node at a time is a tab stop; the
// wheel without a key scrolls the page.
import { effect, type ReadonlySignal } from "@preact/signals";
import type { RefObject } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { exact } from "../ui/format";
import { Edges } from "./Edges";
import type { ColourScale } from "./colouring";
import type { Size } from "./layout/arrange";
import { sizeOf } from "./layout/sizes";
import { showOuterFlow, selectNode } from "./navigation";
import { Node, nodeTitle } from "./Node";
import { neighbours, nextNode } from "./paths";
import type { Drawing } from "./state";
import { initialViewport, fit, reveal, keepVisible, zoom, type Viewport } from "./viewport";

/** The actions of the buttons. */
export type ZoomAction = (what: "in" | "out" | "fit") => void;

interface Props {
  store: Store;
  drawing: Drawing;
  colours: ReadonlySignal<ColourScale>;
  zoomAction: RefObject<ZoomAction>;
}

const ZOOM_STEP = 1.25;
const SMALL_ZOOM = 0.5;
const DRAG_PIXELS = 4;

export function Graph({ store, drawing, colours, zoomAction }: Props) {
  const { flow, arranged } = drawing;
  const view = useRef<HTMLDivElement>(null);
  const moved = useRef<HTMLDivElement>(null);
  const viewport = useRef<Viewport>({ x: 0, y: 0, k: 1 });
  const drag = useRef<{ id: number; x: number; y: number; from: Viewport; moved: boolean } | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  const along = useMemo(() => neighbours(flow), [flow]);
  const sizes = useMemo(() => flow.nodes.map(sizeOf), [flow]);
  const feeds = useMemo(() => along.next.map((to) => to.map((i) => nodeTitle(flow.nodes[i])).join(" and ")), [along]);
  const selected = store.flow.byKey.value.get(store.selected.value ?? "\0") ?? null;
  const first = flow.nodes.findIndex((node) => node.role !== "join");
  const tab = cursor ?? selected ?? first;

  const room = (): Size => ({ width: view.current!.clientWidth || 600, height: view.current!.clientHeight || 400 });
  const place = useCallback((to: Viewport): void => {
    viewport.current = to;
    const { x, y, k } = to;
    moved.current!.style.transform = `translate(${x}px, ${y}px) scale(${k})`;
    moved.current!.classList.toggle("nni-flow-far", k < SMALL_ZOOM);
  }, []);

  // A new drawing starts at its inputs, with the selected node in view.
  useLayoutEffect(() => {
    setCursor(null);
    let to = initialViewport(arranged, room(), arranged.nodes[0] ?? null);
    if (selected !== null) to = reveal(to, arranged.nodes[selected], sizes[selected], room());
    place(to);
  }, [drawing]);
  useEffect(() => {
    if (selected !== null) place(reveal(viewport.current, arranged.nodes[selected], sizes[selected], room()));
  }, [selected]);

  useEffect(() => {
    zoomAction.current = (what) => {
      const { width, height } = room();
      if (what === "fit") place(fit(arranged, { width, height }));
      else place(keepVisible(zoom(viewport.current, what === "in" ? ZOOM_STEP : 1 / ZOOM_STEP, { x: width / 2, y: height / 2 }), arranged, room()));
    };
    const element = view.current!;
    const onWheel = (event: WheelEvent): void => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = element.getBoundingClientRect();
      const factor = Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) * 0.008);
      place(keepVisible(zoom(viewport.current, factor, { x: event.clientX - box.left, y: event.clientY - box.top }), arranged, room()));
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, [arranged, place, zoomAction]);

  // A frame only writes the colours: rendering 200 nodes for each frame would block the page.
  useEffect(() => {
    const nodes = [...moved.current!.querySelectorAll<HTMLElement>(".nni-flow-module")];
    return effect(() => paintNodes(nodes, colours.value, store.flow.figure.value === "NaN and Inf"));
  }, [drawing, colours, store]);

  const point = (target: EventTarget | null): void => {
    const number = numberAt(target);
    const node = number === null ? undefined : flow.nodes[number];
    store.flow.pointed.value = node?.role === "module" ? node.site : null;
  };
  const numberAt = (target: EventTarget | null): number | null => {
    const node = target instanceof Element ? target.closest<HTMLElement>("[data-number]") : null;
    return node ? Number(node.dataset["number"]) : null;
  };
  const choose = (number: number): void => {
    const { role, site } = flow.nodes[number];
    setCursor(number);
    if (role === "module") selectNode(store, site);
    else if (role === "outside") store.select(site);
  };
  const enter = (number: number): void => {
    const { role, site } = flow.nodes[number];
    const sites = store.sites.peek();
    const index = sites?.byKey.get(site);
    if (role === "module" && sites && index !== undefined && sites.children[index].length > 0) store.flow.show(site);
  };
  const focus = (number: number): void => {
    place(reveal(viewport.current, arranged.nodes[number], sizes[number], room()));
    moved.current!.querySelector<HTMLElement>(`[data-number="${number}"]`)?.focus({ preventScroll: true });
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const at = numberAt(event.target);
    if (at === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = nextNode(event.key, at, flow, arranged, along);
    const node = flow.nodes[at];
    if (to !== null) {
      choose(to);
      focus(to);
    } else if (event.key === "Enter") enter(at);
    else if (event.key === "Backspace") goOut();
    else if (event.key === " ") {
      const index = store.sites.peek()?.byKey.get(node.site);
      if (node.role === "module" && index !== undefined && store.sites.peek()!.list[index].perturbable) store.togglePerturbation(node.site);
    } else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
  };
  const goOut = (): void => {
    const sites = store.sites.peek();
    const index = sites?.byKey.get(flow.site);
    const parent = sites && index !== undefined ? sites.list[index].parent : -1;
    if (sites && parent >= 0) showOuterFlow(store, sites.list[parent].key);
  };

  const onPointerDown = (event: PointerEvent): void => {
    if (event.button === 0) drag.current = { id: event.pointerId, x: event.clientX, y: event.clientY, from: viewport.current, moved: false };
  };
  const onPointerMove = (event: PointerEvent): void => {
    const press = drag.current;
    if (!press || press.id !== event.pointerId || (event.buttons & 1) === 0) return;
    const [dx, dy] = [event.clientX - press.x, event.clientY - press.y];
    if (!press.moved && Math.hypot(dx, dy) < DRAG_PIXELS) return;
    if (!press.moved) view.current!.setPointerCapture(event.pointerId);
    press.moved = true;
    place(keepVisible({ ...press.from, x: press.from.x + dx, y: press.from.y + dy }, arranged, room()));
  };
  const onClick = (event: MouseEvent): void => {
    const number = numberAt(event.target);
    const dragged = drag.current?.moved ?? false;
    drag.current = null;
    if (number !== null && !dragged) choose(number);
  };

  return (
    <div
      ref={view}
      class="nni-flow-view"
      role="group"
      aria-label={`Flow of ${label(flow.site)}: ${flow.nodes.filter((node) => node.role === "module").length} modules`}
      onKeyDown={onKeyDown}
      onPointerDown={onPointerDown}
      onPointerMove={onPointerMove}
      onClick={onClick}
      onPointerOver={(event) => point(event.target)}
      onPointerLeave={() => point(null)}
      onFocusIn={(event) => point(event.target)}
      onDblClick={(event) => {
        const number = numberAt(event.target);
        if (number !== null) enter(number);
      }}
      onScroll={(event) => event.currentTarget.scrollTo(0, 0) /* a browser scrolls to the element that it focuses */}
    >
      <div ref={moved} class="nni-flow-drawing" style={{ width: `${arranged.width}px`, height: `${arranged.height}px` }}>
        <Edges drawing={drawing} of={tab} />
        {flow.nodes.map((node, i) => (
          <Node
            key={i}
            store={store}
            node={node}
            number={i}
            place={arranged.nodes[i]}
            size={sizes[i]}
            feeds={feeds[i]}
            selected={i === selected}
            tab={i === tab}
          />
        ))}
      </div>
    </div>
  );
}

function paintNodes(nodes: readonly HTMLElement[], { shares, values }: ColourScale, alarm: boolean): void {
  for (const node of nodes) {
    const key = node.dataset["site"]!;
    const share = shares.get(key);
    node.style.setProperty("--nni-share", share === undefined ? "" : share.toFixed(3));
    node.dataset["measured"] = share === undefined ? "" : alarm ? "alarm" : "yes";
    node.dataset["value"] = exact(values.get(key));
  }
}
