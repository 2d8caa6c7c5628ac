// The use of an array's axes on screen: the view that suits the array, and the request for a window.
// Invariant: an axis is shown at most once, and every other one has an index within its length.
import type { ReadonlySignal, Signal } from "@preact/signals";
import type { PatchGrid } from "../inputs/pictures";
import type { HeldArray, Pictures, ReadValues, Values } from "../kernel/protocol";
import type { Cells } from "./cells";

const VIEWS = ["heatmap", "images", "patches", "attention", "tokens", "line"] as const;
export type View = (typeof VIEWS)[number];

/** Axes by their place in the array's shape; -1 for none. `over`: the axis whose norms are shown. */
export interface ViewAxes {
  readonly view: View;
  readonly tiles: number;
  readonly rows: number;
  readonly columns: number;
  readonly over: number;
}

export interface Cursor {
  readonly tile: number;
  readonly row: number;
  readonly column: number;
}

/** A window in elements, along rows, columns and tiles. */
export interface Box {
  readonly tiles: Span;
  readonly rows: Span;
  readonly columns: Span;
}
type Span = readonly [from: number, to: number];

/** What a picture of cells draws, and what moves it: the panels "Values" and "Attribution" each have their own. */
export interface PictureState {
  readonly array: ReadonlySignal<HeldArray | null>;
  readonly shown: ReadonlySignal<ViewAxes | null>;
  readonly index: ReadonlySignal<readonly number[]>;
  readonly box: ReadonlySignal<Box | null>;
  /** The cells as they are drawn: positions in the view "patches" as a grid. */
  readonly drawn: ReadonlySignal<Cells | null>;
  /** The grid of patches of the array; null if it has none. */
  readonly patches: ReadonlySignal<PatchGrid | null>;
  /** The pictures that may lie under the cells. */
  readonly pictures: ReadonlySignal<Pictures | null>;
  readonly cursor: ReadonlySignal<Cursor | null>;
  /** Whether the colours range over most values only. */
  readonly robust: Signal<boolean>;
  /** The hue of what is above zero. */
  readonly hue: ReadonlySignal<"blue" | "orange">;
  /** How much of the input's picture shows through the cells, 0 to 1. */
  readonly share: Signal<number>;
  /** The tile that is shown large too. */
  readonly large: Signal<number>;
  /** The example whose picture lies under a tile; -1 if it is unknown, or the cells are no places in a picture. */
  example: (tile: number) => number;
  /** Set how many rows and columns of cells there is room for. */
  setRoom: (rows: number, columns: number) => void;
  setBox: (box: Box) => void;
  showAll: () => void;
  /** Show one of several tiles alone. */
  openTile: (tile: number) => void;
  point: (cursor: Cursor | null) => void;
}

export const MOST_TILES = 64;

/** The view that suits an array, by the names of its axes. */
export function defaultView(array: HeldArray): View {
  const has = (...names: string[]): boolean => names.every((name) => array.axes.includes(name));
  if (has("height", "width") || has("kernel height", "kernel width")) return "images";
  if (has("query", "key")) return "attention";
  if (has("position", "feature") && array.shape.length === 3) return "tokens";
  return array.shape.length < 2 ? "line" : "heatmap";
}

/** The views that the names and lengths of an array's axes allow; `patches`: its positions are those of a picture. */
export function possibleViews(array: HeldArray, patches = false): View[] {
  const [rank, suited] = [array.shape.length, defaultView(array)];
  const named = (pattern: RegExp): boolean => array.axes.some((axis) => pattern.test(axis));
  return VIEWS.filter((view) => {
    if (view === "patches") return patches;
    if (view === suited || view === "line") return true;
    if (view === "heatmap") return rank >= 2;
    if (rank < 3) return false;
    if (view === "images") return !named(/position|feature|query|token/);
    if (view === "tokens") return !named(/query/);
    return array.shape[rank - 1] === array.shape[rank - 2] && !named(/height|width|channel|feature|position/);
  });
}

export function viewAxes(array: HeldArray, view: View): ViewAxes {
  const rank = array.shape.length;
  const named = (...names: string[]): number => array.axes.findIndex((axis) => names.includes(axis));
  const none = { tiles: -1, rows: -1, columns: -1, over: -1 };
  if (view === "line") return { ...none, view, columns: rank - 1 };
  let [rows, columns] = [rank - 2, rank - 1];
  if (view === "heatmap") return { ...none, view, rows, columns };
  if (view === "patches") return { ...none, view, columns: rank - 2, over: rank - 1 };
  if (view === "tokens") {
    const over = named("feature") < 0 ? rank - 1 : named("feature");
    const rest = array.shape.map((_, i) => i).filter((i) => i !== over);
    return { ...none, view, rows: rest.length > 1 ? rest[rest.length - 2]! : -1, columns: rest[rest.length - 1]!, over };
  }
  if (view === "images" && rank >= 3) {
    [rows, columns] = [named("height", "kernel height"), named("width", "kernel width")];
    if (rows < 0 || columns < 0) [rows, columns] = [rank - 3, rank - 2];
  }
  const wanted = view === "images" ? named("channel", "out channel") : named("head");
  const others = array.shape.map((_, i) => i).filter((i) => i !== rows && i !== columns);
  return { ...none, view, rows, columns, tiles: others.includes(wanted) ? wanted : (others[others.length - 1] ?? -1) };
}

