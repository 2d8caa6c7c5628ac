// The pass on screen against the pinned one, or against another run: a key that names both, the
// histograms of the selected site, and all sites by difference, largest first, each with a link.
// Invariants: a figure is never shown without its two passes; sites that are unknown, or in only one of
// the two, are described in words and come last.
import { useEffect, useState } from "preact/hooks";
import { HistogramPair } from "../charts/Sparkline";
import { Card } from "../distributions/Card";
import { useDistributions } from "../distributions/siteData";
import { OTHER, type Compared, type ComparedRow, type Quantity } from "../kernel/protocol";
import { QUANTITY_NAMES } from "../kernel/quantities";
import { rowKey } from "../kernel/sites";
import type { Store } from "../store";
import { otherName, pinnedName } from "../time/passNames";
import { count, exact, percent, real, signed } from "../ui/format";
import { Select } from "../ui/Select";
import { SiteLink } from "../ui/SiteLink";
import { WeightsRanking } from "./WeightsRanking";

const MOST_ROWS = 40;
type Measure = "total_variation" | "quantile_distance";
const MEASURES: Readonly<Record<Measure, string>> = {
  total_variation: "Total variation: the share of the values that are distributed differently, 0 to 100 %",
  quantile_distance: "Distance between quantiles (Wasserstein distance of order 1), in standard deviations",
};

const quantityName = (one: string): string => (one === "output" ? "activations" : (QUANTITY_NAMES[one as Quantity] ?? one));
const comparedQuantities = (result: Compared | null): string[] => [...new Set(result?.rows.map((row) => row.quantity))];

/** What is ranked, and with what it is compared. */
export function CompareOptions({ store }: { store: Store }) {
  const { compare, timeline } = store;
  const other = compare.other.value;
  const quantities = comparedQuantities(compare.result.value);
  const chosen = quantities.includes(compare.quantity.value) ? compare.quantity.value : quantities[0];
  return (
    <>
      {other && timeline.pinned.value?.header.number !== OTHER && (
        <button type="button" class="nni-button" title={`Compare with ${otherName(store)}`} data-testid="nni-compare-other" onClick={() => timeline.pinOther()}>
          Compare with {otherName(store)}
        </button>
      )}
      {timeline.pinned.value && chosen !== undefined && quantities.length > 1 && (
        <Select label="Quantity to compare" testid="nni-compare-quantity" value={chosen} options={quantities} word={quantityName} choose={(one) => (compare.quantity.value = one)} />
      )}
    </>
  );
}

export function ComparePanel({ store, index }: { store: Store; index: number }) {
  const { compare, timeline } = store;
  const pinned = timeline.pinned.value?.header.number;
  const number = store.frame.value?.header.number;
  const result = compare.result.value;
  const following = timeline.held.value === null;
  const fits = result !== null && result.pinned === pinned;
  const isNow = fits && result.number === number;
  // During a run the ranking stays as it is until the user requests it again.
  const wanted = pinned !== undefined && number !== undefined && number !== pinned && (fits && following ? false : !isNow);
  useEffect(() => {
    if (wanted) compare.ask(false);
  }, [pinned, number, wanted, compare.busy.value]);
  return (
    <section aria-label="Compare">
      {pinned === undefined ? <PinHint store={store} /> : <ComparedPasses store={store} result={fits ? result : null} isNow={isNow} />}
      {compare.error.value && pinned !== undefined && <p class="nni-bad">{compare.error.value}</p>}
      {pinned !== undefined && <HistogramCards store={store} index={index} />}
      {fits && <Ranking result={result} store={store} />}
      {compare.weights.value && <WeightsRanking weights={compare.weights.value} store={store} />}
    </section>
  );
}

/** The histograms of the selected site, of both passes. */
function HistogramCards({ store, index }: { store: Store; index: number }) {
  const measured = useDistributions(store, index).filter((one) => one.reference && [one.statistics, one.reference.statistics].some((figures) => figures && figures("size") > 0));
  const site = store.selected.value ?? "";
  return (
    <div class="nni-cards nni-two">
      {measured.map((one) => (
        <Card key={one.name} distribution={one} axis={store.axis.value} site={site} placeholder={(sent) => (sent ? "No finite value." : "Comes with the next frame.")} />
      ))}
    </div>
  );
}

function PinHint({ store }: { store: Store }) {
  return (
    <>
      <p>
        Pin a pass, and the pass on screen is compared with it.{" "}
        <button type="button" class="nni-button" disabled={!store.frame.value} onClick={() => store.timeline.pin()}>
          Pin this pass
        </button>
      </p>
      <p class="nni-faint nni-small">
        Another run, from a file: <code>insp.compare(nni.load("run.nni"))</code>; weights, those of a copy or a checkpoint:{" "}
        <code>insp.compare(before)</code>
      </p>
    </>
  );
}

