// A history over the steps: quantile bands with the median, or a heatmap of the distribution.
// Invariants: a step without a finite value is a gap, and red; no line is drawn across it. The axis is
// that of every chart over the steps: from 0 to the newest step.
import { lastAtMost } from "../kernel/bisect";
import type { HistoryData } from "../kernel/decode";
import { HISTORY_BINS, HISTORY_QUANTILES } from "../kernel/protocol";
import { tick } from "../ui/format";
import type { Area } from "./Canvas";
import { edgeScale, linear, runs, type Scale } from "./scale";
import { SIZE } from "./text";

const QUANTILES = HISTORY_QUANTILES.length;
const MEDIAN = HISTORY_QUANTILES.indexOf(0.5);
const BANDS: readonly (readonly [low: number, high: number, opacity: number])[] = [
  [0, QUANTILES - 1, 0.16],
  [1, QUANTILES - 2, 0.24],
  [2, QUANTILES - 3, 0.38],
];
/** The place of the marks of perturbed steps, and the least width of any mark. */
const [MARK, LEAST] = [3, 2];

/** What all charts over the steps share: their axis, the pass on screen, and marks. */
export interface StepAxis {
  /** The axis goes from 0 to this step. */
  readonly newest: number;
  readonly shown: number | null;
  readonly pinned: number | null;
  /** The steps from which to which something was perturbed. */
  readonly perturbed: readonly (readonly [from: number, to: number])[];
}

/** The place of a step on a chart of this width, and the step at a place. */
export const stepX = ({ newest }: StepAxis, width: number, step: number): number => (newest > 0 ? (Math.min(Math.max(step, 0), newest) / newest) * (width - LEAST) + LEAST / 2 : width / 2);
const stepAt = ({ newest }: StepAxis, share: number): number => Math.round(Math.min(Math.max(share, 0), 1) * newest);

/** The handlers of a chart over the steps: it reads out the step under the pointer, and holds one that is pressed. */
export function stepPointer(axis: StepAxis, hold: (step: number) => void, point: (step: number | null) => void, gutter = 0) {
  const step = (event: PointerEvent): number => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    return stepAt(axis, (event.clientX - box.left - gutter) / (box.width - gutter));
  };
  return {
    onPointerDown: (event: PointerEvent): void => {
      (event.currentTarget as Element).setPointerCapture?.(event.pointerId);
      hold(step(event));
    },
    onPointerMove: (event: PointerEvent): void => {
      point(step(event));
      if (event.buttons & 1) hold(step(event));
    },
    onPointerLeave: (): void => point(null),
  };
}

export function paintBands(area: Area, history: HistoryData, color: string, log: boolean, marks: StepAxis): void {
  const { context, palette, width, height } = area;
  const { steps, quantiles } = history;
  const scale = log ? edgeScale(history.edges) : quantileScale(quantiles);
  const x = (i: number): number => stepX(marks, width, steps[i]);
  const y = (value: number): number => 2 + (1 - scale.at(value)) * (height - 4);
  for (const [from, to] of runs(steps.length, (i) => !Number.isNaN(quantiles[i * QUANTILES]))) {
    const single = to - from === 1;
    context.fillStyle = color;
    for (const [low, high, opacity] of BANDS) {
      context.globalAlpha = opacity;
      context.beginPath();
      for (let i = from; i < to; i++) context.lineTo(x(i), y(quantiles[i * QUANTILES + high]));
      for (let i = to - 1; i >= from; i--) context.lineTo(x(i), y(quantiles[i * QUANTILES + low]));
      if (single) context.rect(x(from) - 3, y(quantiles[from * QUANTILES + high]), 6, Math.max(y(quantiles[from * QUANTILES + low]) - y(quantiles[from * QUANTILES + high]), 1));
      context.fill();
    }
    context.globalAlpha = 1;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let i = from; i < to; i++) context.lineTo(x(i), y(quantiles[i * QUANTILES + MEDIAN]));
    context.stroke();
    if (single) context.fillRect(x(from) - 3, y(quantiles[from * QUANTILES + MEDIAN]) - 1, 6, 2);
  }
  const ends: readonly number[] = log ? [history.edges[history.edges.length - 1], history.edges[0]] : valueEnds(quantiles);
  paintMarks(area, marks, stepsWithoutValue(history));
  paintRange(context, palette, height, ends);
}

export function paintHeatmap(area: Area, history: HistoryData, color: string, marks: StepAxis): void {
  const { context, palette, width, height } = area;
  const { steps, fractions, edges } = history;
  const image = heatmapImage(fractions, steps.length, rgb(context, color));
  if (!image) return;
  context.imageSmoothingEnabled = false;
  const ratio = context.getTransform().a || 1; // whole device pixels: columns neither overlap nor gape
  const bounds = columnBounds(steps).map((step) => Math.round(stepX(marks, width, step) * ratio) / ratio);
  for (let i = 0; i < steps.length; i++) {
    context.drawImage(image, i, 0, 1, HISTORY_BINS, bounds[i], 0, Math.max(bounds[i + 1] - bounds[i], LEAST), height);
  }
  paintMarks(area, marks, stepsWithoutValue(history));
  paintRange(context, palette, height, [edges[edges.length - 1], edges[0]]);
}

