// The panel "Distributions": a card for the activations, the gradient and a parameter of the selected
// site, and the figures of all of them. Invariant: the key above the cards says what the filled and the
// dashed histograms are, and is there as long as something is compared.
import { useCallback, useState } from "preact/hooks";
import { AXES } from "../charts/axis";
import { Waiting } from "../header/Waiting";
import { Examples } from "../inputs/Examples";
import { rowFigure } from "../kernel/decode";
import type { Site } from "../kernel/protocol";
import { isGroup } from "../kernel/sites";
import type { Store } from "../store";
import { pinnedName } from "../time/names";
import { count } from "../ui/format";
import { More } from "../ui/More";
import { Choice } from "../ui/Choice";
import { Pick } from "../ui/Pick";
import { ids } from "../ui/testids";
import { Card, type Distribution } from "./Card";
import { useMeasured, useParameters } from "./measured";
import { Ratio } from "./Ratio";
import { Numbers } from "./Numbers";
import { useSteps } from "./steps";

interface Props {
  readonly store: Store;
  readonly site: Site;
  readonly index: number;
}

export function DistributionsOptions({ store }: Props) {
  return (
    <>
      <Pick label="Axis of values" value={store.axis.value} options={AXES} choose={(axis) => (store.axis.value = axis)} word={(axis) => `${axis} axis`} />
      <More label="More about the distributions">
        <span class="nni-more-line">
          over the steps
          <Choice label="Kind of chart over the steps" value={store.overSteps.value} options={["bands", "heatmap"]} choose={(kind) => (store.overSteps.value = kind)} />
        </span>
      </More>
    </>
  );
}

export function Distributions({ store, site, index }: Props) {
  const frame = store.frame.value;
  const steps = useSteps(store);
  const hold = useCallback((step: number) => store.timeline.goToStep(step), [store]);
  const sent = useMeasured(store, index);
  const parameters = useParameters(store, site, index);
  const [choice, choose] = useState("");
  const chosen = parameters.find((one) => one.name === choice) ?? parameters[0];
  const axis = store.axis.value;
  const pinned = pinnedName(store);
  const before = pinned ? `◇ ${pinned}` : store.behind.value ? "unperturbed" : "";
  const heatmap = store.overSteps.value === "heatmap";
  const over = (one: Distribution) => ({
    heatmap,
    steps,
    hold,
    nothing: one.history ? "No finite value in any step." : <Waiting store={store} before="No steps recorded yet" />,
  });
  if (isGroup(site)) return <p class="nni-faint nni-small nni-notes">It has no values of its own. Open its row, and select an array of it.</p>;
  return (
    <section class="nni-dist" aria-label="Distributions">
      {(pinned || store.perturbations.value.length > 0) && <Key store={store} pinned={pinned} />}
      <div class="nni-cards" style={{ "--cards": chosen ? (chosen.gradient ? 4 : 3) : 2 }}>
        {sent.map((one) => (
          <Card key={one.name} of={one} axis={axis} site={site.key} over={over(one)} nothing={(came) => (frame ? reason(one, came, store.waits.value) : <Waiting store={store} before="No pass yet" />)} />
        ))}
        {chosen && (
          <Card
            key="weight"
            of={chosen.value}
            as="weight"
            axis={axis}
            site={site.key}
            over={chosen.value.history && over(chosen.value)}
            nothing={() => "No finite value."}
            choice={parameters.length > 1 && <Pick path label="Parameter" testid={ids.parameterChoice} value={chosen.name} options={parameters.map((one) => one.name)} choose={choose} />}
          />
        )}
        {chosen?.gradient && (
          <Card key="weight-gradient" of={chosen.gradient} as="weight-gradient" axis={axis} site={site.key} over={chosen.gradient.history && over(chosen.gradient)} nothing={() => "No finite value."} />
        )}
      </div>
      <Ratio store={store} site={site} index={index} steps={steps} hold={hold} />
      <Numbers head={frame ? `step ${count(frame.header.step)}` : ""} rows={[...sent, ...parameters.flatMap((one) => (one.gradient ? [one.value, one.gradient] : [one.value]))]} before={before} />
      <Notes store={store} site={site} index={index} sent={sent} weights={parameters.length > 0} />
      {store.replay.value !== "" && <Examples store={store} />}
    </section>
  );
}

/** What the filled and the dashed histograms are. */
function Key({ store, pinned }: { store: Store; pinned: string }) {
  const frame = store.frame.value?.header;
  const held = store.timeline.held.value !== null && !store.saved.value;
  const behind = pinned ? <b>◇ {pinned}</b> : store.behind.value ? <b>the same pass unperturbed</b> : null;
  return (
    <p class="nni-key">
      <span>
        <i class="nni-key-now" />
        <b>{frame ? `step ${count(frame.step)}` : "no pass yet"}</b>
        {frame?.perturbed ? ", perturbed" : ""}
        {held ? ", held" : ""}
      </span>
      {behind ? (
        <span>
          <i class="nni-key-before" />
          {behind}
          {pinned && ", pinned"}
        </span>
      ) : (
        frame?.perturbed && <span class="nni-faint">Only the last insp.run or insp.step has an unperturbed pass beside it.</span>
      )}
    </p>
  );
}

const none = (of: Distribution): string => `No ${of.title} ${of.title === "activations" ? "were" : "was"} measured here`;

function reason(of: Distribution, sent: boolean, waits: string): string {
  if (!of.figures || Number.isNaN(of.figures("size"))) return `${none(of)}.`;
  return sent ? "No finite value." : waits ? waits.replace("acts", "Comes") + "." : "Comes with the next frame.";
}

/** What the figures leave out, and why something is not there. */
function Notes({ store, site, index, sent, weights }: Props & { sent: readonly Distribution[]; weights: boolean }) {
  const more = store.frame.value?.header.more ?? 0;
  const came = sent.some((one) => one.pairs);
  const frame = store.frame.value;
  const unseen = weights && frame?.parameters.some((one) => one.measured[1]) && Number.isNaN(rowFigure(frame, index, "update_ratio"));
  const missing = sent.filter((one) => one.figures && Number.isNaN(one.figures("size")));
  const lines = [
    missing.length === sent.length ? "Nothing was measured here in this pass." : missing.map((one) => `${none(one)} in this pass.`).join(" "),
    came && !weights && site.parameters > 0 && !site.single ? "This pass measured no parameter of this module itself. Select a module inside it to see the parameters there." : "",
    unseen ? "No update was seen in this pass. It is measured if the jitted function that computes the gradient also updates the parameters." : "",
    more > 0 ? `${count(more)} more parameters of this module are left out.` : "",
  ];
  return <p class="nni-faint nni-small nni-notes">{lines.filter(Boolean).join(" ")}</p>;
}
