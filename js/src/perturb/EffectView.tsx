// The perturbed pass beside the clean one: each metric and its change, the change of the output, and
// the sites that changed most. Invariants: its name comes from the State of the same message, not
// from later requests; without a pair of passes it says what it waits for; a figure without any
// change says so, and does not look like a change.
import type { ComponentChildren } from "preact";
import type { Effect, State } from "../kernel/protocol";
import { label, rowOf } from "../kernel/sites";
import type { Store } from "../store";
import { NOT_MEASURED, exact, percent, real, signed } from "../ui/format";
import { ids } from "../ui/testids";

export function EffectView({ state, store }: { state: State; store: Store }) {
  const { effect } = state;
  if (!effect) {
    return (
      <div class="nni-effect nni-faint" data-testid={ids.noEffect}>
        {state.no_effect || "No effect measured yet."}
      </div>
    );
  }
  const metrics = [...new Set([...Object.keys(effect.clean), ...Object.keys(effect.perturbed)])];
  return (
    <>
      {/* it may scroll in a narrow view, and has no other element that a key can reach */}
      <div class={store.wished.value ? "nni-effect nni-before" : "nni-effect"} role="group" aria-label="Effect" tabIndex={0} data-testid={ids.effect}>
        <table>
          <caption>
            <b>Effect</b>
            {ofWhat(state)}
            {effect.source && ` on ${effect.source}`}
            {store.wished.value && ", before this change"}
          </caption>
          <thead>
            <tr>
              <td />
              <th scope="col">clean</th>
              <th scope="col">perturbed</th>
              <th scope="col">change</th>
            </tr>
          </thead>
          <tbody>
            {metrics.map((metric) => (
              <Metric key={metric} metric={metric} effect={effect} />
            ))}
            <Figure name="output" hint="Relative norm of the change of the output" value={effect.output_change} testid={ids.outputChange} show={percent} />
            <Figure
              name="KL divergence"
              hint="Kullback-Leibler divergence of the perturbed from the clean prediction, mean, in nats"
              value={effect.kl}
              testid={ids.kl}
              show={real}
            />
            {metrics.length === 0 && store.replay.value === "" && (
              <tr>
                <th scope="row" colSpan={4}>
                  insp.step(loss_fn, batch) adds the loss
                </th>
              </tr>
            )}
            <Figure name="top-1 changed" hint="Share of the predictions that changed" value={effect.top1_changed} testid={ids.top1} show={percent} />
          </tbody>
        </table>
      </div>
      {effect.sites.length > 0 && <Downstream effect={effect} store={store} />}
    </>
  );
}

/** The name of the perturbation if it is the only one on; the effect of several is a joint one. */
function ofWhat({ perturbations }: State): string {
  const on = perturbations.filter((p) => p.enabled);
  if (on.length !== 1) return on.length > 1 ? ` of ${on.length} together` : "";
  const [{ kind, strength, strength_name, site }] = on;
  const amount = strength === null ? "" : ` (${strength_name} ${Number(strength.toPrecision(4))})`;
  return ` of ${kind}${amount}${perturbations.length > 1 ? ` at ${label(site)}` : ""}`;
}

function Metric({ metric, effect }: { metric: string; effect: Effect }) {
  const clean = effect.clean[metric] ?? null;
  const perturbed = effect.perturbed[metric] ?? null;
  return (
    <tr>
      <th scope="row" class="nni-effect-metric" title={metric}>
        {metric}
      </th>
      <td data-testid={ids.effectValue(metric, "clean")} data-value={exact(clean)}>
        {real(clean)}
      </td>
      <td data-testid={ids.effectValue(metric, "perturbed")} data-value={exact(perturbed)}>
        {real(perturbed)}
      </td>
      <Change by={clean === null || perturbed === null ? null : perturbed - clean} show={signed} />
    </tr>
  );
}

interface FigureProps {
  name: string;
  hint: string;
  value: number | null;
  testid: string;
  show: (value: number) => string;
}

/** A figure of the pair of passes, not of each one. */
function Figure({ name, hint, value, testid, show }: FigureProps) {
  if (value === null) return null;
  return (
    <tr title={hint}>
      <th scope="row" colSpan={3}>
        {name}
      </th>
      <Change by={value} show={show} testid={testid} />
    </tr>
  );
}

interface ChangeProps {
  by: number | null;
  show: (value: number) => string;
  testid?: string;
}

function Change({ by, show, testid }: ChangeProps) {
  const cell = (look: string, text: ComponentChildren) => (
    <td class={look} data-testid={testid} data-value={testid && exact(by)}>
      {text}
    </td>
  );
  if (by === null) return cell("nni-no-change", NOT_MEASURED);
  return by === 0 ? cell("nni-no-change", "no change") : cell("nni-change", show(by));
}

/** The sites that changed most, each with a link; bars compare them with the largest change. */
function Downstream({ effect, store }: { effect: Effect; store: Store }) {
  const sites = store.sites.value;
  const largest = Math.max(...effect.sites.map((s) => s.change ?? 0));
  return (
    <div class="nni-downstream">
      <b class="nni-faint" title="How far the output of each site moved, largest first">
        Downstream
      </b>
      <ol aria-label="Sites downstream, by how far their output moved">
        {effect.sites.map(({ site, change }) => {
          const row = sites ? rowOf(sites, site) : undefined;
          return (
            <li key={site} data-testid={ids.downstream} data-site={site} data-value={exact(change)}>
              {row === undefined ? (
                <span class="nni-site">
                  <bdi>{label(site)}</bdi>
                </span>
              ) : (
                <button type="button" class="nni-link nni-site" title={label(site)} onClick={() => store.select(row)}>
                  <bdi>{label(site)}</bdi>
                </button>
              )}
              <span class="nni-share" aria-hidden="true">
                <span style={{ transform: `scaleX(${change && largest ? change / largest : 0})` }} />
              </span>
              <span class={change === null ? "nni-bad" : undefined} title="Relative norm of the change of its output">
                {change === null ? "not finite" : percent(change)}
              </span>
            </li>
          );
        })}
      </ol>
    </div>
  );
}
