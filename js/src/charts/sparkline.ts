// A sparkline: the outline of SPARK heights, filled. Invariant: one path, one fill.
import { SPARK } from "../protocol";
import type { Area } from "./Canvas";

export function paintSparkline({ context, width, height }: Area, heights: Uint8Array, color: string): void {
  const step = width / SPARK;
  const top = height - 1;
  context.beginPath();
  context.moveTo(0, top);
  for (let i = 0; i < SPARK; i++) {
    const y = top - (heights[i] / 255) * (height - 2);
    context.lineTo(i * step, y);
    context.lineTo((i + 1) * step, y);
  }
  context.lineTo(width, top);
  context.closePath();
  context.fillStyle = color;
  context.fill();
}
