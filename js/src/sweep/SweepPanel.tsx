// The sweep: each site perturbed alone, with ranked bars of the effects, each with a link to its site.
// Invariants: nothing runs before Start is pressed, and only one sweep runs at a time; the length of
// a bar is the figure's size, and a text has its sign; a site that could not be measured says why.
import { useState } from "preact/hooks";
import { OFFERS, type Site, type Sweep, type SweepRow } from "../kernel/protocol";
import { label, rowOf } from "../kernel/sites";
import type { Store } from "../store";
import { Refusal } from "../studies/Parts";
import { Choice } from "../ui/Choice";
import { NOT_MEASURED, count, exact, percent, real, signed } from "../ui/format";
import { ids } from "../ui/testids";

const KINDS = OFFERS.filter((offer) => offer.group === "value");
const MEASURES = {
  loss_change: ["loss", "Change of the loss", signed],
  output_change: ["output", "Relative norm of the change of the output", percent],
  kl: ["KL", "KL(clean || perturbed) of the predictions, in nats", real],
  top1_changed: ["top-1", "Share of the predictions that changed", percent],
} as const;
type Measure = keyof typeof MEASURES;
const SHOWN = 40;

export function SweepPanel({ store, site }: { store: Store; site: Site }) {
  const sweep = store.sweep.value;
  return (
    <section class="nni-section" aria-label="Sweep">
      <div class="nni-heading">
        <h4>What each site is for</h4>
        <span class="nni-faint nni-small nni-hint">each is perturbed alone, in a copy of the model</span>
      </div>
      {store.replay.value === "" ? (
        <Start store={store} site={site} running={sweep?.running ?? false} />
      ) : (
        !sweep && <p class="nni-faint">This page was saved without a sweep.</p>
      )}
      <Refusal store={store} what="sweep" />
      {sweep && <Progress sweep={sweep} store={store} />}
      {sweep && sweep.rows.length > 0 && <Bars sweep={sweep} store={store} />}
    </section>
  );
}

function Start({ store, site, running }: { store: Store; site: Site; running: boolean }) {
  const [kind, setKind] = useState("");
  const [strengths, setStrengths] = useState<Readonly<Record<string, number>>>({});
  const [below, setBelow] = useState(false);
  const offer = KINDS.find((one) => one.kind === kind);
  const strength = !offer || offer.strength === null ? null : (strengths[kind] ?? (kind === "Scale" ? 0.5 : offer.strength));
  const wrong = offer && strength !== null && offer.least !== null && strength < offer.least;
  const inside = below && site.key !== "";
  const sites = inside ? `${site.key}/**` : "**";
  return (
    <form
      class="nni-sweep-form"
      noValidate
      aria-label="Start a sweep"
      onSubmit={(event) => {
        event.preventDefault();
        if (!running && !wrong) store.startSweep(sites, kind, strength);
      }}
    >
      <label>
        Perturb
        <select value={kind} data-testid={ids.sweepKind} onChange={(event) => setKind(event.currentTarget.value)}>
          <option value="">Zero, or Mean in a chain</option>
          {KINDS.map((one) => (
            <option key={one.kind} value={one.kind}>
              {one.kind}
            </option>
          ))}
        </select>
      </label>
      {strength !== null && (
        <label>
          {offer!.strength_name}
          <input
            type="number"
            step="any"
            class="nni-sweep-number"
            value={strength}
            onInput={(event) => {
              const value = Number(event.currentTarget.value);
              if (event.currentTarget.value !== "" && Number.isFinite(value)) setStrengths({ ...strengths, [kind]: value });
            }}
          />
        </label>
      )}
      <span class="nni-sweep-at">
        at
        <Choice
          label="Which sites"
          testid={ids.sweepSites}
          value={inside ? "those in this one" : "all sites"}
          options={["all sites", "those in this one"]}
          choose={(chosen) => setBelow(chosen !== "all sites")}
        />
      </span>
      {running ? (
        <button type="button" class="nni-button" data-testid={ids.sweepStop} onClick={() => store.stopSweep()}>
          Stop
        </button>
      ) : (
        <button type="submit" class="nni-button" disabled={wrong} data-testid={ids.sweepStart}>
          Start
        </button>
      )}
    </form>
  );
}

