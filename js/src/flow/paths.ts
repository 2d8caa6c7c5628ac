// Nodes along edges, and edges as SVG paths. Invariant: pure; a join is not a stop on the way: an
// edge into a join leads to the nodes that receive the joined value.
import type { Flow } from "../kernel/protocol";
import type { FlowLayout, Point } from "./layout/arrange";

interface Neighbours {
  readonly next: readonly (readonly number[])[];
  readonly before: readonly (readonly number[])[];
}

/** The nodes that each node feeds, and those that feed it: through joins, without itself. */
export function neighbours(flow: Flow): Neighbours {
  const out: number[][] = flow.nodes.map(() => []);
  for (const { producer, consumer } of flow.edges) out[producer].push(consumer);
  const next = flow.nodes.map((node, i) => {
    if (node.role === "join") return [];
    const found = new Set<number>();
    const visit = (at: number): void => {
      for (const to of out[at]) {
        if (flow.nodes[to].role === "join") visit(to);
        else if (to !== i) found.add(to);
      }
    };
    visit(i);
    return [...found];
  });
  const before: number[][] = flow.nodes.map(() => []);
  next.forEach((to, i) => to.forEach((j) => before[j].push(i)));
  return { next, before };
}

/** The node that an arrow key leads to: along the edges, or to a neighbour. */
export function nextNode(key: string, from: number, flow: Flow, arranged: FlowLayout, along: Neighbours): number | null {
  const here = arranged.nodes[from];
  const nearest = (found: readonly number[], distance: (p: Point) => number): number | null =>
    found.reduce<number | null>((best, i) => {
      return best === null || distance(arranged.nodes[i]) < distance(arranged.nodes[best]) ? i : best;
    }, null);
  const beside = (sign: number): number[] =>
    arranged.nodes.flatMap((p, i) => {
      const near = flow.nodes[i].role !== "join" && (p.x - here.x) * sign > 1 && Math.abs(p.y - here.y) < 40;
      return near ? [i] : [];
    });
  const distance = (p: Point): number => Math.hypot(p.x - here.x, p.y - here.y);
  switch (key) {
    case "ArrowDown":
      return nearest(along.next[from], distance);
    case "ArrowUp":
      return nearest(along.before[from], distance);
    case "ArrowRight":
      return nearest(beside(1), distance);
    case "ArrowLeft":
      return nearest(beside(-1), distance);
    default:
      return null;
  }
}

/** A smooth line through an edge's points. */
export function edgeLine(points: readonly Point[]): string {
  const [first, ...rest] = points;
  if (!first || rest.length === 0) return "";
  const at = (p: Point): string => `${p.x.toFixed(1)} ${p.y.toFixed(1)}`;
  const middle = (a: Point, b: Point): Point => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  let path = `M${at(first)}L${at(middle(first, rest[0]))}`;
  for (let i = 0; i + 1 < rest.length; i++) path += `Q${at(rest[i])} ${at(middle(rest[i], rest[i + 1]))}`;
  return `${path}L${at(rest[rest.length - 1])}`;
}

/** The length of an arrow's head. */
const HEAD_LENGTH = 6;

/** The arrow's head at an edge's end. */
export function arrowHead(points: readonly Point[]): string {
  const [from, tip] = points.slice(-2);
  if (!from || !tip) return "";
  const length = Math.hypot(tip.x - from.x, tip.y - from.y) || 1;
  const [ux, uy] = [(tip.x - from.x) / length, (tip.y - from.y) / length];
  const [bx, by] = [tip.x - ux * HEAD_LENGTH, tip.y - uy * HEAD_LENGTH];
  const half = HEAD_LENGTH * 0.55;
  const at = (x: number, y: number): string => `${x.toFixed(1)} ${y.toFixed(1)}`;
  return `M${at(tip.x, tip.y)}L${at(bx - uy * half, by + ux * half)}L${at(bx + uy * half, by - ux * half)}z`;
}
