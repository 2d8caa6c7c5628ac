// The width of a short text: a tick's label, a unit's number. Invariant: it is measured by a canvas,
// without a layout of the page.

export const SIZE = 11;
/** The font of the numbers that are painted on pictures and strips. */
export const NUMBERS = `${SIZE}px monospace`;
let context: CanvasRenderingContext2D | null | undefined;

/** In pixels, in the font of `near`, or of painted numbers; a generous guess if there is no canvas. */
export function textWidth(text: string, near?: Element | null): number {
  if (context === undefined) context = document.createElement("canvas").getContext("2d");
  if (!context) return text.length * SIZE * 0.65;
  context.font = near ? `${SIZE}px ${getComputedStyle(near).fontFamily}` : NUMBERS;
  return context.measureText(text).width;
}
