// The sweep: each site perturbed alone. First one sentence that says what was found, then the ranked bars
// of the effects, each with a link to its site.
// Invariants: nothing runs before Start is pressed, and only one sweep runs at a time; a rise is a solid
// bar to the right of zero, a fall a hatched one to the left, and a text has its sign; a site that could
// not be measured says why, and what is left out is said below.
import { useState } from "preact/hooks";
import { OFFERS, type Site, type Sweep, type SweepRow } from "../kernel/protocol";
import { rowKey } from "../kernel/sites";
import type { Store } from "../store";
import { isQueued, Refusal, StudyForm } from "../studies/controls";
import { NOT_MEASURED, count, exact, real } from "../ui/format";
import { NumberInput } from "../ui/NumberInput";
import { Select } from "../ui/Select";
import { SiteLink } from "../ui/SiteLink";
import { SweepSummary } from "./SweepSummary";
import { MEASURES, rank, omitsModel, type Measure } from "./measures";

const KINDS = OFFERS.filter((offer) => offer.group === "value");
const SITE_CHOICES = ["all sites", "those in this one"] as const;
const MOST_ROWS = 40;
/** The least share of the bars' room on either side of zero, if there are bars on it. */
const LEAST_SIDE = 0.24;

interface Props {
  store: Store;
  site: Site;
}

/** What a sweep does, and the button that starts it. */
export function SweepOptions({ store, site }: Props) {
  const wish = store.sweepOptions.value;
  const change = (more: Partial<typeof wish>): void => void (store.sweepOptions.value = { ...wish, ...more });
  const { kind } = wish;
  const offer = KINDS.find((one) => one.kind === kind);
  const strength = !offer || offer.strength === null ? null : (wish.strengths[kind] ?? (kind === "Scale" ? 0.5 : offer.strength));
  const wrong = offer && strength !== null && offer.least !== null && strength < offer.least;
  const inside = wish.below && site.key !== "";
  return (
    <StudyForm
      store={store}
      name="Start a sweep"
      running={store.sweep.value?.running ?? false}
      word={store.sweep.value ? "Run again" : "Start"}
      disabled={wrong}
      start={() => store.startSweep(inside ? `${site.key}/**` : "**", kind, strength)}
      stop={() => store.stopSweep()}
    >
      <Select label="Perturb each by" value={kind} options={["", ...KINDS.map((one) => one.kind)]} word={(one) => one || "Zero, or Mean"} choose={(chosen) => change({ kind: chosen })} />
      {strength !== null && (
        <NumberInput
          step="any"
          class="nni-sweep-number"
          aria-label={offer!.strength_name}
          title={offer!.strength_name}
          value={strength}
          change={(value) => change({ strengths: { ...wish.strengths, [kind]: value } })}
        />
      )}
      <Select label="Which sites" value={inside ? SITE_CHOICES[1] : SITE_CHOICES[0]} options={site.key === "" ? SITE_CHOICES.slice(0, 1) : SITE_CHOICES} choose={(chosen) => change({ below: chosen === SITE_CHOICES[1] })} />
    </StudyForm>
  );
}

export function SweepPanel({ store }: Props) {
  const sweep = store.sweep.value;
  const [chosen, choose] = useState<Measure>("loss_change");
  const available = (Object.keys(MEASURES) as Measure[]).filter((name) => sweep?.measures.includes(name));
  const measure = available.includes(chosen) ? chosen : available[0];
  return (
    <section aria-label="Sweep">
      <Refusal store={store} what="sweep" />
      {!sweep && (
        <p class="nni-faint">
          {store.replayNote.value === "" ? "What is each site for? Start perturbs one after another, each alone, in a copy of the model, and ranks them by what that changes." : "This page was saved without a sweep."}
        </p>
      )}
      {sweep && measure && sweep.rows.length > 0 && <SweepSummary sweep={sweep} measure={measure} />}
      {sweep && sweep.rows.length > 0 && measure && <Bars sweep={sweep} store={store} measure={measure} measures={available} choose={choose} />}
      {sweep && <SweepStatus sweep={sweep} store={store} />}
    </section>
  );
}

