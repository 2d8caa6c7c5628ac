// The width of a tick's label. Invariant: it is measured by a canvas, without a layout of the page.

const SIZE = 10;
let context: CanvasRenderingContext2D | null | undefined;

/** In pixels, in the font of `near`; a generous guess if there is no canvas. */
export function textWidth(text: string, near: Element | null): number {
  if (context === undefined) context = document.createElement("canvas").getContext("2d");
  if (!context) return text.length * SIZE * 0.65;
  context.font = `${SIZE}px ${near ? getComputedStyle(near).fontFamily : "sans-serif"}`;
  return context.measureText(text).width;
}
