// The panel "Distributions": a card for the activations, the gradient and a parameter of the selected
// site, and the figures of all of them. Invariant: the key above the cards says what the filled and the
// dashed histograms are, and is there as long as something is compared.
import { useCallback, useState } from "preact/hooks";
import { AXIS_SCALES } from "../charts/axis";
import { Waiting } from "../header/Waiting";
import { Examples } from "../inputs/Examples";
import { rowStatistic } from "../kernel/decode";
import type { Site } from "../kernel/protocol";
import { isGroup } from "../kernel/sites";
import type { Store } from "../store";
import { pinnedName } from "../time/passNames";
import { count } from "../ui/format";
import { Menu } from "../ui/Menu";
import { ButtonGroup } from "../ui/ButtonGroup";
import { Select } from "../ui/Select";
import { Card, type Distribution } from "./Card";
import { useDistributions, useParameters } from "./siteData";
import { UpdateRatio } from "./UpdateRatio";
import { StatisticsTable } from "./StatisticsTable";
import { useStepAxis } from "./stepAxis";

interface Props {
  readonly store: Store;
  readonly site: Site;
  readonly index: number;
}

export function DistributionsOptions({ store }: Props) {
  return (
    <>
      <Select label="Axis of values" value={store.axis.value} options={AXIS_SCALES} choose={(axis) => (store.axis.value = axis)} word={(axis) => `${axis} axis`} />
      <Menu label="More about the distributions">
        <span class="nni-menu-line">
          over the steps
          <ButtonGroup label="Kind of chart over the steps" value={store.historyChart.value} options={["bands", "heatmap"]} choose={(kind) => (store.historyChart.value = kind)} />
        </span>
      </Menu>
    </>
  );
}

export function Distributions({ store, site, index }: Props) {
  const frame = store.frame.value;
  const steps = useStepAxis(store);
  const hold = useCallback((step: number) => store.timeline.goToStep(step), [store]);
  const sent = useDistributions(store, index);
  const parameters = useParameters(store, site, index);
  const [choice, choose] = useState("");
  const chosen = parameters.find((one) => one.name === choice) ?? parameters[0];
  const axis = store.axis.value;
  const pinned = pinnedName(store);
  const before = pinned ? `◇ ${pinned}` : store.comparison.value ? "unperturbed" : "";
  const heatmap = store.historyChart.value === "heatmap";
  const over = (one: Distribution) => ({
    heatmap,
    steps,
    hold,
    nothing: one.history ? "No finite value in any step." : <Waiting store={store} before="No steps recorded yet" />,
  });
  if (isGroup(site)) return <p class="nni-faint nni-small nni-notes">It has no values of its own. Open its row, and select an array of it.</p>;
  return (
    <section class="nni-dist" aria-label="Distributions">
      {(pinned || store.perturbations.value.length > 0) && <HistogramKey store={store} pinned={pinned} />}
      <div class="nni-cards" style={{ "--cards": chosen ? (chosen.gradient ? 4 : 3) : 2 }}>
        {sent.map((one) => (
          <Card key={one.name} distribution={one} axis={axis} site={site.key} chart={over(one)} placeholder={(came) => (frame ? placeholderText(one, came, store.pendingNote.value) : <Waiting store={store} before="No pass yet" />)} />
        ))}
        {chosen && (
          <Card
            key="weight"
            distribution={chosen.value}
            as="weight"
            axis={axis}
            site={site.key}
            chart={chosen.value.history && over(chosen.value)}
            placeholder={() => "No finite value."}
            choice={parameters.length > 1 && <Select path label="Parameter" testid="nni-parameter-choice" value={chosen.name} options={parameters.map((one) => one.name)} choose={choose} />}
          />
        )}
        {chosen?.gradient && (
          <Card key="weight-gradient" distribution={chosen.gradient} as="weight-gradient" axis={axis} site={site.key} chart={chosen.gradient.history && over(chosen.gradient)} placeholder={() => "No finite value."} />
        )}
      </div>
      <UpdateRatio store={store} site={site} index={index} steps={steps} hold={hold} />
      <StatisticsTable head={frame ? `step ${count(frame.header.step)}` : ""} rows={[...sent, ...parameters.flatMap((one) => (one.gradient ? [one.value, one.gradient] : [one.value]))]} before={before} />
      <Notes store={store} site={site} index={index} sent={sent} weights={parameters.length > 0} />
      {store.replayNote.value !== "" && <Examples store={store} />}
    </section>
  );
}

/** What the filled and the dashed histograms are. */
function HistogramKey({ store, pinned }: { store: Store; pinned: string }) {
  const frame = store.frame.value?.header;
  const held = store.timeline.held.value !== null && !store.isSaved.value;
  const behind = pinned ? <b>◇ {pinned}</b> : store.comparison.value ? <b>the same pass unperturbed</b> : null;
  return (
    <p class="nni-key">
      <span>
        <i class="nni-key-shown" />
        <b>{frame ? `step ${count(frame.step)}` : "no pass yet"}</b>
        {frame?.perturbed ? ", perturbed" : ""}
        {held ? ", held" : ""}
      </span>
      {behind ? (
        <span>
          <i class="nni-key-reference" />
          {behind}
          {pinned && ", pinned"}
        </span>
      ) : (
        frame?.perturbed && <span class="nni-faint">Only the last insp.run or insp.step has an unperturbed pass beside it.</span>
      )}
    </p>
  );
}

const notMeasuredText = (of: Distribution): string => `No ${of.title} ${of.title === "activations" ? "were" : "was"} measured here`;

function placeholderText(of: Distribution, sent: boolean, waits: string): string {
  if (!of.statistics || Number.isNaN(of.statistics("size"))) return `${notMeasuredText(of)}.`;
  return sent ? "No finite value." : waits ? waits.replace("acts", "Comes") + "." : "Comes with the next frame.";
}

/** What the figures leave out, and why something is not there. */
function Notes({ store, site, index, sent, weights }: Props & { sent: readonly Distribution[]; weights: boolean }) {
  const more = store.frame.value?.header.more ?? 0;
  const came = sent.some((one) => one.pairs);
  const frame = store.frame.value;
  const unseen = weights && frame?.parameters.some((one) => one.measured[1]) && Number.isNaN(rowStatistic(frame, index, "update_ratio"));
  const missing = sent.filter((one) => one.statistics && Number.isNaN(one.statistics("size")));
  const lines = [
    missing.length === sent.length ? "Nothing was measured here in this pass." : missing.map((one) => `${notMeasuredText(one)} in this pass.`).join(" "),
    came && !weights && site.parameters > 0 && !site.single ? "This pass measured no parameter of this module itself. Select a module inside it to see the parameters there." : "",
    unseen ? "No update was seen in this pass. It is measured if the jitted function that computes the gradient also updates the parameters." : "",
    more > 0 ? `${count(more)} more parameters of this module are left out.` : "",
  ];
  return <p class="nni-faint nni-small nni-notes">{lines.filter(Boolean).join(" ")}</p>;
}
