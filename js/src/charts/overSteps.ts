// A history over the steps: quantile bands with the median, or a heatmap of the distribution.
// Invariant: a step without a measurement is a gap; no line is drawn across it.
import type { HistoryData } from "../kernel/decode";
import { HISTORY_BINS, HISTORY_QUANTILES } from "../kernel/protocol";
import type { Area } from "./Canvas";
import { plot, type Plot } from "./plot";
import { along, linear, stepTicks, type Scale } from "./scale";

const Q = HISTORY_QUANTILES.length;
const MEDIAN = HISTORY_QUANTILES.indexOf(0.5);
const BANDS: readonly (readonly [low: number, high: number, opacity: number])[] = [
  [0, Q - 1, 0.16],
  [1, Q - 2, 0.24],
  [2, Q - 3, 0.38],
];

export function paintBands(area: Area, history: HistoryData, color: string, log: boolean): void {
  const { context } = area;
  const { steps, quantiles } = history;
  const at = plot(area, stepScale(steps, area.width), log ? along(history.edges) : quantileScale(quantiles));
  for (const [from, to] of runs(quantiles)) {
    context.fillStyle = color;
    for (const [low, high, opacity] of BANDS) {
      context.globalAlpha = opacity;
      context.beginPath();
      for (let i = from; i < to; i++) context.lineTo(at.x(steps[i]), at.y(quantiles[i * Q + high]));
      for (let i = to - 1; i >= from; i--) context.lineTo(at.x(steps[i]), at.y(quantiles[i * Q + low]));
      if (to - from === 1) dot(context, at, steps[from], quantiles[from * Q + low], quantiles[from * Q + high]);
      context.fill();
    }
    context.globalAlpha = 1;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let i = from; i < to; i++) context.lineTo(at.x(steps[i]), at.y(quantiles[i * Q + MEDIAN]));
    context.stroke();
    if (to - from === 1) context.fillRect(at.x(steps[from]) - 3, at.y(quantiles[from * Q + MEDIAN]) - 1, 6, 2);
  }
}

function dot(context: CanvasRenderingContext2D, at: Plot, step: number, low: number, high: number): void {
  context.rect(at.x(step) - 3, at.y(high), 6, Math.max(at.y(low) - at.y(high), 1));
}

export function paintHeatmap(area: Area, history: HistoryData, color: string): void {
  const { context, palette } = area;
  const { steps, fractions } = history;
  const at = plot(area, stepScale(steps, area.width), along(history.edges));
  const image = heatmapImage(fractions, steps.length, rgb(context, color));
  if (!image) return;
  context.imageSmoothingEnabled = false;
  context.fillStyle = palette.background;
  context.fillRect(at.left, at.top, at.width, at.height);
  const ratio = context.getTransform().a || 1; // whole device pixels: columns neither overlap nor gape
  const bounds = columnBounds(steps).map((step) => {
    return Math.round(Math.min(Math.max(at.x(step), at.left), at.left + at.width) * ratio) / ratio;
  });
  for (let i = 0; i < steps.length; i++) {
    const width = bounds[i + 1] - bounds[i];
    context.drawImage(image, i, 0, 1, HISTORY_BINS, bounds[i], at.top, width, at.height);
  }
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

function stepScale(steps: Float64Array, width: number): Scale {
  const [low, high] = [steps[0], steps[steps.length - 1]];
  return high > low
    ? { ...linear(low, high), ticks: stepTicks(low, high, width / 70) }
    : { at: (step) => 0.5 + (step - low) / 4, ticks: [low] };
}

function quantileScale(quantiles: Float64Array): Scale {
  let [low, high] = [Infinity, -Infinity];
  for (const q of quantiles) {
    if (!Number.isFinite(q)) continue;
    if (q < low) low = q;
    if (q > high) high = q;
  }
  if (low > high) return { ...linear(0, 1), ticks: [] }; // nothing was ever finite
  return low < high ? linear(low, high, 4) : linear(low - 0.5, high + 0.5, 4);
}

/** The ranges of steps that were measured. */
function* runs(quantiles: Float64Array): Generator<[from: number, to: number]> {
  const n = quantiles.length / Q;
  for (let from = 0; from < n; from++) {
    if (Number.isNaN(quantiles[from * Q])) continue;
    let to = from + 1;
    while (to < n && !Number.isNaN(quantiles[to * Q])) to += 1;
    yield [from, to];
    from = to;
  }
}
