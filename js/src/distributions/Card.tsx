// One distribution: its title with one named figure, its histogram, and its quantiles over the steps.
// Invariants: every line has its place even while there is nothing to show, so that streaming data
// moves nothing; what is under the pointer is said in the line of the title; a click holds a step.
import type { ComponentChildren } from "preact";
import { useCallback, useMemo, useState } from "preact/hooks";
import { useLog, type Axis } from "../charts/axis";
import { precision, toBars } from "../charts/bins";
import { Canvas, type Area } from "../charts/Canvas";
import { Histogram, type NotFinite } from "../charts/Histogram";
import { paintBands, paintHeatmap, stepAt, readoutAt, type Steps } from "../charts/overSteps";
import type { HistoryData } from "../kernel/decode";
import type { Statistic } from "../kernel/protocol";
import { count, percent, tick } from "../ui/format";
import { ids } from "../ui/testids";

export type Figures = (name: Statistic) => number;

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
  readonly figures: Figures | null;
  /** Pairs (bin, count), if they have come. */
  readonly pairs?: Float64Array | undefined;
  /** Those that it is compared with. */
  readonly before?: { readonly figures: Figures; readonly pairs?: Float64Array | undefined } | undefined;
  readonly history?: HistoryData | undefined;
}

/** The values that are not finite; null if all are. */
export function notFinite(figures: Figures): NotFinite | null {
  const [nan, inf] = [figures("nan"), figures("posinf") + figures("neginf")];
  const all = (nan || 0) + (inf || 0);
  if (!(all > 0)) return null;
  return { name: [nan > 0 && "NaN", inf > 0 && "Inf"].filter(Boolean).join(", "), count: all, share: all / figures("size") };
}

/** The one figure that says most: how many are not finite, that all are one value, or the standard deviation. */
function named(figures: Figures): ComponentChildren {
  if (Number.isNaN(figures("size"))) return "";
  const bad = notFinite(figures);
  if (bad) return <b class="nni-bad">{`${percent(bad.share)} ${bad.name}`}</b>;
  if (figures("min") === figures("max")) return `all ${tick(figures("min"))}`;
  return `std ${tick(figures("std"))}`;
}

interface Props {
  of: Distribution;
  /** In test ids; by default the name of the distribution. */
  as?: string;
  axis: Axis;
  /** Identifies what is shown, so that another site chooses its axis anew. */
  site: string;
  /** Why there is no histogram, if there is none. */
  nothing: (sent: boolean) => ComponentChildren;
  /** The chart over the steps; absent where there is none. */
  over?: { readonly heatmap: boolean; readonly steps: Steps; readonly hold: (step: number) => void; readonly nothing: ComponentChildren } | undefined;
  /** Chooses what the card shows, in the title. */
  choice?: ComponentChildren;
}

export function Card({ of, as: name = of.name, axis, site, nothing, over, choice }: Props) {
  const { title, tone, figures, pairs, before, history } = of;
  const [readout, setReadout] = useState<string | null>(null);
  const bars = useMemo(() => (pairs ? toBars(pairs) : null), [pairs]);
  const behind = useMemo(() => (before?.pairs ? toBars(before.pairs) : undefined), [before?.pairs]);
  const log = useLog(axis, bars?.length || !behind ? bars : behind, `${site} ${of.name}`);
  const bad = figures && notFinite(figures);
  const precise = figures ? precision(figures) : "";
  const some = useMemo(() => history?.quantiles.some(Number.isFinite), [history]);
  const all = bars?.reduce((sum, bar) => sum + bar.count, 0) ?? NaN;
  return (
    <figure class="nni-card" data-testid={ids.hist(name)}>
      <h4 class={`nni-q-${tone}`} title={of.hint}>
        {choice || <span class="nni-card-title">{title}</span>}
        <span class="nni-card-figure" data-testid={ids.histCount(name)} data-value={Number.isNaN(all) ? "" : Math.round(all)} title={readout ?? precise} aria-live={readout ? "polite" : "off"}>
          {readout ?? (figures && named(figures))}
        </span>
      </h4>
      {figures && (bars?.length || bad || behind?.length) ? (
        <Histogram bars={bars ?? []} log={log} quantity={name} tone={tone} word={title} behind={behind} bad={bad} precise={precise} say={setReadout} />
      ) : (
        <div class="nni-nothing">{nothing(bars !== null)}</div>
      )}
      {over && (
        <div class="nni-over" data-testid={ids.over(name)}>
          {history && some ? <Over history={history} tone={tone} word={title} log={log} say={setReadout} {...over} /> : <span class="nni-faint">{over.nothing}</span>}
        </div>
      )}
    </figure>
  );
}

interface OverProps {
  history: HistoryData;
  tone: Distribution["tone"];
  word: string;
  log: boolean;
  heatmap: boolean;
  steps: Steps;
  hold: (step: number) => void;
  say: (text: string | null) => void;
}

const said = (steps: number): string => (steps === 1 ? "1 step" : `${count(steps)} steps`);

function Over({ history, tone, word, log, heatmap, steps, hold, say }: OverProps) {
  const paint = useCallback(
    (area: Area) => (heatmap ? paintHeatmap(area, history, area.palette[tone], steps) : paintBands(area, history, area.palette[tone], log, steps)),
    [history, tone, heatmap, log, steps],
  );
  const under = (event: PointerEvent): number => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    return stepAt(steps, (event.clientX - box.left) / box.width);
  };
  return (
    <div
      class="nni-over-chart"
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture?.(event.pointerId);
        hold(under(event));
      }}
      onPointerMove={(event) => {
        say(readoutAt(history, under(event)));
        if (event.buttons & 1) hold(under(event));
      }}
      onPointerLeave={() => say(null)}
    >
      <Canvas label={`The ${word} over ${said(history.header.steps)}`} paint={paint} />
    </div>
  );
}
