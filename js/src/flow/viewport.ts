// The part of a drawing that is in view: moved by x and y, zoomed by k. Invariant: pure; the drawing
// never leaves the view.
import type { Point, Size } from "./layout/arrange";

export interface Viewport {
  readonly x: number;
  readonly y: number;
  readonly k: number;
}

export const LEAST_ZOOM = 0.02;
export const MOST_ZOOM = 2;
/** The smallest zoom at which a new drawing is readable. */
const READABLE_ZOOM = 0.66;
/** How much of a drawing always stays in view, in pixels. */
const LEAST_VISIBLE = 60;

/** The whole drawing, centred and never enlarged. */
export function fit(drawing: Size, view: Size): Viewport {
  const k = Math.min(1, Math.max(LEAST_ZOOM, Math.min(view.width / drawing.width, view.height / drawing.height)));
  return { x: (view.width - drawing.width * k) / 2, y: Math.max((view.height - drawing.height * k) / 2, 0), k };
}

/** The whole drawing if it is readable, else its beginning around a point (the input). */
export function initialViewport(drawing: Size, view: Size, around: Point | null): Viewport {
  const whole = fit(drawing, view);
  if (whole.k >= READABLE_ZOOM) return whole;
  const k = READABLE_ZOOM;
  const wide = drawing.width * k > view.width;
  const x = wide && around ? view.width / 2 - around.x * k : (view.width - drawing.width * k) / 2;
  return keepVisible({ x, y: 0, k }, drawing, view);
}

/** Zoom about a point of the view. */
export function zoom(look: Viewport, factor: number, at: Point): Viewport {
  const k = Math.min(Math.max(look.k * factor, LEAST_ZOOM), MOST_ZOOM);
  const by = k / look.k;
  return { x: at.x - (at.x - look.x) * by, y: at.y - (at.y - look.y) * by, k };
}

export function keepVisible({ x, y, k }: Viewport, drawing: Size, view: Size): Viewport {
  const hold = (at: number, length: number, room: number): number => Math.min(Math.max(at, LEAST_VISIBLE - length), room - LEAST_VISIBLE);
  return { x: hold(x, drawing.width * k, view.width), y: hold(y, drawing.height * k, view.height), k };
}

/** Move as little as possible to bring a node into view. */
export function reveal(look: Viewport, middle: Point, size: Size, view: Size): Viewport {
  const edge = 14;
  const [w, h] = [(size.width / 2) * look.k + edge, (size.height / 2) * look.k + edge];
  const [x, y] = [look.x + middle.x * look.k, look.y + middle.y * look.k];
  const moved = (at: number, half: number, room: number): number => (at - half < 0 ? half - at : at + half > room ? room - half - at : 0);
  return { x: look.x + moved(x, w, view.width), y: look.y + moved(y, h, view.height), k: look.k };
}
