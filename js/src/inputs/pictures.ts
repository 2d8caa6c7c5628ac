// The thumbnails of a batch, decoded once, and where the patches of a picture lie.
// Invariant: a message with fewer bytes than it announces shows no picture; a grid of patches is given
// only if square patches of whole pixels cover the picture.
import type { Pictures } from "../kernel/protocol";

const canvases = new WeakMap<Pictures, Map<number, HTMLCanvasElement | null>>();

/** The thumbnail of an example; null if there is none. */
export function thumbnail(pictures: Pictures | null | undefined, example: number): HTMLCanvasElement | null {
  if (!pictures || example < 0 || example >= pictures.count) return null;
  let known = canvases.get(pictures);
  if (!known) canvases.set(pictures, (known = new Map()));
  if (!known.has(example)) known.set(example, toCanvas(pictures, example));
  return known.get(example)!;
}

function toCanvas(pictures: Pictures, example: number): HTMLCanvasElement | null {
  const canvas = document.createElement("canvas");
  canvas.width = pictures.width;
  canvas.height = pictures.height;
  const context = canvas.getContext("2d");
  const pixels = rgbaPixels(pictures, example);
  if (!context || !pixels) return null;
  const image = context.createImageData(pictures.width, pictures.height);
  image.data.set(pixels);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The argument that holds the pictures, in words. */
export const argumentName = ({ path }: Pictures): string => (/^\d+$/.test(path) ? `argument ${path}` : path);

const decodedPixels = new WeakMap<Pictures, string>();

/** The pixels of an example as red, green, blue and 255; null if the message lacks them. */
export function rgbaPixels(pictures: Pictures, example: number): Uint8ClampedArray | null {
  const { width, height, channels } = pictures;
  if (!decodedPixels.has(pictures)) decodedPixels.set(pictures, atob(pictures.pixels));
  const bytes = decodedPixels.get(pictures)!;
  const size = width * height * channels;
  if ((channels !== 1 && channels !== 3) || bytes.length < (example + 1) * size) return null;
  const out = new Uint8ClampedArray(width * height * 4).fill(255);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) out[i * 4 + c] = bytes.charCodeAt(example * size + i * channels + (channels === 3 ? c : 0));
  }
  return out;
}

/** Patches in rows and columns, after `skip` positions that are not patches (a class token). */
export interface PatchGrid {
  readonly rows: number;
  readonly columns: number;
  readonly skip: number;
}

const MOST_SKIPPED = 5;

/** The grid of patches that a number of positions is, if it is one. */
export function toPatchGrid(pictures: Pictures | null | undefined, positions: number): PatchGrid | null {
  if (!pictures) return null;
  for (let skip = 0; skip <= MOST_SKIPPED; skip++) {
    const side = Math.sqrt((pictures.rows * pictures.columns) / (positions - skip));
    const [rows, columns] = [pictures.rows / side, pictures.columns / side];
    if (side >= 2 && [side, rows, columns].every(Number.isInteger) && Math.min(rows, columns) >= 2) return { rows, columns, skip };
  }
  return null;
}
