// Cells painted as pictures: one for each tile, side by side, each cell a crisp rectangle; and the
// way back from a place on the canvas to an element. Invariant: painting and pointer use the same
// `TileLayout`.
import type { Area } from "../charts/Canvas";
import { shortenWord } from "../inputs/state";
import { isBad, type Cells, type ColourRange } from "./cells";
import { css, colours, NOT_FINITE, shade } from "../charts/colour";
import { NUMBERS, SIZE, textWidth } from "../charts/text";
import type { Box, Cursor, ViewAxes } from "./layout";

interface Rect {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

/** The words along the edges of a picture, by the number of the row or column. */
export interface EdgeWords {
  readonly rows: readonly string[] | null;
  readonly columns: readonly string[] | null;
}

interface TileLayout {
  readonly box: Box;
  readonly tiles: readonly Tile[];
}
/** Where a tile is painted. */
type Tile = Rect & { readonly tile: number };

const GAP = 4;
/** The least width of a picture that shows its number. */
const LEAST_NUMBERED = 40;
/** The room for words at the left and below, and how many letters fit in it. */
export const WORD_ROOM = { rows: 78, columns: 76, letters: 11 };
/** The least height of a row, or width of a column, whose word is shown. */
const WORD_PIXELS = 10;

/** The height of a grid of pictures that is so wide: in rows of eight, or as many as there are. */
export function gridHeight(box: Box, width: number, across: number): number {
  const count = box.tiles[1] - box.tiles[0];
  const shape = (box.rows[1] - box.rows[0]) / (box.columns[1] - box.columns[0] || 1);
  const most = Math.max(across, Math.ceil(Math.sqrt(count * 2)));
  const columns = Math.min(count, most) || 1;
  return Math.ceil(count / columns) * (Math.min(width / columns, LARGEST_MAP) * shape) + 1;
}
const LARGEST_MAP = 120;

/** The places of the tiles: one fills the canvas (images keep their shape), several form a grid. */
export function layOutTiles(shown: ViewAxes, box: Box, full: number, high: number, words?: EdgeWords): TileLayout {
  const [left, below] = [words?.rows ? WORD_ROOM.rows : 0, words?.columns ? WORD_ROOM.columns : 0];
  const [width, height] = [full - left, high - below];
  const count = Math.max(1, box.tiles[1] - box.tiles[0]);
  const [rows, columns] = [box.rows[1] - box.rows[0], box.columns[1] - box.columns[0]];
  const square = shown.view === "images" || shown.view === "attention" || shown.view === "patches";
  const aspect = square && rows > 0 && columns > 0 ? columns / rows : 0;
  let best = { across: 1, size: 0 };
  for (let across = 1; across <= count; across++) {
    const [w, h] = [width / across - GAP, height / Math.ceil(count / across) - GAP];
    const size = aspect ? Math.min(w / aspect, h) : Math.min(w, h);
    if (size > best.size * (across > best.across ? 0.9 : 1)) best = { across, size: Math.max(size, best.size) };
  }
  const down = Math.ceil(count / best.across);
  const cell = { width: width / best.across, height: height / down };
  const gap = count > 1 ? GAP : 0;
  let [w, h] = [cell.width - gap, cell.height - gap];
  if (aspect) [w, h] = w / aspect < h ? [w, w / aspect] : [h * aspect, h];
  const tiles = Array.from({ length: count }, (_, i) => {
    return { tile: box.tiles[0] + i, x: left + (i % best.across) * (w + gap), y: Math.floor(i / best.across) * (h + gap), width: w, height: h };
  });
  return { box, tiles };
}

/** The element at a place; null if no tile is there. */
export function elementAt({ box, tiles }: TileLayout, x: number, y: number): Cursor | null {
  const at = tiles.find((r) => x >= r.x && x < r.x + r.width && y >= r.y && y < r.y + r.height);
  if (!at) return null;
  const along = ([from, to]: readonly [number, number], share: number): number => Math.floor(Math.min(from + share * (to - from), Math.ceil(to) - 1));
  return { tile: at.tile, row: along(box.rows, (y - at.y) / at.height), column: along(box.columns, (x - at.x) / at.width) };
}

const rasters = new WeakMap<Cells, { readonly of: string; readonly canvas: HTMLCanvasElement | null }>();

/** All cells as one picture, tiles one below the other; made once for all that draw it. */
export function raster(cells: Cells, range: ColourRange, dark: boolean): HTMLCanvasElement | null {
  const of = [range.low, range.high, range.signed, range.hue, dark].join();
  const known = rasters.get(cells);
  if (known?.of === of) return known.canvas;
  const canvas = rasterize(cells, range, dark);
  rasters.set(cells, { of, canvas });
  return canvas;
}

function rasterize(cells: Cells, range: ColourRange, dark: boolean): HTMLCanvasElement | null {
  const [tiles, rows, columns] = cells.header.counts as [number, number, number];
  if (tiles * rows * columns === 0) return null;
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = tiles * rows;
  const context = canvas.getContext("2d");
  if (!context) return null;
  const image = context.createImageData(columns, tiles * rows);
  const table = colours(range, dark);
  for (let i = 0; i < cells.mean.length; i++) {
    const from = shade(cells.mean[i]!, range) * 3;
    const bad = isBad(cells, i);
    for (let c = 0; c < 3; c++) image.data[i * 4 + c] = bad ? NOT_FINITE[c]! : table[from + c]!;
    image.data[i * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** What lies under the cells: the input's picture of a tile, which spans `whole`, and how much of it shows. */
export interface Underlay {
  readonly of: (tile: number) => HTMLCanvasElement | null;
  readonly whole: readonly [rows: number, columns: number];
  readonly share: number;
}

export function paintPicture(area: Area, at: TileLayout, cells: Cells, picture: HTMLCanvasElement, cursor: Cursor | null, under?: Underlay, chosen = -1): void {
  const { context } = area;
  const { starts, ends, block, counts } = cells.header;
  context.imageSmoothingEnabled = false;
  at.tiles.forEach((rect, i) => {
    const tile = rect.tile - starts[0]!;
    if (tile < 0 || tile >= counts[0]!) return;
    const x = (column: number): number => rect.x + ((column - at.box.columns[0]) / (at.box.columns[1] - at.box.columns[0])) * rect.width;
    const y = (row: number): number => rect.y + ((row - at.box.rows[0]) / (at.box.rows[1] - at.box.rows[0])) * rect.height;
    context.save();
    context.beginPath();
    context.rect(rect.x, rect.y, rect.width, rect.height);
    context.clip();
    const below = under?.of(at.box.tiles[0] + i);
    if (under && below) {
      context.imageSmoothingEnabled = below.width > rect.width;
      context.drawImage(below, x(0), y(0), x(under.whole[1]) - x(0), y(under.whole[0]) - y(0));
      context.imageSmoothingEnabled = false;
      context.globalAlpha = 1 - under.share;
    }
    // the last blocks may have fewer elements than the others, so they are drawn separately
    const whole = [1, 2].map((k) => Math.floor((ends[k]! - starts[k]!) / block[k]!)) as [number, number];
    const [tall, wide] = [counts[1]!, counts[2]!];
    const part = (r0: number, r1: number, c0: number, c1: number): void => {
      if (r1 <= r0 || c1 <= c0) return;
      const [left, top] = [x(starts[2]! + c0 * block[2]!), y(starts[1]! + r0 * block[1]!)];
      const right = x(Math.min(starts[2]! + c1 * block[2]!, ends[2]!));
      const bottom = y(Math.min(starts[1]! + r1 * block[1]!, ends[1]!));
      context.drawImage(picture, c0, tile * tall + r0, c1 - c0, r1 - r0, left, top, right - left, bottom - top);
    };
    part(0, whole[0], 0, whole[1]);
    part(whole[0], tall, 0, whole[1]);
    part(0, whole[0], whole[1], wide);
    part(whole[0], tall, whole[1], wide);
    context.globalAlpha = 1;
    if (at.tiles.length > 1 && rect.tile === chosen) paintFrame(area, rect);
    if (at.tiles.length > 1 && rect.width >= LEAST_NUMBERED) paintNumber(area, rect);
    if (cursor && cursor.tile === rect.tile) paintCrosshair(area, rect, [x(cursor.column), x(cursor.column + 1)], [y(cursor.row), y(cursor.row + 1)]);
    context.restore();
  });
}

/** What a mask over rows and columns switches off, on every picture. */
export function paintMask({ context, palette }: Area, { box, tiles }: TileLayout, mask: Uint8Array, columns: number): void {
  for (const rect of tiles) {
    const [w, h] = [rect.width / (box.columns[1] - box.columns[0]), rect.height / (box.rows[1] - box.rows[0])];
    context.save();
    context.beginPath();
    context.rect(rect.x, rect.y, rect.width, rect.height);
    context.clip();
    mask.forEach((on, i) => {
      if (on) return;
      const [column, row] = [(i % columns) - box.columns[0], Math.floor(i / columns) - box.rows[0]];
      const [x, y] = [Math.round(rect.x + column * w), Math.round(rect.y + row * h)]; // whole pixels leave no seams
      const place = [x, y, Math.round(rect.x + (column + 1) * w) - x, Math.round(rect.y + (row + 1) * h) - y] as const;
      context.fillStyle = palette.background;
      context.fillRect(...place);
      context.fillStyle = palette.perturb;
      context.globalAlpha = 0.6;
      context.fillRect(...place);
      context.globalAlpha = 1;
    });
    context.restore();
  }
}

/** Words beside the rows and below the columns of a single picture, as many as there is room for. */
export function paintWords({ context, palette }: Area, { box, tiles }: TileLayout, words: EdgeWords): void {
  const rect = tiles[0]!;
  context.fillStyle = palette.text;
  context.font = NUMBERS;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const along = (texts: readonly string[], [from, to]: readonly [number, number], pixels: number, draw: (text: string, at: number) => void): void => {
    const each = pixels / (to - from || 1);
    const step = Math.max(1, Math.ceil(WORD_PIXELS / each));
    let before = -Infinity;
    for (let i = Math.ceil(from / step) * step; i < to && i < texts.length; i += step) {
      const middle = Math.min(Math.max((i + 0.5 - from) * each, SIZE / 2), pixels - SIZE / 2); // the first and the last are whole
      if (middle - before < WORD_PIXELS) continue; // the first and the last are moved towards their neighbours
      draw(shortenWord(texts[i]!, WORD_ROOM.letters), middle);
      before = middle;
    }
  };
  if (words.rows) along(words.rows, box.rows, rect.height, (text, at) => context.fillText(text, rect.x - 4, rect.y + at));
  if (words.columns) {
    along(words.columns, box.columns, rect.width, (text, at) => {
      context.save();
      context.translate(rect.x + at, rect.y + rect.height + 4);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    });
  }
}

/** The number of a picture, in its corner. */
function paintNumber({ context, palette }: Area, rect: Tile): void {
  const text = String(rect.tile);
  context.font = NUMBERS;
  context.textBaseline = "top";
  context.textAlign = "right";
  context.globalAlpha = 0.75;
  context.fillStyle = palette.background;
  const width = textWidth(text) + 4;
  context.fillRect(rect.x + rect.width - width, rect.y, width, SIZE + 3);
  context.globalAlpha = 1;
  context.fillStyle = palette.text;
  context.fillText(text, rect.x + rect.width - 2, rect.y + 2);
}

function paintFrame({ context, palette }: Area, rect: Rect): void {
  context.strokeStyle = palette.focus;
  context.lineWidth = 4;
  context.strokeRect(rect.x, rect.y, rect.width, rect.height);
}

function paintCrosshair({ context, palette }: Area, rect: Rect, [left, right]: [number, number], [top, bottom]: [number, number]): void {
  context.globalAlpha = 0.45;
  context.fillStyle = palette.text;
  const [x, y] = [(left + right) / 2, (top + bottom) / 2];
  context.fillRect(x - 0.5, rect.y, 1, rect.height);
  context.fillRect(rect.x, y - 0.5, rect.width, 1);
  context.globalAlpha = 1;
  const [w, h] = [Math.max(right - left, 5), Math.max(bottom - top, 5)];
  for (const [color, width] of [[palette.background, 3], [palette.text, 1.25]] as const) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.strokeRect(x - w / 2, y - h / 2, w, h);
  }
}

/** One line of values: the mean of each block, and the range from its least to its greatest. */
export function paintLine(area: Area, cells: Cells, box: Box, range: ColourRange, cursor: Cursor | null): void {
  const { context, width, height, palette } = area;
  const { starts, ends, block } = cells.header;
  const [from, to] = box.columns;
  const x = (column: number): number => ((column - from) / (to - from || 1)) * width;
  const span = range.high - range.low || 1;
  const y = (value: number): number => height - 8 - ((value - range.low) / span) * (height - 16);
  context.fillStyle = palette.line;
  if (range.signed) context.fillRect(0, y(0) - 0.5, width, 1);
  for (let i = 0; i < cells.mean.length; i++) {
    const left = x(starts[2]! + i * block[2]!);
    const wide = Math.max(x(Math.min(starts[2]! + (i + 1) * block[2]!, ends[2]!)) - left, 0.75);
    if (isBad(cells, i)) {
      context.fillStyle = css(NOT_FINITE);
      context.fillRect(left, 0, wide, 6);
    }
    if (!Number.isFinite(cells.mean[i]!)) continue;
    context.fillStyle = palette.output;
    if (cells.low && cells.high) {
      context.globalAlpha = 0.3;
      context.fillRect(left, y(cells.high[i]!), wide, Math.max(y(cells.low[i]!) - y(cells.high[i]!), 1));
      context.globalAlpha = 1;
      context.fillRect(left, y(cells.mean[i]!) - 1, wide, 2);
    } else {
      const [zero, value] = [y(Math.min(Math.max(0, range.low), range.high)), y(cells.mean[i]!)];
      context.fillRect(left, Math.min(zero, value), Math.max(wide - (wide > 3 ? 1 : 0), 0.75), Math.max(Math.abs(zero - value), 1.5));
    }
  }
  if (!cursor) return;
  context.fillStyle = palette.text;
  context.globalAlpha = 0.7;
  context.fillRect((x(cursor.column) + x(cursor.column + 1)) / 2 - 0.5, 0, 1, height);
  context.globalAlpha = 1;
}