/** The same with another axis in one place; the two axes swap their places. */
export function withAxis(shown: ViewAxes, place: "tiles" | "rows" | "columns", axis: number): ViewAxes {
  const moved = { ...shown, [place]: axis };
  for (const other of ["tiles", "rows", "columns"] as const) {
    if (other !== place && axis >= 0 && shown[other] === axis) moved[other] = shown[place];
  }
  return moved;
}

export const lengthOf = (array: HeldArray, axis: number): number => (axis < 0 ? 1 : array.shape[axis]!);

export function wholeBox(array: HeldArray, shown: ViewAxes): Box {
  return {
    tiles: [0, Math.min(lengthOf(array, shown.tiles), MOST_TILES)],
    rows: [0, lengthOf(array, shown.rows)],
    columns: [0, lengthOf(array, shown.columns)],
  };
}

/** The axes that have sliders. */
export function sliderAxes(array: HeldArray, shown: ViewAxes): number[] {
  return array.shape.map((_, i) => i).filter((i) => ![shown.tiles, shown.rows, shown.columns, shown.over].includes(i));
}

/** The index along the axes that have sliders, and -1 along those that are shown whole. */
export function fixedIndex(array: HeldArray, shown: ViewAxes, index: readonly number[]): number[] {
  const axes = sliderAxes(array, shown);
  return array.shape.map((_, axis) => (axes.includes(axis) ? (index[axis] ?? 0) : -1));
}

export type ReadRequest = Omit<ReadValues, "id">;

export function readRequest(array: HeldArray, shown: ViewAxes, index: readonly number[], box: Box, most: readonly number[], component: ReadRequest["component"]): ReadRequest {
  const left = (axis: number): number => (shown.over >= 0 && axis > shown.over ? axis - 1 : axis);
  const spans = [box.tiles, box.rows, box.columns].map(([a, b]) => [Math.floor(a), Math.ceil(b)]);
  return {
    type: "read_values",
    array: array.number,
    index: index.filter((_, i) => i !== shown.over),
    axes: [left(shown.tiles), left(shown.rows), left(shown.columns)],
    starts: spans.map(([a]) => a!),
    ends: spans.map(([, b]) => b!),
    most,
    norm_over: shown.over,
    component,
    exact: false,
  };
}

/** Whether two requests or answers are about the same slice, in any window. */
export function sameSlice(a: ReadRequest | Values, b: ReadRequest | Values): boolean {
  if (a.array !== b.array || a.norm_over !== b.norm_over || a.component !== b.component) return false;
  if (String(a.axes) !== String(b.axes)) return false;
  return a.index.every((n, i) => n === b.index[i] || a.axes.includes(i));
}

/** The block size that the kernel chooses for a span: the lowest sufficient power of two. */
export function blockFor([from, to]: Span, most: number): number {
  let size = 1;
  while (Math.ceil(to / size) - Math.floor(from / size) > most) size *= 2;
  return size;
}

/** Whether the received window covers the requested one, at the finest possible resolution. */
export function covers(has: Values, wants: ReadRequest): boolean {
  if (has.exact || !sameSlice(has, wants)) return false;
  for (let i = 0; i < 3; i++) {
    if (has.starts[i]! > wants.starts[i]! || has.ends[i]! < wants.ends[i]!) return false;
    if (i > 0 && has.block[i]! > blockFor([wants.starts[i]!, wants.ends[i]!], wants.most[i]!)) return false;
  }
  return true;
}

/** A window about a point, `factor` times as wide, within the array. */
export function zoomSpan(span: Span, length: number, about: number, factor: number): Span {
  const least = Math.min(length, 4);
  const width = Math.min(Math.max((span[1] - span[0]) * factor, least), length);
  const share = span[1] > span[0] ? (about - span[0]) / (span[1] - span[0]) : 0.5;
  return moveSpan([about - share * width, about - share * width + width], 0, length);
}

export function moveSpan([from, to]: Span, by: number, length: number): Span {
  const width = Math.min(to - from, length);
  const start = Math.min(Math.max(from + by, 0), length - width);
  return [start, start + width];
}