function Progress({ sweep, store }: { sweep: Sweep; store: Store }) {
  const { running, done, total, error } = sweep;
  const what = `${sweep.perturbation} at ${sweep.sites}, on ${sweep.source}`;
  return (
    <div class="nni-sweep-now" data-testid={ids.sweep} data-value={done} data-state={running ? "running" : error ? "failed" : sweep.stopped ? "stopped" : "done"}>
      <progress max={Math.max(total, 1)} value={running && done === 0 ? undefined : done} aria-label="Progress of the sweep" />
      <span role="status" class={error ? "nni-bad" : undefined}>
        {error
          ? error
          : running
            ? done === 0
              ? "compiling one program for all sites …"
              : `${count(done)} of ${count(total)}`
            : `${sweep.stopped ? "stopped: " : ""}${count(sweep.measured)} of ${count(total)} sites`}
      </span>
      <span class="nni-faint nni-small" title={what}>
        {what}
      </span>
      {sweep.loss !== null && <span class="nni-faint nni-small">clean loss {real(sweep.loss)}</span>}
      {error && store.state.value?.progress.running && <span class="nni-faint nni-small">A training is running.</span>}
    </div>
  );
}

function Bars({ sweep, store }: { sweep: Sweep; store: Store }) {
  const there = (Object.keys(MEASURES) as Measure[]).filter((name) => sweep.measures.includes(name));
  const [chosen, choose] = useState<Measure>(there[0]);
  const [all, showAll] = useState(false);
  const measure = there.includes(chosen) ? chosen : there[0];
  const ranked = rank(sweep.rows, measure);
  const largest = Math.max(...ranked.map((row) => Math.abs(row[measure] ?? 0)), 0);
  const shown = all ? ranked : ranked.slice(0, SHOWN);
  const words = Object.fromEntries(there.map((name) => [MEASURES[name][0], name]));
  return (
    <>
      <div class="nni-heading">
        <span class="nni-faint nni-small">{MEASURES[measure][1]}, largest first</span>
        <span class="nni-grow" />
        {there.length > 1 && (
          <Choice
            label="Ranked by"
            testid={ids.sweepMeasure}
            value={MEASURES[measure][0] as string}
            options={Object.keys(words)}
            choose={(word) => choose(words[word])}
          />
        )}
      </div>
      <ol class="nni-bars" aria-label={`Sites by ${MEASURES[measure][1]}, largest first`}>
        {shown.map((row) => (
          <Bar key={row.site} row={row} measure={measure} largest={largest} store={store} />
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

/** Sites that are not finite first, then the largest; sites without a figure last. */
function rank(rows: readonly SweepRow[], measure: Measure): SweepRow[] {
  const size = (row: SweepRow): number => (row.why_not ? -1 : row[measure] === null ? Infinity : Math.abs(row[measure]));
  return [...rows].sort((a, b) => size(b) - size(a) || 0);
}

interface BarProps {
  row: SweepRow;
  measure: Measure;
  largest: number;
  store: Store;
}

function Bar({ row, measure, largest, store }: BarProps) {
  const sites = store.sites.value;
  const key = sites ? rowOf(sites, row.site) : undefined;
  const value = row[measure];
  const show = MEASURES[measure][2];
  const share = value === null || largest === 0 ? 0 : Math.abs(value) / largest;
  return (
    <li data-testid={ids.sweepRow} data-site={row.site} data-value={exact(value)}>
      {key === undefined ? (
        <span class="nni-site">{label(row.site)}</span>
      ) : (
        <button type="button" class="nni-link nni-site" title={label(row.site)} onClick={() => store.select(key)}>
          {label(row.site)}
        </button>
      )}
      {row.why_not ? (
        <span class="nni-faint nni-why" title={row.why_not}>
          {row.why_not}
        </span>
      ) : (
        <>
          <span class="nni-sweep-bar" aria-hidden="true">
            <span style={{ transform: `scaleX(${share})` }} />
          </span>
          <span class={value === null ? "nni-bad" : undefined}>
            {value === null ? (isAlways(measure) ? "not finite" : NOT_MEASURED) : value === 0 ? "no change" : show(value)}
          </span>
        </>
      )}
    </li>
  );
}

/** Without logits there is no figure for predictions. */
const isAlways = (measure: Measure): boolean => measure === "loss_change" || measure === "output_change";
