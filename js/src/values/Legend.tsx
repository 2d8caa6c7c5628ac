// What the colours mean, in numbers, and the switch between the range of most values and of all.
import { useCallback, useMemo } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { Choice } from "../detail/Choice";
import { exact, real } from "../format";
import { ids } from "../testids";
import { dark } from "../theme";
import { isBad, rangeOf, type Cells } from "./cells";
import { colours, css } from "./colour";
import type { ValuesState } from "./state";

export function Legend({ values, cells }: { values: ValuesState; cells: Cells }) {
  const [robust, night] = [values.robust.value, dark.value];
  const range = useMemo(() => rangeOf(cells, robust), [cells, robust]);
  const bad = useMemo(() => cells.mean.some((_, i) => isBad(cells, i)), [cells]);
  const paint = useCallback(
    ({ context, width, height }: Area) => {
      const table = colours(range, night);
      for (let x = 0; x < width; x++) {
        context.fillStyle = css(table, Math.round((x / Math.max(width - 1, 1)) * 255) * 3);
        context.fillRect(x, 0, 1, height);
      }
    },
    [range, night],
  );
  const middle = (range.low + range.high) / 2;
  return (
    <div class="nni-legend">
      <span data-testid={ids.legendLow} data-value={exact(range.low)}>
        {real(range.low)}
      </span>
      <span class="nni-legend-bar">
        <Canvas height={10} label={`Colours from ${real(range.low)} by ${real(middle)} to ${real(range.high)}`} paint={paint} />
      </span>
      <span data-testid={ids.legendHigh} data-value={exact(range.high)}>
        {real(range.high)}
      </span>
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
