// A sparkline: the outline of SPARK heights, filled. Invariant: one element with one path; an SVG,
// because a canvas in each row takes a third of the time in which a tree first appears.
import { SPARK } from "../kernel/protocol";

interface Props {
  heights: Uint8Array;
  width: number;
  height: number;
  /** "" if its surroundings describe it. */
  label: string;
}

export function Sparkline({ heights, width, height, label }: Props) {
  const said = label ? { role: "img" as const, "aria-label": label } : { "aria-hidden": true };
  return (
    <svg class="nni-sparkline" width={width} height={height} {...said}>
      <path d={areaPath(heights, width, height)} />
    </svg>
  );
}

function areaPath(heights: Uint8Array, width: number, height: number): string {
  const [step, low] = [width / SPARK, height - 1];
  let path = `M0 ${low}`;
  for (let i = 0; i < SPARK; i++) path += `V${(low - (heights[i] / 255) * (low - 1)).toFixed(1)}H${(i + 1) * step}`;
  return `${path}V${low}Z`;
}

/** Heights that came as text in hexadecimal. */
export function parseHeights(hex: string): Uint8Array {
  return Uint8Array.from({ length: hex.length / 2 }, (_, i) => parseInt(hex.slice(2 * i, 2 * i + 2), 16) || 0);
}

/** Two histograms on one axis, from the heights of both in hexadecimal: filled, and as an outline. */
export function HistogramPair({ hex, tone }: { hex: string; tone: string }) {
  if (hex.length !== 4 * SPARK) return <span />;
  const heights = parseHeights(hex);
  return (
    <svg class="nni-shapes" viewBox="0 0 96 20" preserveAspectRatio="none" aria-hidden="true">
      <path class={`nni-bar-${tone}`} d={areaPath(heights.subarray(0, SPARK), 96, 20)} />
      <path class="nni-outline" d={areaPath(heights.subarray(SPARK), 96, 20)} />
    </svg>
  );
}