function ComparedPasses({ store, result, isNow }: { store: Store; result: Compared | null; isNow: boolean }) {
  const { compare, timeline, frame } = store;
  const same = frame.value?.header.number === timeline.pinned.value?.header.number;
  const passes = timeline.passes.value;
  const step = result ? passes.indexOf(result.number) : -1;
  const on = step >= 0 && passes.perturbed(step) ? ", perturbed" : "";
  return (
    <p class="nni-key" role="status" data-testid="nni-compare-state" data-state={compare.busy.value ? "busy" : isNow ? "now" : "before"}>
      {same ? (
        <span>The pass on screen is the pinned one. Go to another pass, or let the run go on.</span>
      ) : compare.busy.value && !result ? (
        <span>comparing …</span>
      ) : (
        <>
          <span>
            <i class="nni-key-shown" aria-hidden="true" />
            <b>{isNow ? `step ${count(frame.value?.header.step)}` : step >= 0 ? `step ${count(passes.step(step))}` : "a pass that is gone"}</b>
            {isNow ? ", on screen" : ""}
            {on}
          </span>
          <span>
            <i class="nni-key-reference" aria-hidden="true" />
            <b>◇ {pinnedName(store)}</b>, pinned
          </span>
        </>
      )}
      {!same && !isNow && !compare.busy.value && (
        <button type="button" class="nni-button" data-testid="nni-compare-again" onClick={() => compare.ask()}>
          Compare the pass on screen
        </button>
      )}
    </p>
  );
}

function Ranking({ result, store }: { result: Compared; store: Store }) {
  const [measure, setMeasure] = useState<Measure>("total_variation");
  const [all, showAll] = useState(false);
  const quantities = comparedQuantities(result);
  const wish = store.compare.quantity.value;
  const quantity = quantities.includes(wish) ? wish : quantities[0];
  const ranked = rank(
    result.rows.filter((row) => row.quantity === quantity),
    measure,
  );
  const shown = all ? ranked : ranked.slice(0, MOST_ROWS);
  if (ranked.length === 0) return <p class="nni-faint">Neither pass measured anything.</p>;
  return (
    <>
      <div class="nni-bars-head nni-compared">
        <span>largest first</span>
        <span />
        <span />
        <SortButton measure="total_variation" chosen={measure} choose={setMeasure} text="changed" />
        <SortButton measure="quantile_distance" chosen={measure} choose={setMeasure} text="distance" />
      </div>
      <ol class="nni-bars" aria-label={`Sites by ${measure === "total_variation" ? "total variation" : "distance"}, largest first`}>
        {shown.map((row) => (
          <RankedSite key={row.site} row={row} store={store} />
        ))}
      </ol>
      {ranked.length > shown.length && (
        <button type="button" class="nni-button" onClick={() => showAll(true)}>
          Show all {count(ranked.length)}
        </button>
      )}
      <p class="nni-faint nni-small nni-notes">
        changed: share of the values that are distributed differently. distance: of the quantiles, in standard deviations.
        {result.total > result.rows.length && ` The ${count(result.rows.length)} largest of ${count(result.total)}; all are in the frame of insp.compare.`}
      </p>
    </>
  );
}

function SortButton({ measure, chosen, choose, text }: { measure: Measure; chosen: Measure; choose: (measure: Measure) => void; text: string }) {
  return (
    <button type="button" class="nni-link" aria-pressed={measure === chosen} data-testid={`nni-compare-by-${measure}`} title={MEASURES[measure]} onClick={() => choose(measure)}>
      {text}
      {measure === chosen ? " ▾" : ""}
    </button>
  );
}

/** The largest difference first, then unknown ones, then sites in only one of the passes. */
function rank(rows: readonly ComparedRow[], measure: Measure): ComparedRow[] {
  const size = (row: ComparedRow): number => {
    if (row.where !== "both") return -2;
    return measure === "quantile_distance" && row.constant ? Infinity : (row[measure] ?? -1);
  };
  return [...rows].sort((a, b) => size(b) - size(a) || 0);
}

function RankedSite({ row, store }: { row: ComparedRow; store: Store }) {
  const selected = rowKey(store.sites.value, row.site) === store.selected.value;
  const why = missingText(row, store);
  const nan = (row.nan ?? 0) !== (row.nan_pinned ?? 0) ? `${count(row.nan)} NaN here, ${count(row.nan_pinned)} there` : "";
  return (
    <li class="nni-compared" data-testid="nni-compare-row" data-site={row.site} data-value={exact(row.total_variation)} data-distance={exact(row.quantile_distance)} aria-current={selected ? "true" : undefined} title={momentsText(row)}>
      <SiteLink store={store} site={row.site} />
      {why ? (
        <span class="nni-faint nni-reason" title={why}>
          {why}
        </span>
      ) : (
        <>
          <HistogramPair hex={row.shapes} tone={row.quantity} />
          <span class={`nni-compare-bar nni-q-${row.quantity}`} aria-hidden="true">
            <i style={{ width: `${100 * (row.total_variation ?? 0)}%` }} />
          </span>
          <span>{percent(row.total_variation)}</span>
          <span class={nan ? "nni-bad" : undefined} title={nan || undefined}>
            {nan ? "NaN" : row.constant ? "∞" : row.quantile_distance === null ? real(null) : `${real(row.quantile_distance)} σ`}
          </span>
        </>
      )}
    </li>
  );
}

function missingText(row: ComparedRow, store: Store): string {
  if (row.where === "here") return `not in ${pinnedName(store)}`;
  if (row.where === "pinned") return `only in ${pinnedName(store)}`;
  return row.total_variation === null ? "its counts are unknown" : "";
}

function momentsText(row: ComparedRow): string | undefined {
  if (row.where !== "both" || row.mean_difference === null) return undefined;
  const parts = [`mean ${signed(row.mean_difference)}`];
  if (row.std_difference !== null) parts.push(`std ${signed(row.std_difference)}`);
  if (row.rms_difference !== null) parts.push(`root mean square ${signed(row.rms_difference)}`);
  return `Here, against the other: ${parts.join(", ")}`;
}
