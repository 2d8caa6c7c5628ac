// One metric over the steps, as a line, with the cursor. Invariants: all curves have one axis of steps,
// from 0 to the newest; values that have no place on the axis are gaps; a value between two gaps is a
// dot; a step whose value is not finite has a mark over the whole height.
import type { Area } from "../charts/Canvas";
import { linear, logarithmic, runs } from "../charts/scale";
import { lastAtMost } from "../kernel/bisect";

/** The room at either end of the axis of steps, in which the thumb of the track is whole. */
export const INSET = 6;

/** What all curves have in common: the axis of steps, and what is marked on it. */
export interface CurveMarks {
  /** The newest step. */
  readonly last: number;
  /** The step on screen; NaN if it has none. */
  readonly cursor: number;
  readonly pinned: number;
  /** The steps from and to which something was perturbed. */
  readonly spans: readonly (readonly [from: number, to: number])[];
}

export const xOfStep = (step: number, last: number, width: number): number => INSET + (last > 0 ? step / last : 0.5) * (width - 2 * INSET);

export const stepOfX = (place: number, last: number, width: number): number =>
  Math.min(Math.max((place - INSET) / Math.max(width - 2 * INSET, 1), 0), 1) * last;

/** The value at a step, or at the recorded step before it; NaN if it is not finite, undefined if there is none. */
export function valueAt(points: Float64Array, step: number): number | undefined {
  const i = lastAtMost(points.length / 2, (k) => points[k * 2], step);
  return i < 0 ? undefined : points[i * 2 + 1];
}

/** The least and the largest finite value, above 0 only if `positive`; [∞, −∞] if there is none. */
export function finiteRange(points: Float64Array, positive: boolean): [low: number, high: number] {
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
export const canBeLog = (points: Float64Array): boolean => finiteRange(points, true)[0] < Infinity;

/** Whether a metric is read better on a logarithmic axis: above 0, and over two decades or more. */
export function suitsLog(points: Float64Array): boolean {
  const [low, high] = finiteRange(points, false);
  return low > 0 && high >= 100 * low;
}

/** A curve from top to bottom of the canvas, less the `foot` pixels below it. */
export function paintCurve(area: Area, points: Float64Array, { last, cursor, spans }: CurveMarks, log: boolean, foot = 0): void {
  const { context, width, palette } = area;
  const height = area.height - foot;
  let [low, high] = finiteRange(points, log);
  if (!(low <= high)) [low, high] = log ? [1, 10] : [0, 1];
  const scale = log ? logarithmic(low, high) : linear(low, high);
  const x = (step: number): number => xOfStep(step, last, width);
  const y = (value: number): number => 3 + (1 - scale.at(value)) * (height - 6);
  context.fillStyle = palette.perturb;
  context.globalAlpha = 0.14;
  for (const [from, to] of spans) context.fillRect(x(from) - 1, 0, x(to) - x(from) + 2, height);
  context.fillStyle = palette.bad;
  context.globalAlpha = 0.3;
  const step = (i: number): number => x(points[i * 2]);
  const value = (i: number): number => points[i * 2 + 1];
  const n = points.length / 2;
  for (const [from, end] of runs(n, (i) => !Number.isFinite(value(i)))) context.fillRect(step(from) - 1, 0, step(end - 1) - step(from) + 2, height);
  context.globalAlpha = 1;
  context.strokeStyle = context.fillStyle = palette.metric;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  for (const [from, end] of runs(n, (i) => Number.isFinite(value(i)) && !(log && value(i) <= 0))) {
    context.beginPath();
    if (end - from === 1) {
      context.arc(step(from), y(value(from)), 1.5, 0, 2 * Math.PI);
      context.fill();
      continue;
    }
    for (let i = from; i < end; i++) context.lineTo(step(i), y(value(i)));
    context.stroke();
  }
  paintCursor(area, x(cursor), height);
}

function paintCursor({ context, palette }: Area, x: number, height: number): void {
  if (Number.isNaN(x)) return;
  context.fillStyle = palette.focus;
  context.fillRect(Math.round(x) - 1, 0, 2, height);
}

/** The track below the curves, `height` pixels at the bottom of the canvas, with the thumb. */
export function paintTrack(area: Area, { last, cursor, pinned, spans }: CurveMarks, bad: readonly number[], height: number): void {
  const { context, width, palette } = area;
  const x = (step: number): number => xOfStep(step, last, width);
  const middle = area.height - height / 2;
  const bar = (color: string, from: number, to: number): void => {
    context.fillStyle = color;
    context.fillRect(from, middle - 2, to - from, 4);
  };
  bar(palette.control, INSET, width - INSET);
  for (const [from, to] of spans) bar(palette.perturb, x(from) - 1, x(to) + 1);
  for (const step of bad) bar(palette.bad, x(step) - 1, x(step) + 1);
  if (!Number.isNaN(pinned)) {
    context.beginPath();
    for (const [dx, dy] of [[0, -6], [5, 0], [0, 6], [-5, 0]]) context.lineTo(x(pinned) + dx, middle + dy); // prettier-ignore
    context.closePath();
    context.fillStyle = palette.background;
    context.strokeStyle = palette.text;
    context.lineWidth = 1.5;
    context.fill();
    context.stroke();
  }
  if (Number.isNaN(cursor)) return;
  context.fillStyle = palette.focus;
  context.beginPath();
  context.arc(x(cursor), middle, 6, 0, 2 * Math.PI);
  context.fill();
}

/** The steps at which a metric is not finite. */
export function notFiniteSteps(points: Float64Array): number[] {
  const steps: number[] = [];
  for (let i = 0; i < points.length; i += 2) if (!Number.isFinite(points[i + 1])) steps.push(points[i]);
  return steps;
}
