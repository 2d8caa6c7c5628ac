// One metric over the steps, as a line. Invariant: values that are not finite are gaps.
import type { Area } from "./Canvas";
import { plot } from "./plot";
import { linear, stepTicks } from "./scale";

export function paintCurve(area: Area, points: Float64Array, color: string): void {
  const { context } = area;
  const n = points.length / 2;
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < n; i++) {
    low = Math.min(low, finite(points[i * 2 + 1], low));
    high = Math.max(high, finite(points[i * 2 + 1], high));
  }
  if (!(low <= high)) [low, high] = [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const [first, last] = [points[0], points[points.length - 2]];
  const at = plot(
    area,
    last > first ? { ...linear(first, last), ticks: stepTicks(first, last, area.width / 70) } : linear(first, last),
    linear(low - pad, high + pad, 3),
  );
  context.strokeStyle = color;
  context.fillStyle = color;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let down = false;
  for (let i = 0; i < n; i++) {
    const value = points[i * 2 + 1];
    if (!Number.isFinite(value)) {
      down = false;
    } else if (down) {
      context.lineTo(at.x(points[i * 2]), at.y(value));
    } else {
      context.moveTo(at.x(points[i * 2]), at.y(value));
      down = true;
    }
  }
  context.stroke();
  const end = points[points.length - 1];
  if (Number.isFinite(end)) {
    context.beginPath();
    context.arc(at.x(last), at.y(end), 2.5, 0, 2 * Math.PI);
    context.fill();
  }
}

function finite(value: number, otherwise: number): number {
  return Number.isFinite(value) ? value : otherwise;
}