/** Perturbed steps, steps without a finite value, the pinned pass and the pass on screen. */
export function paintMarks({ context, palette, width, height }: Area, marks: StepAxis, bad: readonly (readonly [from: number, to: number])[]): void {
  const span = ([from, to]: readonly [number, number], top: number, tall: number): void => {
    const left = stepX(marks, width, from);
    context.fillRect(left, top, Math.max(stepX(marks, width, to) - left, LEAST), tall);
  };
  context.fillStyle = palette.perturb;
  for (const one of marks.perturbed) span(one, height - MARK, MARK);
  context.fillStyle = palette.bad;
  context.globalAlpha = 0.35;
  for (const one of bad) span(one, 0, height);
  context.globalAlpha = 1;
  if (marks.pinned !== null) {
    context.fillStyle = palette.text;
    for (let top = 0; top < height; top += 5) context.fillRect(stepX(marks, width, marks.pinned) - 0.5, top, 1, 3);
  }
  if (marks.shown === null) return;
  context.fillStyle = palette.focus;
  context.fillRect(stepX(marks, width, marks.shown) - LEAST / 2, 0, LEAST, height);
}

/** The values at the top and the bottom of a chart, on it. */
export function paintRange(context: CanvasRenderingContext2D, palette: Area["palette"], height: number, ends: readonly number[]): void {
  context.font = `${SIZE}px ${getComputedStyle(context.canvas).fontFamily}`;
  context.textAlign = "left";
  context.fillStyle = palette.text;
  ends.forEach((value, i) => {
    if (i > 0 && value === ends[0]) return;
    context.textBaseline = i === 0 ? "top" : "bottom";
    context.fillText(tick(value), 4, i === 0 ? 2 : height - 2);
  });
}

/** The quantiles of a step, or of the last one before it, in words. */
export function quantilesText({ steps, quantiles }: HistoryData, step: number): string {
  const i = Math.max(lastAtMost(steps.length, (k) => steps[k], step), 0);
  const [low, middle, high] = [1, MEDIAN, QUANTILES - 2].map((q) => quantiles[i * QUANTILES + q]);
  const within = Math.round((HISTORY_QUANTILES[QUANTILES - 2]! - HISTORY_QUANTILES[1]!) * 100);
  return Number.isNaN(middle) ? `step ${steps[i]}: no finite value` : `step ${steps[i]}: median ${tick(middle)}, ${within} % in ${tick(low)} … ${tick(high)}`;
}

/** The ranges of steps without a finite value. */
function stepsWithoutValue({ steps, quantiles }: HistoryData): [number, number][] {
  return runs(steps.length, (i) => Number.isNaN(quantiles[i * QUANTILES])).map(([from, end]) => [steps[from], steps[end - 1]]);
}

/** Columns meet halfway between their steps. */
function columnBounds(steps: Float64Array): number[] {
  const n = steps.length;
  if (n === 1) return [steps[0] - 0.5, steps[0] + 0.5];
  const bounds = [steps[0]];
  for (let i = 1; i < n; i++) bounds.push((steps[i - 1] + steps[i]) / 2);
  bounds.push(steps[n - 1]);
  return bounds;
}

/** One pixel per cell; its opacity is the square root of the fraction, so that tails stay visible. */
function heatmapImage(fractions: Float64Array, steps: number, [r, g, b]: number[]): HTMLCanvasElement | null {
  if (steps === 0) return null;
  const canvas = document.createElement("canvas");
  canvas.width = steps;
  canvas.height = HISTORY_BINS;
  const context = canvas.getContext("2d");
  if (!context) return null;
  const image = context.createImageData(steps, HISTORY_BINS);
  let largest = 0;
  for (const f of fractions) if (f > largest) largest = f;
  for (let i = 0; i < steps; i++) {
    for (let bin = 0; bin < HISTORY_BINS; bin++) {
      const f = fractions[i * HISTORY_BINS + bin];
      const at = ((HISTORY_BINS - 1 - bin) * steps + i) * 4;
      image.data[at] = r;
      image.data[at + 1] = g;
      image.data[at + 2] = b;
      image.data[at + 3] = f > 0 ? 20 + 235 * Math.sqrt(f / largest) : 0;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function rgb(context: CanvasRenderingContext2D, color: string): number[] {
  context.fillStyle = color; // the canvas reads any CSS colour and gives #rrggbb back
  const hex = String(context.fillStyle);
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

/** The greatest and the least value; [] if nothing was ever finite. */
function valueEnds(quantiles: Float64Array): number[] {
  let [low, high] = [Infinity, -Infinity];
  for (const q of quantiles) {
    if (!Number.isFinite(q)) continue;
    if (q < low) low = q;
    if (q > high) high = q;
  }
  return low <= high ? [high, low] : [];
}

function quantileScale(quantiles: Float64Array): Scale {
  const [high = 1, low = 0] = valueEnds(quantiles);
  return low < high ? linear(low, high) : linear(low - 0.5, high + 0.5);
}
