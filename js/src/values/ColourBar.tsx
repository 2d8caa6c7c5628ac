// A bar with the colours of a range and a number at each end, as the key to a picture of numbers.
import { useCallback } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { exact, real } from "../ui/format";
import { ids } from "../ui/testids";
import { dark } from "../ui/theme";
import type { Range } from "./cells";
import { colours, css } from "./colour";

export function ColourBar({ range, show = real }: { range: Range; show?: (value: number) => string }) {
  const night = dark.value;
  const { low, high, signed } = range;
  const paint = useCallback(
    ({ context, width, height }: Area) => {
      const table = colours({ low, high, signed }, night);
      for (let x = 0; x < width; x++) {
        context.fillStyle = css(table, Math.round((x / Math.max(width - 1, 1)) * 255) * 3);
        context.fillRect(x, 0, 1, height);
      }
    },
    [low, high, signed, night],
  );
  return (
    <>
      <span data-testid={ids.legendLow} data-value={exact(low)}>
        {show(low)}
      </span>
      <span class="nni-legend-bar">
        <Canvas height={10} label={`Colours from ${show(low)} by ${show((low + high) / 2)} to ${show(high)}`} paint={paint} />
      </span>
      <span data-testid={ids.legendHigh} data-value={exact(high)}>
        {show(high)}
      </span>
    </>
  );
}
