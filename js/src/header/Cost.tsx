// The cost of inspection, even when it is high, in the menu of the top line.
import type { Cost as Costs } from "../kernel/protocol";
import { NOT_MEASURED, bytes, count, seconds } from "../ui/format";

export function Cost({ cost }: { cost: Costs }) {
  const { plain_seconds: plain, inspected_seconds: inspected } = cost;
  const waits = [
    ["the tree", cost.tree_seconds],
    ["a pass of insp.run or insp.step", cost.pass_seconds],
    ["a measured step of a loop", cost.step_seconds],
  ] as const;
  const ratio = plain && inspected ? `${(inspected / plain).toFixed(2)}×` : NOT_MEASURED;
  return (
    <dl class="nni-cost" data-testid="nni-cost" aria-label="Cost of inspection">
      {waits.map(([what, time]) => (
        <Item key={what} name={`waited for ${what}`} value={seconds(time)} hint="Until the first was ready, with its compilation" />
      ))}
      <Item name="measured step" value={ratio} hint={stepHint(plain, inspected)} />
      {cost.tracker_seconds !== null && (
        <Item
          name="tracker"
          value={seconds(cost.tracker_seconds)}
          hint="CPU time that a thread takes to write a pass, and the metrics and findings beside it, to the tracker of insp.watch(to=...): the mean so far"
        />
      )}
      <Item
        name="compiled"
        value={count(cost.compilations)}
        hint="Programs that JAX has compiled in this kernel since the inspector was made, including those of your own code. Switching or tuning a perturbation adds none."
        exactly={["nni-compilations", cost.compilations]}
      />
      <Item name="sent" value={bytes(cost.bytes_sent)} hint={`${count(cost.bytes_sent)} bytes sent from the kernel to this page so far`} />
      <Item
        name="dropped"
        value={count(cost.frames_dropped)}
        hint="Measured steps that were recorded but not drawn, because the page was still drawing or had drawn one within 1/30 s. The newest step is always drawn."
      />
      {cost.errors > 0 && <Item name="errors" value={count(cost.errors)} hint="Errors of the inspection; your own step went on" bad />}
    </dl>
  );
}

function stepHint(plain: number | null, inspected: number | null): string {
  if (inspected === null) return "The time of a measured step, compared with a plain step of the same kind: not known yet";
  const what = `A measured step takes ${seconds(inspected)}`;
  if (plain === null) return `${what}. There is no plain step to compare with: watch(every=10) leaves most steps unmeasured.`;
  return `${what}, a plain step ${seconds(plain)}: medians of the last 64 times of each, all perturbed or none, without steps that compile. A step is timed from the end of one on the device to that of another, and a plain step is the average of those between two measured ones. A measured step is recorded and drawn while the steps after it run, which slows them on a machine with few cores.`;
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
