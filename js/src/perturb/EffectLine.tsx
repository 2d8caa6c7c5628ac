// The effect of all perturbations in one line: "loss 0.21 → 2.72". Invariants: its name comes from the
// State of the same message, not from later requests; what does not fit drops as a whole, from the right;
// an effect that is older than a change is faint until the new one is there.
import type { State } from "../kernel/protocol";
import type { Store } from "../store";
import { NOT_MEASURED, exact, percent, decimal, real } from "../ui/format";
import { effectOwner } from "./EffectTable";

export function EffectLine({ state, store }: { state: State; store: Store }) {
  const { effect } = state;
  if (!effect) {
    const text = store.hasPendingChange.value ? "The effect of this change is not here yet." : state.no_effect || "No effect measured yet.";
    return (
      <span class="nni-effect-items nni-faint" title={text} data-testid="nni-no-effect">
        {text}
      </span>
    );
  }
  const metrics = [...new Set([...Object.keys(effect.clean), ...Object.keys(effect.perturbed)])];
  const caption = `Effect${effectOwner(state)}${effect.source && ` on ${effect.source}`}${store.hasPendingChange.value ? ", before this change" : ""}`;
  return (
    <span class={store.hasPendingChange.value ? "nni-effect-items nni-outdated" : "nni-effect-items"} role="group" aria-label="Effect" title={caption} data-testid="nni-effect">
      {metrics.map((metric) => {
        const [clean, perturbed] = [effect.clean[metric] ?? null, effect.perturbed[metric] ?? null];
        const same = clean !== null && clean === perturbed;
        return (
          <span key={metric}>
            {metric}{" "}
            <span class="nni-faint" data-testid={`nni-effect-${metric}-clean`} data-value={exact(clean)}>
              {metricText(clean)} →
            </span>{" "}
            <b class={same ? "nni-faint" : "nni-change"} data-testid={`nni-effect-${metric}-perturbed`} data-value={exact(perturbed)}>
              {metricText(perturbed)}
            </b>
          </span>
        );
      })}
      <Figure name="top-1 changed" value={effect.top1_changed} testid="nni-top1" show={percent} />
      <Figure name="KL" value={effect.kl} testid="nni-kl" show={real} />
      <Figure name="output moved" value={effect.output_change} testid="nni-output-change" show={percent} />
      <span class="nni-faint">{caption}</span>
    </span>
  );
}

const metricText = (value: number | null): string => (value === null ? NOT_MEASURED : decimal(value, 4));

function Figure({ name, value, testid, show }: { name: string; value: number | null; testid: string; show: (value: number) => string }) {
  if (value === null) return null;
  return (
    <span>
      {name}{" "}
      <b class={value === 0 ? "nni-faint" : "nni-change"} data-testid={testid} data-value={exact(value)}>
        {show(value)}
      </b>
    </span>
  );
}