/** How far it is, or what it was of, and what is left out. */
function SweepStatus({ sweep, store }: { sweep: Sweep; store: Store }) {
  const { running, done, total, error } = sweep;
  const state = running ? "running" : error ? "failed" : sweep.stopped ? "stopped" : "done";
  return (
    <p class="nni-sweep-now nni-small" role="status" data-testid="nni-sweep" data-value={done} data-state={state}>
      {running && <progress max={Math.max(total, 1)} value={done === 0 ? undefined : done} aria-label="Progress of the sweep" />}
      {error ? (
        <span class="nni-bad">{error}</span>
      ) : running ? (
        <span>{isQueued(store, "sweep") ? "waits for another study to end …" : done === 0 ? "compiling one program for all sites …" : `${count(done)} of ${count(total)} sites`}</span>
      ) : (
        <span class="nni-faint">
          {sweep.stopped ? "Stopped: " : ""}
          {count(sweep.measured)} of {count(total)} sites, {sweep.perturbation} at {sweep.sites}, on {sweep.source}
          {sweep.loss === null ? "" : `, clean loss ${real(sweep.loss)}`}.{omitsModel(sweep) ? " The whole model is left out: zeros there are no model." : ""}
        </span>
      )}
      {error && store.state.value?.progress.running && <span class="nni-faint"> A training is running.</span>}
    </p>
  );
}

interface BarsProps {
  sweep: Sweep;
  store: Store;
  measure: Measure;
  measures: readonly Measure[];
  choose: (measure: Measure) => void;
}

function Bars({ sweep, store, measure, measures, choose }: BarsProps) {
  const [all, showAll] = useState(false);
  const ranked = rank(sweep, measure);
  const values = ranked.map((row) => row[measure] ?? 0);
  let [low, high] = [Math.min(...values, 0), Math.max(...values, 0)];
  if (low < 0) low = Math.min(low, (-LEAST_SIDE / (1 - LEAST_SIDE)) * high);
  if (low < 0 && high > 0) high = Math.max(high, (-LEAST_SIDE / (1 - LEAST_SIDE)) * low);
  const zero = high > low ? -low / (high - low) : 0;
  const shown = all ? ranked : ranked.slice(0, MOST_ROWS);
  const { unit, title } = MEASURES[measure];
  const how = /^nni\.Zero\(\)$/.test(sweep.perturbation) ? "set to zero, alone" : "perturbed alone";
  return (
    <>
      <div class="nni-bars-head" style={{ "--zero": `${100 * zero}%` }}>
        <span>{how}</span>
        <span class="nni-zero" aria-hidden="true">
          {low < 0 && <span>{unit} falls ◂</span>}
          {high > 0 && <span>{measure === "loss_change" ? `▸ ${unit} rises` : title}</span>}
        </span>
        {measures.length > 1 ? (
          <Select label="Ranked by" testid="nni-sweep-measure" value={measure} options={measures} word={(one) => MEASURES[one].word} choose={choose} />
        ) : (
          <span>change</span>
        )}
      </div>
      <ol class="nni-bars" style={{ "--zero": `${100 * zero}%` }} aria-label={`Sites by ${title}, largest first`}>
        {shown.map((row) => (
          <Bar key={row.site} row={row} measure={measure} span={high - low} store={store} />
        ))}
      </ol>
      {ranked.length > shown.length && (
        <button type="button" class="nni-button" onClick={() => showAll(true)}>
          Show all {count(ranked.length)}
        </button>
      )}
      {all && sweep.measured > sweep.rows.length && (
        <p class="nni-faint nni-small">The {count(sweep.rows.length)} largest of {count(sweep.measured)}; all are in the frame of insp.sweep.</p>
      )}
    </>
  );
}

interface BarProps {
  row: SweepRow;
  measure: Measure;
  span: number;
  store: Store;
}

function Bar({ row, measure, span, store }: BarProps) {
  const selected = rowKey(store.sites.value, row.site) === store.selected.value;
  const value = row[measure];
  const { show } = MEASURES[measure];
  const share = value === null || span === 0 ? 0 : Math.abs(value) / span;
  return (
    <li data-testid="nni-sweep-row" data-site={row.site} data-value={exact(value)} aria-current={selected ? "true" : undefined}>
      <SiteLink store={store} site={row.site} />
      {row.why_not ? (
        <span class="nni-faint nni-reason" title={row.why_not}>
          {row.why_not}
        </span>
      ) : (
        <>
          <span class="nni-zero-bar" aria-hidden="true">
            <i data-falls={(value ?? 0) < 0 ? "" : undefined} style={{ width: `${100 * share}%` }} />
          </span>
          <span class={value === null ? "nni-bad" : undefined}>
            {value === null ? (isAlwaysMeasured(measure) ? "not finite" : NOT_MEASURED) : value === 0 ? "no change" : show(value)}
          </span>
        </>
      )}
    </li>
  );
}

/** Without logits there is no figure for predictions. */
const isAlwaysMeasured = (measure: Measure): boolean => measure === "loss_change" || measure === "output_change";
