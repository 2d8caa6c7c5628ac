// The cost of inspection, always in the corner, even when it is high.
import type { Cost } from "../kernel/protocol";
import { NOT_MEASURED, bytes, count, seconds } from "../ui/format";
import { ids } from "../ui/testids";

export function CostCorner({ cost }: { cost: Cost }) {
  const { plain_seconds: plain, inspected_seconds: inspected } = cost;
  const ratio = plain && inspected ? `${(inspected / plain).toFixed(2)}×` : NOT_MEASURED;
  return (
    <dl class="nni-cost" data-testid={ids.cost} aria-label="Cost of inspection">
      <Item name="measured step" value={ratio} hint={stepHint(plain, inspected)} />
      <Item
        name="compiled"
        value={count(cost.compilations)}
        hint="Programs that JAX compiled in this kernel since the inspector was made, those of your own code included. Switching or tuning a perturbation adds none."
        exactly={[ids.compilations, cost.compilations]}
      />
      <Item name="sent" value={bytes(cost.bytes_sent)} hint={`${count(cost.bytes_sent)} bytes sent from the kernel to this page so far`} />
      <Item
        name="dropped"
        value={count(cost.frames_dropped)}
        hint="Measured steps that were recorded but not drawn, because the page was still drawing or had had one within 1/30 s. It always gets the newest."
      />
      {cost.errors > 0 && <Item name="errors" value={count(cost.errors)} hint="Failures while inspecting; your step went on" bad />}
    </dl>
  );
}

function stepHint(plain: number | null, inspected: number | null): string {
  if (inspected === null) return "How long a step that is measured takes beside one that is not and is like it: not known yet";
  const what = `A step that is measured takes ${seconds(inspected)}`;
  if (plain === null) return `${what}. There is none to compare with: watch(every=10) leaves some alone.`;
  return `${what}, one that is not ${seconds(plain)}: medians of the last 64 of each, all perturbed alike, without steps that compile. A measured step waits for the steps before it: in a loop that does not, it is charged with theirs.`;
}

interface ItemProps {
  name: string;
  value: string;
  hint: string;
  bad?: boolean;
  exactly?: [testid: string, value: number];
}

function Item({ name, value, hint, bad, exactly }: ItemProps) {
  return (
    <div title={hint} aria-description={hint} class={bad ? "nni-bad" : undefined}>
      <dt>{name}</dt>
      <dd data-testid={exactly?.[0]} data-value={exactly?.[1]}>
        {value}
      </dd>
    </div>
  );
}
