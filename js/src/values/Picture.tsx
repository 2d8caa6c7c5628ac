// The canvas: cells of one slice, a crosshair, zoom and pan by pointer, wheel and keys.
// Invariant: the keyboard can do everything that the pointer can; the wheel scrolls the page unless
// the picture has the focus.
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { fromGrid, gridBox, toGrid, moveInGrid } from "../inputs/patches";
import { exampleAt, type InputsState } from "../inputs/state";
import type { HeldArray } from "../kernel/protocol";
import { fillRectangle } from "../masks/rectangle";
import type { Mask } from "../masks/requests";
import { observeSize } from "../ui/observeSize";
import { dark } from "../ui/theme";
import { underlay } from "./Tiles";
import { colourRange } from "./cells";
import { fixedIndex, lengthOf, moveSpan, zoomSpan, type Box, type Cursor, type PictureState, type ViewAxes } from "./layout";
import { elementAt, gridHeight, paintLine, paintMask, paintPicture, paintWords, layOutTiles, raster, WORD_ROOM, type EdgeWords } from "./painting";

const HEIGHTS = { heatmap: 260, images: 300, patches: 300, attention: 300, tokens: 200, line: 180 } as const;
/** How many small pictures stand beside one another, where there is room for that many. */
const MAPS_PER_ROW = 8;
const DRAG_PIXELS = 4;
/** The width of the detail from which words stand below the columns too. */
const WIDE_DETAIL = 720;

/** The height of a matrix that is as wide as there is room for, with its words. */
function matrixHeight(box: Box, width: number, words: EdgeWords | undefined): number {
  const shape = (box.rows[1] - box.rows[0]) / (box.columns[1] - box.columns[0] || 1);
  const square = Math.max(width - (words?.rows ? WORD_ROOM.rows : 0), 40) * Math.min(shape, 2);
  return Math.round(square) + (words?.columns ? WORD_ROOM.columns : 0);
}

/** A mask over the rows and columns of the picture. */
export interface PictureMask {
  readonly mask: Mask;
  readonly columns: number;
  readonly editing: boolean;
  readonly change: (mask: Mask) => void;
}

interface Props {
  values: PictureState;
  inputs: InputsState;
  label: string;
  drawn: PictureMask | null;
  /** Whether only the tile that is shown large is drawn, with the words at its edges. */
  single?: boolean;
  /** The place whose row and column are marked while nothing is pointed at. */
  marked?: Cursor | null;
}

