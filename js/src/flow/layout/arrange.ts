// The positions of the nodes and edges of a flow. This is layout.js, a file of its own: the widget
// requests it from the kernel when the first flow is shown. Invariant: knows no DOM; an edge around a
// loop is laid out against its direction, so that a loop never reverses the order of the rest.
import { Graph, layout } from "@dagrejs/dagre";

export interface Size {
  readonly width: number;
  readonly height: number;
}

export interface Link {
  readonly from: number;
  readonly to: number;
  readonly loop: boolean;
  /** The size of its label; 0 by 0 for none. */
  readonly label: Size;
}

export interface Point {
  readonly x: number;
  readonly y: number;
}

interface EdgePath {
  readonly points: readonly Point[];
  /** The middle of its label. */
  readonly label: Point | null;
}

export interface FlowLayout extends Size {
  /** The middles of the nodes. */
  readonly nodes: readonly Point[];
  readonly edges: readonly EdgePath[];
}

const MARGIN = 12;

export function arrange(nodes: readonly Size[], links: readonly Link[]): FlowLayout {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 22, edgesep: 14, ranksep: 24, marginx: MARGIN, marginy: MARGIN });
  nodes.forEach((size, i) => graph.setNode(String(i), { ...size }));
  links.forEach(({ from, to, loop, label }, i) => {
    const [v, w] = loop && from !== to ? [to, from] : [from, to];
    graph.setEdge(String(v), String(w), { ...label, labelpos: "c", minlen: 1, weight: loop ? 0 : 1 }, String(i));
  });
  layout(graph);
  const edges = new Array<EdgePath>(links.length);
  for (const edge of graph.edges()) {
    const i = Number(edge.name);
    const { points, x, y, width } = graph.edge(edge) as { points: Point[]; x?: number; y?: number; width: number };
    const turned = links[i].loop && links[i].from !== links[i].to;
    const label = width > 0 && x !== undefined && y !== undefined ? { x, y } : null;
    edges[i] = { points: turned ? [...points].reverse() : points, label };
  }
  const places = nodes.map((_, i) => {
    const { x, y } = graph.node(String(i)) as Point;
    return { x, y };
  });
  const { width, height } = graph.graph() as { width: number; height: number };
  const turn = mostlyBackwards(places) ? <P extends Point>(p: P): P => ({ ...p, x: width - p.x }) : <P>(p: P): P => p;
  return {
    width,
    height,
    nodes: places.map(turn),
    edges: edges.map(({ points, label }) => ({ points: points.map(turn), label: label && turn(label) })),
  };
}

/** Whether, among nodes side by side, the earlier ones are mostly on the right. */
function mostlyBackwards(places: readonly Point[]): boolean {
  let sign = 0;
  const rows = new Map<number, Point>();
  for (const place of places) {
    const row = Math.round(place.y);
    const before = rows.get(row);
    if (before) sign += Math.sign(place.x - before.x);
    rows.set(row, place);
  }
  return sign < 0;
}

/** Its requests and answers as a worker: a layout of 200 nodes is noticeably slow. */
export interface LayoutRequest {
  readonly number: number;
  readonly nodes: readonly Size[];
  readonly links: readonly Link[];
}

export interface LayoutReply {
  readonly number: number;
  readonly arranged: FlowLayout | null;
  readonly error: string;
}

/** Lays out in a worker or in the page; an error is part of the reply. */
export function answer({ number, nodes, links }: LayoutRequest): LayoutReply {
  try {
    return { number, arranged: arrange(nodes, links), error: "" };
  } catch (error) {
    return { number, arranged: null, error: error instanceof Error ? error.message : String(error) };
  }
}

if (typeof document === "undefined" && typeof postMessage === "function") {
  addEventListener("message", (event: MessageEvent<LayoutRequest>) => (postMessage as (done: LayoutReply) => void)(answer(event.data)));
}
