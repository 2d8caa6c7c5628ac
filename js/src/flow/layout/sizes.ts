// The sizes of nodes and of edge labels, which the layout needs before they are drawn.
// Invariant: longer text is cut with an ellipsis; nothing here touches the page.
import type { Flow, FlowEdge, FlowNode } from "../../kernel/protocol";
import { shortType } from "../../ui/format";
import type { Link, Size } from "./arrange";

const NODE_HEIGHT = 44;
const [LEAST, MOST] = [112, 216];
const SPARK = 62;
const NAME_LETTER = 7.6;
const KIND_LETTER = 6.6;
const LABEL_LETTER = 6.1;
const MOST_SHAPES = 2;

export function sizeOf(node: FlowNode): Size {
  if (node.role === "join") return { width: 14, height: 14 };
  if (node.role !== "module") {
    return { width: clampWidth(Math.max(node.name.length * NAME_LETTER, subtitle(node).length * LABEL_LETTER) + 24), height: 38 };
  }
  const badges = callMarks(node).reduce((sum, text) => sum + text.length * 6 + 14, 0);
  const width = Math.max(node.name.length * NAME_LETTER + badges, node.kind.length * KIND_LETTER + SPARK) + 26;
  return { width: clampWidth(width), height: NODE_HEIGHT };
}

export function linksOf(flow: Flow): Link[] {
  return flow.edges.map((edge) => ({ from: edge.producer, to: edge.consumer, loop: edge.loop, label: labelSize(flow, edge) }));
}

/** The size of a label with this many letters. */
export function labelWidth(text: string): number {
  return text.length * LABEL_LETTER + 6;
}

function labelSize(flow: Flow, edge: FlowEdge): Size {
  const text = edgeLabel(flow, edge);
  return text === "" ? { width: 0, height: 0 } : { width: labelWidth(text), height: 14 };
}

/** The label of an edge. It is left out on edges into a join, which shows its own shape below. */
export function edgeLabel(flow: Flow, edge: FlowEdge): string {
  const into = flow.nodes[edge.consumer];
  if (into.role === "join" && edge.shapes.every((shape) => shape === into.output)) return "";
  const shown = edge.shapes.slice(0, MOST_SHAPES).map(shortType);
  const more = edge.shapes.length - shown.length;
  return `${shown.join(", ")}${more > 0 ? ` +${more}` : ""}`;
}

/** The text below the name of a node that is not a module. */
export function subtitle(node: FlowNode): string {
  return shortType(node.role === "outside" ? node.kind : node.output);
}

/** Short words about special ways in which a module is called. */
export function callMarks(node: FlowNode): string[] {
  const found: string[] = [];
  if (node.times === null) found.push("loop");
  else if (node.times > 1) found.push(`×${node.times}`);
  if (node.conditional) found.push("cond");
  return found;
}

/** The same words, in full. */
export function callNotes(node: FlowNode): string[] {
  const found: string[] = [];
  if (node.calls > 1) found.push(`called in ${node.calls} places`);
  if (node.times === null) found.push("in a while loop");
  else if (node.times > 1) found.push(`runs ${node.times} times`);
  if (node.conditional) found.push("in a branch that may not be taken");
  return found;
}

function clampWidth(width: number): number {
  return Math.round(Math.min(Math.max(width, LEAST), MOST));
}
