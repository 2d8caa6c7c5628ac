// What inspection costs, always in the corner: honest also when it is a lot.
import type { Cost } from "../protocol";
import { bytes, count, seconds } from "../format";
import { ids } from "../testids";

export function CostCorner({ cost }: { cost: Cost }) {
  const { plain_seconds: plain, inspected_seconds: inspected } = cost;
  const ratio = plain && inspected ? `${(inspected / plain).toFixed(2)}×` : "–";
  return (
    <dl class="nni-cost" data-testid={ids.cost} aria-label="Cost of inspection">
      <Item name="step" value={ratio} hint={`A step takes ${seconds(inspected)} inspected, ${seconds(plain)} plain (medians)`} />
      <Item name="compiled" value={count(cost.compilations)} hint="Compilations so far; switching a perturbation adds none" exactly={[ids.compilations, cost.compilations]} />
      <Item name="sent" value={bytes(cost.bytes_sent)} hint="Sent from the kernel to this page" />
      <Item name="dropped" value={count(cost.frames_dropped)} hint="Frames left out because the page was still drawing" />
      {cost.errors > 0 && <Item name="errors" value={count(cost.errors)} hint="Failures while inspecting; your step went on" bad />}
    </dl>
  );
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
    <div title={hint} class={bad ? "nni-bad" : undefined}>
      <dt>{name}</dt>
      <dd data-testid={exactly?.[0]} data-value={exactly?.[1]}>
        {value}
      </dd>
    </div>
  );
}
