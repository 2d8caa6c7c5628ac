// The perturbed pass beside the clean one: each metric, its change, and how far the output moved.
// Invariants: without a pair of passes it says why there is no effect; it never shows a stale one;
// what did not change at all says so, and is not set like a change.
import { NOT_MEASURED, exact, percent, real, signed } from "../format";
import type { Effect, State } from "../protocol";
import { ids } from "../testids";

export function EffectView({ state }: { state: State | null }) {
  if (!state) return null;
  if (!state.effect) {
    return (
      <div class="nni-effect nni-faint" data-testid={ids.noEffect}>
        {state.no_effect || "No effect measured yet."}
      </div>
    );
  }
  const { effect } = state;
  const metrics = [...new Set([...Object.keys(effect.clean), ...Object.keys(effect.perturbed)])];
  return (
    <div class="nni-effect" data-testid={ids.effect}>
      <table>
        <thead>
          <tr>
            <th scope="col">
              <b>Effect</b>
              {effect.source && ` on ${effect.source}`}
            </th>
            <th scope="col">clean</th>
            <th scope="col">perturbed</th>
            <th scope="col">change</th>
          </tr>
        </thead>
        <tbody>
          {metrics.map((metric) => (
            <Row key={metric} metric={metric} effect={effect} />
          ))}
          {effect.output_change !== null && (
            <tr>
              <th scope="row">output</th>
              <td colSpan={3} data-testid={ids.outputChange} data-value={exact(effect.output_change)}>
                {effect.output_change === 0 ? (
                  <span class="nni-no-change">no change</span>
                ) : (
                  <>
                    changed by <span class="nni-change">{percent(effect.output_change)}</span>
                  </>
                )}
              </td>
            </tr>
          )}
        </tbody>
      </table>
    </div>
  );
}

function Row({ metric, effect }: { metric: string; effect: Effect }) {
  const clean = effect.clean[metric] ?? null;
  const perturbed = effect.perturbed[metric] ?? null;
  return (
    <tr>
      <th scope="row">{metric}</th>
      <td data-testid={ids.effectValue(metric, "clean")} data-value={exact(clean)}>
        {real(clean)}
      </td>
      <td data-testid={ids.effectValue(metric, "perturbed")} data-value={exact(perturbed)}>
        {real(perturbed)}
      </td>
      <Change by={clean === null || perturbed === null ? null : perturbed - clean} />
    </tr>
  );
}

function Change({ by }: { by: number | null }) {
  if (by === null) return <td class="nni-no-change">{NOT_MEASURED}</td>;
  if (by === 0) return <td class="nni-no-change">no change</td>;
  return <td class="nni-change">{signed(by)}</td>;
}
