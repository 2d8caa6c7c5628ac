// The perturbed pass beside the clean one in full: each metric and its change, the change of the output,
// each perturbation by itself, and the sites that changed most. Invariants: its name comes from the State
// of the same message, not from later requests; a figure without any change says so, and does not look
// like a change.
import type { Effect, EffectAlone, State } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { NOT_MEASURED, exact, percent, real, signed } from "../ui/format";
import { SiteLink } from "../ui/SiteLink";

export function EffectTable({ state, store }: { state: State; store: Store }) {
  const { effect } = state;
  if (!effect) return null; // the bar says why
  const metrics = [...new Set([...Object.keys(effect.clean), ...Object.keys(effect.perturbed)])];
  return (
    <>
      {/* it may scroll in a narrow view, and has no other element that a key can reach */}
      <div class={store.hasPendingChange.value ? "nni-effect nni-outdated" : "nni-effect"} role="group" aria-label="The effect in full" tabIndex={0} data-testid="nni-effect-full">
        <table>
          <caption>
            <b>Effect</b>
            {effectOwner(state)}
            {effect.source && ` on ${effect.source}`}
            {store.hasPendingChange.value && ", before this change"}
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
            <Figure name="output" hint="Relative norm of the change of the output" value={effect.output_change} show={percent} />
            <Figure
              name="KL divergence"
              hint="Kullback-Leibler divergence of the perturbed from the clean prediction, mean, in nats"
              value={effect.kl}
              show={real}
            />
            {effect.alone.map((one) => (
              <SingleEffect key={one.perturbation} one={one} state={state} store={store} />
            ))}
            {metrics.length === 0 && store.replayNote.value === "" && (
              <tr>
                <th scope="row" colSpan={4}>
                  insp.step(loss_fn, batch) adds the loss
                </th>
              </tr>
            )}
            <Figure name="top-1 changed" hint="Share of the predictions that changed" value={effect.top1_changed} show={percent} />
          </tbody>
        </table>
      </div>
      {effect.sites.length > 0 && <Downstream effect={effect} store={store} />}
    </>
  );
}

/** The name of the perturbation if it is the only one on; the effect of several is a joint one. */
export function effectOwner({ perturbations }: State): string {
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
      <th scope="row" title={metric}>
        {metric}
      </th>
      <td>{real(clean)}</td>
      <td>{real(perturbed)}</td>
      <Change by={clean === null || perturbed === null ? null : perturbed - clean} show={signed} />
    </tr>
  );
}

interface FigureProps {
  name: string;
  hint: string;
  value: number | null;
  show: (value: number) => string;
}

/** A figure of the pair of passes, not of each one. */
function Figure({ name, hint, value, show }: FigureProps) {
  if (value === null) return null;
  return (
    <tr title={hint}>
      <th scope="row" colSpan={3}>
        {name}
      </th>
      <Change by={value} show={show} />
    </tr>
  );
}

/** The effect of one of several perturbations by itself; that of all together is above. */
function SingleEffect({ one, state, store }: { one: EffectAlone; state: State; store: Store }) {
  const p = state.perturbations.find(({ id }) => id === one.perturbation);
  if (!p || !p.enabled || store.hasPendingChange.value) return null; // the effect is older than the change
  const [name, by, show] = one.loss_change === null ? (["output", one.output_change, percent] as const) : (["loss", one.loss_change, signed] as const);
  const figure = (value: number | null, show: (value: number) => string): string => (value === null ? NOT_MEASURED : value === 0 ? "no change" : show(value));
  const all = [
    `${p.kind} alone:`,
    `loss ${figure(one.loss_change, signed)}`,
    `output ${figure(one.output_change, percent)}`,
    `KL divergence ${figure(one.kl, real)}`,
    `top-1 changed ${figure(one.top1_changed, percent)}`,
  ];
  return (
    <tr title={all.join("\n")} data-testid="nni-alone" data-value={exact(by)}>
      <th scope="row" colSpan={3}>
        {p.kind} on {label(p.site)} alone: {name}
      </th>
      <Change by={by} show={show} />
    </tr>
  );
}

interface ChangeProps {
  by: number | null;
  show: (value: number) => string;
}

function Change({ by, show }: ChangeProps) {
  if (by === null) return <td class="nni-no-change">{NOT_MEASURED}</td>;
  return by === 0 ? <td class="nni-no-change">no change</td> : <td class="nni-change">{show(by)}</td>;
}

/** The sites that changed most, each with a link; bars compare them with the largest change. */
function Downstream({ effect, store }: { effect: Effect; store: Store }) {
  const largest = Math.max(...effect.sites.map((s) => s.change ?? 0));
  return (
    <div class="nni-downstream">
      <b class="nni-faint" title="How far the output of each site moved, largest first">
        Downstream
      </b>
      <ol aria-label="Sites downstream, by how far their output moved">
        {effect.sites.map(({ site, change }) => (
          <li key={site} data-testid="nni-downstream" data-site={site} data-value={exact(change)}>
            <SiteLink store={store} site={site} />
            <span class="nni-share" aria-hidden="true">
              <span style={{ transform: `scaleX(${change && largest ? change / largest : 0})` }} />
            </span>
            <span class={change === null ? "nni-bad" : undefined} title="Relative norm of the change of its output">
              {change === null ? "not finite" : percent(change)}
            </span>
          </li>
        ))}
      </ol>
    </div>
  );
}
