// The effect of all perturbations in one line: "loss 0.21 → 2.72". Invariants: its name comes from the
// State of the same message, not from later requests; what does not fit drops as a whole, from the right;
// an effect that is older than a change is faint until the new one is there.
import type { State } from "../kernel/protocol";
import type { Store } from "../store";
import { NOT_MEASURED, exact, percent, plain, real } from "../ui/format";
import { ids } from "../ui/testids";
import { ofWhat } from "./EffectView";

export function EffectLine({ state, store }: { state: State; store: Store }) {
  const { effect } = state;
  if (!effect) {
    const text = store.wished.value ? "The effect of this change is not here yet." : state.no_effect || "No effect measured yet.";
    return (
      <span class="nni-effect-items nni-faint" title={text} data-testid={ids.noEffect}>
        {text}
      </span>
    );
  }
  const metrics = [...new Set([...Object.keys(effect.clean), ...Object.keys(effect.perturbed)])];
  const caption = `Effect${ofWhat(state)}${effect.source && ` on ${effect.source}`}${store.wished.value ? ", before this change" : ""}`;
  return (
    <span class={store.wished.value ? "nni-effect-items nni-before" : "nni-effect-items"} role="group" aria-label="Effect" title={caption} data-testid={ids.effect}>
      {metrics.map((metric) => {
        const [clean, perturbed] = [effect.clean[metric] ?? null, effect.perturbed[metric] ?? null];
        const same = clean !== null && clean === perturbed;
        return (
          <span key={metric}>
            {metric}{" "}
            <span class="nni-faint" data-testid={ids.effectValue(metric, "clean")} data-value={exact(clean)}>
              {shown(clean)} →
            </span>{" "}
            <b class={same ? "nni-faint" : "nni-change"} data-testid={ids.effectValue(metric, "perturbed")} data-value={exact(perturbed)}>
              {shown(perturbed)}
            </b>
          </span>
        );
      })}
      <Figure name="top-1 changed" value={effect.top1_changed} testid={ids.top1} show={percent} />
      <Figure name="KL" value={effect.kl} testid={ids.kl} show={real} />
      <Figure name="output moved" value={effect.output_change} testid={ids.outputChange} show={percent} />
      <span class="nni-faint">{caption}</span>
    </span>
  );
}

const shown = (value: number | null): string => (value === null ? NOT_MEASURED : plain(value, 4));

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
