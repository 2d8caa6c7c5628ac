// The selected site's values over the steps: bands of quantiles, or a heatmap.
import { useCallback, useMemo } from "preact/hooks";
import { useLog } from "../charts/axis";
import { toBars } from "../charts/bins";
import { Canvas, type Area } from "../charts/Canvas";
import { paintBands, paintHeatmap } from "../charts/overSteps";
import { histogramKey, type HistoryData } from "../kernel/decode";
import { HISTORY_QUANTILES } from "../kernel/protocol";
import { Waiting } from "../header/Waiting";
import type { Store } from "../store";
import { Choice } from "../ui/Choice";
import { count } from "../ui/format";
import { EACH } from "../ui/quantities";
import { ids } from "../ui/testids";

const SHARES = [...HISTORY_QUANTILES].filter((q) => q < 0.5).map((q) => Math.round((1 - 2 * q) * 100));

export function OverSteps({ store }: { store: Store }) {
  const kind = store.overSteps.value;
  const index = store.selectedIndex.value;
  return (
    <section class="nni-section" aria-label="Over the steps">
      <div class="nni-heading">
        <h4>Over the steps</h4>
        <span class="nni-faint nni-small nni-hint" title="Read from the histogram of each step: within 6.25 %">
          {kind === "bands" ? `line: median; bands: ${SHARES.join(", ")} % of the values` : "stronger colour: more of the step's values"}
        </span>
        <span class="nni-grow" />
        <Choice
          label="Kind of chart"
          testid={ids.overKind}
          value={kind}
          options={["bands", "heatmap"]}
          choose={(chosen) => (store.overSteps.value = chosen)}
        />
      </div>
      <div class="nni-pair">
        {EACH.map(({ quantity, index: q, word }) => {
          const history = store.histories.value.get(q);
          const fits = history && history.header.site === index && history.header.steps > 0;
          const drawn = fits && history.quantiles.some(Number.isFinite);
          return (
            <figure key={quantity} class="nni-figure" data-testid={ids.over(quantity)}>
              <figcaption>
                <span class={`nni-q-${quantity}`}>{word}</span>
                {fits && <span class="nni-faint">{history.header.steps === 1 ? "1 step" : `${count(history.header.steps)} steps`}</span>}
              </figcaption>
              {drawn ? (
                <Chart history={history} quantity={quantity} word={word} heatmap={kind === "heatmap"} store={store} />
              ) : (
                <div class="nni-nothing">
                  {fits ? "No finite value in any step." : <Waiting store={store} before="No steps recorded yet" />}
                </div>
              )}
            </figure>
          );
        })}
      </div>
    </section>
  );
}

interface ChartProps {
  history: HistoryData;
  quantity: "output" | "gradient";
  word: string;
  heatmap: boolean;
  store: Store;
}

function Chart({ history, quantity, word, heatmap, store }: ChartProps) {
  const { site, quantity: q } = history.header;
  const pairs = store.frame.value?.histograms.get(histogramKey(site, q));
  const bars = useMemo(() => (pairs ? toBars(pairs) : null), [pairs]);
  const log = useLog(store.axis.value, bars, `${site} ${q}`);
  const paint = useCallback(
    (area: Area) => {
      const color = area.palette[quantity];
      if (heatmap) paintHeatmap(area, history, color);
      else paintBands(area, history, color, log);
    },
    [history, quantity, heatmap, log],
  );
  return <Canvas height={130} label={`The ${word} over ${count(history.header.steps)} steps`} paint={paint} />;
}
