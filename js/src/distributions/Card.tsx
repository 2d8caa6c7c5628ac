// One distribution: its title with one named figure, its histogram, and its quantiles over the steps.
// Invariants: every line has its place even while there is nothing to show, so that streaming data
// moves nothing; what is under the pointer is said in the line of the title; a click holds a step.
import type { ComponentChildren } from "preact";
import { useCallback, useMemo, useState } from "preact/hooks";
import { useLogAxis, type AxisScale } from "../charts/axis";
import { samplingError, toBars } from "../charts/bins";
import { Canvas, type Area } from "../charts/Canvas";
import { Histogram, type NotFinite } from "../charts/Histogram";
import { paintBands, paintHeatmap, quantilesText, stepPointer, type StepAxis } from "../charts/history";
import type { HistoryData } from "../kernel/decode";
import type { Statistic } from "../kernel/protocol";
import { count, percent, tick } from "../ui/format";

export type Statistics = (name: Statistic) => number;

/** What one card and one row of the table show. */
export interface Distribution {
  /** Its name in test ids. */
  readonly name: string;
  /** The path of the parameter whose values these are; absent for others. */
  readonly path?: string;
  readonly title: string;
  readonly hint?: string;
  readonly tone: "output" | "gradient" | "weight";
  /** null before the first pass. */
  readonly statistics: Statistics | null;
  /** Pairs (bin, count), if they have come. */
  readonly pairs?: Float64Array | undefined;
  /** Those that it is compared with. */
  readonly reference?: { readonly statistics: Statistics; readonly pairs?: Float64Array | undefined } | undefined;
  readonly history?: HistoryData | undefined;
}

/** The values that are not finite; null if all are. */
export function notFinite(statistics: Statistics): NotFinite | null {
  const [nan, inf] = [statistics("nan"), statistics("posinf") + statistics("neginf")];
  const all = (nan || 0) + (inf || 0);
  if (!(all > 0)) return null;
  return { name: [nan > 0 && "NaN", inf > 0 && "Inf"].filter(Boolean).join(", "), count: all, share: all / statistics("size") };
}

/** The one figure that says most: how many are not finite, that all are one value, or the standard deviation. */
function headline(statistics: Statistics): ComponentChildren {
  if (Number.isNaN(statistics("size"))) return "";
  const bad = notFinite(statistics);
  if (bad) return <b class="nni-bad">{`${percent(bad.share)} ${bad.name}`}</b>;
  if (statistics("min") === statistics("max")) return `all ${tick(statistics("min"))}`;
  return `std ${tick(statistics("std"))}`;
}

interface Props {
  distribution: Distribution;
  /** In test ids; by default the name of the distribution. */
  as?: string;
  axis: AxisScale;
  /** Identifies what is shown, so that another site chooses its axis anew. */
  site: string;
  /** Why there is no histogram, if there is none. */
  placeholder: (sent: boolean) => ComponentChildren;
  /** The chart over the steps; absent where there is none. */
  chart?: { readonly heatmap: boolean; readonly steps: StepAxis; readonly hold: (step: number) => void; readonly nothing: ComponentChildren } | undefined;
  /** Chooses what the card shows, in the title. */
  choice?: ComponentChildren;
}

export function Card({ distribution, as: name = distribution.name, axis, site, placeholder, chart, choice }: Props) {
  const { title, tone, statistics, pairs, reference, history } = distribution;
  const [readout, setReadout] = useState<string | null>(null);
  const bars = useMemo(() => (pairs ? toBars(pairs) : null), [pairs]);
  const behind = useMemo(() => (reference?.pairs ? toBars(reference.pairs) : undefined), [reference?.pairs]);
  const log = useLogAxis(axis, bars?.length || !behind ? bars : behind, `${site} ${distribution.name}`);
  const bad = statistics && notFinite(statistics);
  const sampling = statistics ? samplingError(statistics) : "";
  const some = useMemo(() => history?.quantiles.some(Number.isFinite), [history]);
  const all = bars?.reduce((sum, bar) => sum + bar.count, 0) ?? NaN;
  return (
    <figure class="nni-card" data-testid={`nni-hist-${name}`}>
      <h4 class={`nni-q-${tone}`} title={distribution.hint}>
        {choice || <span class="nni-card-title">{title}</span>}
        <span class="nni-card-figure" data-testid={`nni-hist-count-${name}`} data-value={Number.isNaN(all) ? "" : Math.round(all)} title={readout ?? sampling} aria-live={readout ? "polite" : "off"}>
          {readout ?? (statistics && headline(statistics))}
        </span>
      </h4>
      {statistics && (bars?.length || bad || behind?.length) ? (
        <Histogram bars={bars ?? []} log={log} quantity={name} tone={tone} word={title} other={behind} bad={bad} sampling={sampling} setReadout={setReadout} />
      ) : (
        <div class="nni-nothing">{placeholder(bars !== null)}</div>
      )}
      {chart && (
        <div class="nni-history" data-testid={`nni-over-${name}`}>
          {history && some ? <HistoryChart history={history} tone={tone} word={title} log={log} setReadout={setReadout} {...chart} /> : <span class="nni-faint">{chart.nothing}</span>}
        </div>
      )}
    </figure>
  );
}

interface HistoryProps {
  history: HistoryData;
  tone: Distribution["tone"];
  word: string;
  log: boolean;
  heatmap: boolean;
  steps: StepAxis;
  hold: (step: number) => void;
  setReadout: (text: string | null) => void;
}

const stepsText = (steps: number): string => (steps === 1 ? "1 step" : `${count(steps)} steps`);

function HistoryChart({ history, tone, word, log, heatmap, steps, hold, setReadout }: HistoryProps) {
  const paint = useCallback(
    (area: Area) => (heatmap ? paintHeatmap(area, history, area.palette[tone], steps) : paintBands(area, history, area.palette[tone], log, steps)),
    [history, tone, heatmap, log, steps],
  );
  return (
    <div class="nni-history-chart" {...stepPointer(steps, hold, (step) => setReadout(step === null ? null : quantilesText(history, step)))}>
      <Canvas label={`The ${word} over ${stepsText(history.header.steps)}`} paint={paint} />
    </div>
  );
}
