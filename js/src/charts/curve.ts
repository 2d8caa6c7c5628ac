// One metric over the steps, as a line. Invariant: values that have no place on the axis are gaps.
import type { Area } from "./Canvas";
import { plot } from "./plot";
import { plain } from "../ui/format";
import { linear, logarithmic, stepTicks } from "./scale";

/** The least and the largest finite value, above 0 only if `positive`; [∞, −∞] if there is none. */
function ends(points: Float64Array, positive: boolean): [low: number, high: number] {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 1; i < points.length; i += 2) {
    const value = points[i];
    if (!Number.isFinite(value) || (positive && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

/** Whether a metric has values that a logarithmic axis can show. */
export const canBeLog = (points: Float64Array): boolean => ends(points, true)[0] < Infinity;

/** Whether a metric is read better on a logarithmic axis: above 0, and over two decades or more. */
export function suitsLog(points: Float64Array): boolean {
  const [low, high] = ends(points, false);
  return low > 0 && high >= 100 * low;
}

export function paintCurve(area: Area, points: Float64Array, color: string, log = false): void {
  const { context } = area;
  const n = points.length / 2;
  let [low, high] = ends(points, log);
  if (!(low <= high)) [low, high] = log ? [1, 10] : [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const [first, last] = [points[0], points[points.length - 2]];
  const at = plot(
    area,
    last > first ? { ...linear(first, last), ticks: stepTicks(first, last, area.width / 70) } : linear(first, last),
    log ? logarithmic(low / 1.2, high * 1.2) : linear(low - pad, high + pad, 3),
    plain,
  );
  const hasPlace = (value: number): boolean => Number.isFinite(value) && !(log && value <= 0);
  context.strokeStyle = color;
  context.fillStyle = color;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let down = false;
  for (let i = 0; i < n; i++) {
    const value = points[i * 2 + 1];
    if (!hasPlace(value)) {
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
  if (hasPlace(end)) {
    context.beginPath();
    context.arc(at.x(last), at.y(end), 2.5, 0, 2 * Math.PI);
    context.fill();
  }
}
