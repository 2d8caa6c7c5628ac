// The meaning of the colours in numbers, and the switch between the range of most values and of all.
import { useMemo } from "preact/hooks";
import { Choice } from "../ui/Choice";
import { ids } from "../ui/testids";
import { isBad, rangeOf, type Cells } from "./cells";
import { ColourBar } from "./ColourBar";
import type { ValuesState } from "./state";

export function Legend({ values, cells }: { values: ValuesState; cells: Cells }) {
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