export function Picture({ values, inputs, label, drawn, single = false, marked = null }: Props) {
  const ref = useRef<HTMLDivElement>(null);
  const size = useRef({ width: 1, height: 1 });
  const drag = useRef<{ x: number; y: number; box: Box; far: boolean } | null>(null);
  const [stroke, setStroke] = useState<{ from: Cursor; mask: Mask } | null>(null);
  const mask = stroke?.mask ?? drawn?.mask;
  const off = mask?.includes(0) ? { mask, columns: drawn!.columns } : null;
  const [array, shown, whole, cells] = [values.array.value, values.shown.value!, values.box.value!, values.drawn.value];
  const large = values.large.value < whole.tiles[1] ? values.large.value : whole.tiles[0];
  const box = useMemo(() => (single ? { ...whole, tiles: [large, large + 1] as const } : whole), [whole, single, large]);
  const [room, setRoom] = useState<readonly [width: number, isWide: boolean]>([0, false]);
  const grid = shown.view === "patches" ? values.patches.value : null;
  const window = grid ? gridBox(box, grid) : box;
  const below = underlay(values);
  const [cursor, robust, night] = [values.cursor.value, values.robust.value, dark.value];
  const hue = values.hue.value;
  const range = useMemo(() => (cells ? { ...colourRange(cells, robust), hue } : null), [cells, robust, hue]);
  const picture = useMemo(() => (cells && range ? raster(cells, range, night) : null), [cells, range, night]);
  const [batch, index] = [inputs.inputs.value, values.index.value];
  const known = useMemo(() => (array ? edgeWords(inputs, array, shown, index) : undefined), [batch, array, shown, index]);
  const words = useMemo(() => known && { rows: known.rows, columns: single && !room[1] ? null : known.columns }, [known, single, room[1]]);
  const maps = shown.view === "images" && box.tiles[1] - box.tiles[0] > 1;
  const height = single ? matrixHeight(box, room[0], words) : maps && room[0] > 0 ? gridHeight(box, room[0], MAPS_PER_ROW) : HEIGHTS[shown.view];

  const paint = useCallback(
    (area: Area) => {
      size.current = { width: area.width, height: area.height };
      setTimeout(() => values.setRoom(area.height, area.width));
      if (!cells || !range) return;
      if (shown.view === "line") return paintLine(area, cells, box, range, cursor);
      const at = layOutTiles(shown, window, area.width, area.height, words);
      const here = cursor ?? marked;
      if (picture) paintPicture(area, at, cells, picture, here && grid ? toGrid(here, grid) : here, maps ? undefined : below, maps ? large : -1);
      if (off) paintMask(area, at, off.mask, off.columns);
      if (words) paintWords(area, at, words);
    },
    [cells, range, picture, shown, box, cursor, words, grid, below?.key, large, maps, off?.mask.join(""), marked && Object.values(marked).join()],
  );

  const at = (event: MouseEvent): Cursor | null => {
    const rect = ref.current!.getBoundingClientRect();
    const here = elementAt(layOutTiles(shown, window, size.current.width, size.current.height, words), event.clientX - rect.left, event.clientY - rect.top);
    return here && grid ? fromGrid(here, grid) : here;
  };
  const zoom = (about: Cursor, factor: number): void => {
    if (!array || grid) return; // a grid of patches is seen whole
    const box = values.box.peek()!;
    values.setBox({
      ...box,
      rows: shown.view === "line" ? box.rows : zoomSpan(box.rows, lengthOf(array, shown.rows), about.row + 0.5, factor),
      columns: zoomSpan(box.columns, lengthOf(array, shown.columns), about.column + 0.5, factor),
    });
  };

  useLayoutEffect(() => {
    const element = ref.current!;
    const measure = (): void => {
      const now = [Math.floor(element.clientWidth), (element.closest(".nni-detail")?.clientWidth ?? 0) >= WIDE_DETAIL] as const;
      setRoom((old) => (String(old) === String(now) ? old : now));
    };
    return observeSize(element, measure);
  }, []);

  const wheel = useRef<(event: WheelEvent) => void>(() => undefined);
  wheel.current = (event) => {
    const here = at(event);
    const focused = ref.current!.contains(document.activeElement);
    if (!here || !(focused || event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    zoom(here, Math.exp(Math.sign(event.deltaY) * 0.25));
  };
  useEffect(() => {
    const onWheel = (event: WheelEvent): void => wheel.current(event);
    const element = ref.current!;
    element.addEventListener("wheel", onWheel, { passive: false }); // a passive one cannot stop the scrolling
    return () => element.removeEventListener("wheel", onWheel);
  }, []);

  const onPointerDown = (event: PointerEvent): void => {
    ref.current!.setPointerCapture?.(event.pointerId);
    const here = drawn?.editing && event.button === 0 ? at(event) : null;
    if (here) setStroke({ from: here, mask: struck(here, here) });
    else drag.current = { x: event.clientX, y: event.clientY, box, far: false };
  };
  /** The mask with the rectangle between two places switched to the other of what the first one is. */
  const struck = (from: Cursor, end: Cursor): Mask => {
    const { mask, columns } = drawn!;
    return fillRectangle(mask, columns, [from.row, from.column], [end.row, end.column], mask[from.row * columns + from.column] ? 0 : 1);
  };
  const onPointerMove = (event: PointerEvent): void => {
    const from = drag.current;
    if (!from || !array) {
      const here = at(event);
      if (here && String(Object.values(here)) !== String(cursor && Object.values(cursor))) {
        values.point(here);
        if (stroke) setStroke({ ...stroke, mask: struck(stroke.from, here) });
      }
      return;
    }
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    from.far ||= Math.hypot(dx, dy) > DRAG_PIXELS;
    const tile = layOutTiles(shown, box, size.current.width, size.current.height, words).tiles[0]!;
    const by = (span: readonly [number, number], pixels: number, over: number): number => (-pixels / over) * (span[1] - span[0]);
    if (from.far && !grid) {
      values.setBox({
        tiles: whole.tiles,
        rows: moveSpan(from.box.rows, by(from.box.rows, dy, tile.height), lengthOf(array, shown.rows)),
        columns: moveSpan(from.box.columns, by(from.box.columns, dx, tile.width), lengthOf(array, shown.columns)),
      });
    }
  };
  const onPointerUp = (event: PointerEvent): void => {
    const here = at(event);
    if (stroke) drawn?.change(struck(stroke.from, here ?? cursor ?? stroke.from));
    setStroke(null);
    if (drag.current && !drag.current.far) values.point(here);
    if (drag.current && !drag.current.far && here) values.large.value = here.tile;
    drag.current = null;
  };

  const onKeyDown = (event: KeyboardEvent): void => {
    if (!array || event.ctrlKey || event.metaKey || event.altKey) return;
    // read now: keys may arrive faster than views are drawn
    const [cursor, box] = [values.cursor.peek(), values.box.peek()!];
    const here = cursor ?? { tile: single ? large : box.tiles[0], row: Math.floor(box.rows[0]), column: Math.floor(box.columns[0]) };
    const [, tall, wide] = cells?.header.block ?? [1, 1, 1];
    const by = event.shiftKey ? 10 : 1;
    const go = (tile: number, row: number, column: number): void => {
      if (grid) return values.point(cursor ? moveInGrid(here, grid, row, column) : here);
      const clamp = (n: number, length: number): number => Math.min(Math.max(n, 0), length - 1);
      const to = {
        tile: Math.min(Math.max(here.tile + tile, whole.tiles[0]), whole.tiles[1] - 1),
        row: clamp(here.row + row * tall!, lengthOf(array, shown.rows)),
        column: clamp(here.column + column * wide!, lengthOf(array, shown.columns)),
      };
      values.point(cursor ? to : here);
      if (tile) values.large.value = to.tile;
      const show = (span: readonly [number, number], n: number, length: number): readonly [number, number] =>
        n < span[0] ? moveSpan(span, n - span[0], length) : n + 1 > span[1] ? moveSpan(span, n + 1 - span[1], length) : span;
      const rows = show(box.rows, to.row, lengthOf(array, shown.rows));
      const columns = show(box.columns, to.column, lengthOf(array, shown.columns));
      if (rows !== box.rows || columns !== box.columns) values.setBox({ ...box, rows, columns });
    };
    const far = Number.MAX_SAFE_INTEGER / 2 ** 20;
    const keys: Record<string, () => void> = {
      ArrowLeft: () => go(0, 0, -by),
      ArrowRight: () => go(0, 0, by),
      ArrowUp: () => go(0, -by, 0),
      ArrowDown: () => go(0, by, 0),
      Home: () => go(0, 0, -far),
      End: () => go(0, 0, far),
      PageUp: () => go(-by, 0, 0),
      PageDown: () => go(by, 0, 0),
      "+": () => zoom(here, 0.5),
      "=": () => zoom(here, 0.5),
      "-": () => zoom(here, 2),
      "0": () => values.showAll(),
      Enter: () => values.openTile(here.tile),
      Escape: () => values.point(null),
      ...(drawn?.editing && cursor ? { " ": () => drawn.change(struck(cursor, cursor)) } : {}),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };

  return (
    <div
      ref={ref}
      class="nni-picture"
      role="application"
      tabIndex={0}
      aria-label={`${label}. Arrows move the crosshair, plus and minus zoom, 0 shows all${shown.tiles >= 0 ? ", page keys change the picture, enter opens it" : ""}${drawn?.editing ? ", space switches the place off or on" : ""}.`}
      data-testid="nni-picture"
      onPointerDown={onPointerDown}
      onPointerMove={onPointerMove}
      onPointerUp={onPointerUp}
      onPointerCancel={() => setStroke(null)}
      onDblClick={(event) => {
        const here = at(event);
        if (here) values.openTile(here.tile);
      }}
      onKeyDown={onKeyDown}
    >
      <Canvas height={height} label={label} paint={paint} />
      {!cells && <span class="nni-picture-wait">{array?.shape.includes(0) ? "An empty array." : "Reading…"}</span>}
    </div>
  );
}

/** The words along the rows and columns of a single picture; undefined if none are known. */
function edgeWords(inputs: InputsState, array: HeldArray, shown: ViewAxes, index: readonly number[]): EdgeWords | undefined {
  if ((shown.tiles >= 0 && shown.view !== "attention") || shown.view === "line") return undefined;
  const example = exampleAt(array.axes, array.shape, fixedIndex(array, shown, index), inputs.inputs.value);
  const along = (axis: number): readonly string[] | null =>
    axis >= 0 && inputs.isPositionAxis(array.axes[axis]!, array.shape[axis]!) && inputs.words(example).length > 0 ? inputs.words(example) : null;
  const words = { rows: along(shown.rows), columns: along(shown.columns) };
  return words.rows || words.columns ? words : undefined;
}
