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
      <path d={outline(heights, width, height)} />
    </svg>
  );
}

function outline(heights: Uint8Array, width: number, height: number): string {
  const [step, low] = [width / SPARK, height - 1];
  let path = `M0 ${low}`;
  for (let i = 0; i < SPARK; i++) path += `V${(low - (heights[i] / 255) * (low - 1)).toFixed(1)}H${(i + 1) * step}`;
  return `${path}V${low}Z`;
}
