// The frame of a canvas chart over the steps: margins, grid lines and tick labels on both axes.
// Invariant: margins are constant, so that the plot does not move while numbers stream.
import { plain, tick } from "../ui/format";
import type { Area } from "./Canvas";
import { labels, spaced, type Scale } from "./scale";

export interface Plot {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
  x(value: number): number;
  y(value: number): number;
}

const MARGIN = { left: 46, right: 8, top: 6, bottom: 18 };
const FONT = "10px";

export function plot(area: Area, x: Scale, y: Scale, text = tick): Plot {
  const { context, palette } = area;
  const left = MARGIN.left;
  const top = MARGIN.top;
  const width = Math.max(area.width - left - MARGIN.right, 1);
  const height = Math.max(area.height - top - MARGIN.bottom, 1);
  const result: Plot = {
    left,
    top,
    width,
    height,
    x: (value) => left + x.at(value) * width,
    y: (value) => top + (1 - y.at(value)) * height,
  };
  context.font = `${FONT} ${getComputedStyle(context.canvas).fontFamily}`;
  context.lineWidth = 1;
  context.strokeStyle = palette.line;
  context.fillStyle = palette.faint;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const { value } of spaced(y, 15 / height)) {
    const at = Math.round(result.y(value)) + 0.5;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(left + width, at);
    context.stroke();
    context.fillText(text(value), left - 5, at);
  }
  context.textBaseline = "top";
  context.textAlign = "left";
  for (const label of labels(x, width, (step) => plain(step), (text) => context.measureText(text).width, MARGIN.right)) {
    context.fillText(label.text, left + label.left, top + height + 5);
  }
  return result;
}
