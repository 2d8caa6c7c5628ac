// One metric over the steps, as a line. Invariants: values that have no place on the axis are gaps; a
// value between two gaps is a dot; a step whose value is not finite has a mark on the axis.
import type { Area } from "./Canvas";
import { plot } from "./plot";
import { plain } from "../ui/format";
import { linear, logarithmic, stepTicks } from "./scale";

/** The height of the mark of a step whose value is not finite. */
const MARK = 5;

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

/** The ranges of points that a line joins. */
function* runs(points: Float64Array, hasPlace: (value: number) => boolean): Generator<[from: number, to: number]> {
  const n = points.length / 2;
  for (let from = 0; from < n; from++) {
    if (!hasPlace(points[from * 2 + 1])) continue;
    let to = from + 1;
    while (to < n && hasPlace(points[to * 2 + 1])) to += 1;
    yield [from, to];
    from = to;
  }
}

export function paintCurve(area: Area, points: Float64Array, color: string, log = false): void {
  const { context } = area;
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
  const dot = (i: number, radius: number): void => {
    context.beginPath();
    context.arc(at.x(points[i * 2]), at.y(points[i * 2 + 1]), radius, 0, 2 * Math.PI);
    context.fill();
  };
  for (const [from, to] of runs(points, hasPlace)) {
    if (to - from === 1) dot(from, 1.5);
    context.beginPath();
    for (let i = from; i < to; i++) context.lineTo(at.x(points[i * 2]), at.y(points[i * 2 + 1]));
    context.stroke();
  }
  if (hasPlace(points[points.length - 1])) dot(points.length / 2 - 1, 2.5);
  context.fillStyle = area.palette.bad;
  for (let i = 0; i < points.length; i += 2) {
    if (!Number.isFinite(points[i + 1])) context.fillRect(at.x(points[i]) - 0.75, at.top + at.height - MARK, 1.5, MARK);
  }
}
