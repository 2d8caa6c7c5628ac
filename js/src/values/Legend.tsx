// The key to a picture of numbers: a bar of colours with a number at each end.
import type { Signal } from "@preact/signals";
import { useCallback, useMemo } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { colours, css } from "../charts/colour";
import { ButtonGroup } from "../ui/ButtonGroup";
import { exact, real } from "../ui/format";
import { dark } from "../ui/theme";
import { isBad, colourRange, type Cells, type ColourRange } from "./cells";
import type { PictureState } from "./layout";

export function Legend({ values, cells }: { values: Pick<PictureState, "robust" | "hue">; cells: Cells }) {
  const [robust, hue] = [values.robust.value, values.hue.value];
  const range = useMemo(() => ({ ...colourRange(cells, robust), hue }), [cells, robust, hue]);
  const bad = useMemo(() => cells.mean.some((_, i) => isBad(cells, i)), [cells]);
  return (
    <div class="nni-legend">
      <ColourBar range={range} />
      <span class={bad ? "nni-legend-bad" : "nni-legend-bad nni-hidden"}>NaN or ∞</span>
    </div>
  );
}

/** The choice whether the colours range over most values only. */
export function RangeChoice({ robust }: { robust: Signal<boolean> }) {
  return (
    <span class="nni-menu-line">
      colours of
      <ButtonGroup label="Range of the colours" value={robust.value ? "1–99 %" : "all"} options={["1–99 %", "all"]} choose={(chosen) => (robust.value = chosen !== "all")} />
    </span>
  );
}

export function ColourBar({ range, show = real }: { range: ColourRange; show?: (value: number) => string }) {
  const night = dark.value;
  const { low, high, signed, hue } = range;
  const paint = useCallback(
    ({ context, width, height }: Area) => {
      const table = colours(hue ? { low, high, signed, hue } : { low, high, signed }, night);
      for (let x = 0; x < width; x++) {
        context.fillStyle = css(table, Math.round((x / Math.max(width - 1, 1)) * 255) * 3);
        context.fillRect(x, 0, 1, height);
      }
    },
    [low, high, signed, hue, night],
  );
  return (
    <>
      <span data-testid="nni-legend-low" data-value={exact(low)}>
        {show(low)}
      </span>
      <span class="nni-legend-bar">
        <Canvas height={10} label={`Colours from ${show(low)} by ${show((low + high) / 2)} to ${show(high)}`} paint={paint} />
      </span>
      <span data-testid="nni-legend-high" data-value={exact(high)}>
        {show(high)}
      </span>
    </>
  );
}
