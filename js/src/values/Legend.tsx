// The key to a picture of numbers: a bar of colours with a number at each end, and the switch between
// the range of most values and of all.
import { useCallback, useMemo } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { colours, css } from "../charts/colour";
import { Choice } from "../ui/Choice";
import { exact, real } from "../ui/format";
import { ids } from "../ui/testids";
import { dark } from "../ui/theme";
import { isBad, rangeOf, type Cells, type Range } from "./cells";
import type { Pictured } from "./layout";

export function Legend({ values, cells }: { values: Pick<Pictured, "robust">; cells: Cells }) {
  const robust = values.robust.value;
  const range = useMemo(() => rangeOf(cells, robust), [cells, robust]);
  const bad = useMemo(() => cells.mean.some((_, i) => isBad(cells, i)), [cells]);
  return (
    <div class="nni-legend">
      <ColourBar range={range} />
      <span class={bad ? "nni-legend-bad" : "nni-legend-bad nni-hidden"}>NaN or ∞</span>
      <span class="nni-grow" />
      <Choice
        label="Range of the colours"
        testid={ids.valuesRange}
        value={robust ? "1–99 %" : "all"}
        options={["1–99 %", "all"]}
        choose={(chosen) => (values.robust.value = chosen !== "all")}
      />
    </div>
  );
}

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
