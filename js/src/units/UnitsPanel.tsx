// The units of the selected site's output: a strip of them, a count of dead ones, and the mask that
// switches some of them off. Invariant: units are switched only after "Edit mask" was pressed,
// because a training may be running.
import type { UnitStatistic, UnitsData } from "../kernel/decode";
import { toPatchGrid, thumbnail } from "../inputs/pictures";
import { useSiteQuery } from "../kernel/queries";
import { MaskBar } from "../masks/MaskBar";
import type { Site } from "../kernel/protocol";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { ButtonGroup } from "../ui/ButtonGroup";
import { count, percent, real } from "../ui/format";
import { Select } from "../ui/Select";
import { ColourBar } from "../values/Legend";
import { defaultAxis, isDead, unitRange } from "./cells";
import { UnitStrip } from "./UnitStrip";

const UNIT_STATISTICS = { mean: "mean", std: "std", zeros: "zero_fraction" } as const;
type StatisticName = keyof typeof UNIT_STATISTICS;
const ACTIVATION_NAMES: Readonly<Record<string, string>> = { relu: "ReLU", gelu: "GELU", silu: "SiLU" };

/** The axis along which the units of a site are shown. */
function unitAxis(store: Store, site: Site): number {
  const chosen = store.unitsAxis.value;
  return store.replayNote.value !== "" ? -1 : chosen.site === site.key ? chosen.axis : defaultAxis(site);
}

export function UnitsOptions({ store, site }: { store: Store; site: Site }) {
  const seen = store.queries.units.value;
  const axes = seen?.site === site.key ? (seen.data?.header.axes ?? []) : [];
  return (
    <>
      {store.replayNote.value === "" && axes.length > 1 && (
        <Select
          label="The axis of the units"
          value={String(unitAxis(store, site))}
          options={axes.map((_, i) => String(i - axes.length))}
          word={(axis) => axes.at(Number(axis)) ?? axis}
          choose={(axis) => (store.unitsAxis.value = { site: site.key, axis: Number(axis) })}
        />
      )}
      <ButtonGroup label="Figure of each unit" value={store.unitFigure.value as StatisticName} options={Object.keys(UNIT_STATISTICS) as StatisticName[]} choose={(word) => (store.unitFigure.value = word)} />
    </>
  );
}

export function UnitsPanel({ store, site }: { store: Store; site: Site }) {
  // a held frame stays while the perturbations change
  const on = (store.state.value?.perturbations ?? []).map((p) => `${p.id} ${p.enabled} ${p.expression}`);
  const live = store.replayNote.value === "";
  const axis = unitAxis(store, site);
  useSiteQuery(store.queries, "units", site.key, [store.frame.value?.header.seq, ...on].join("\n"), axis);
  const seen = store.queries.units.value;
  const here = seen?.site === site.key && (seen.data === null || seen.data.header.axis === axis || seen.error) ? seen : null;
  const data = here?.data ?? null;
  const figure = store.unitFigure.value as StatisticName;
  const editable = site.perturbable && live;
  const editing = store.editingMask.value && editable;
  const units = data?.header.units ?? 0;
  const axes = seen?.site === site.key ? (seen.data?.header.axes ?? []) : [];
  const over = { site: site.key, units, axis, columns: 0 };
  const mask = store.masks.maskOf(over);
  const change = (next: Uint8Array): void => store.masks.set(over, next);
  const pictures = store.inputs.inputs.value?.pictures;
  const patches = /^(position|query|key)/.test(axes.at(axis) ?? "") ? toPatchGrid(pictures, units) : null;
  const below = patches && thumbnail(pictures, store.inputs.example.value);
  const picture = patches && below ? { of: below, patches } : null;
  return (
    <section aria-label="Units">
      {here?.error ? <p class="nni-bad nni-small">{here.error}</p> : null}
      {!data ? (
        <div class="nni-nothing">{here?.error ? "No units to show." : "Measuring, in a pass of its own …"}</div>
      ) : (
        <>
          <StripLegend data={data} figure={UNIT_STATISTICS[figure]} />
          <UnitStrip data={data} figure={UNIT_STATISTICS[figure]} mask={mask} editing={editing} change={change} words={store.inputs.axisWords(axes.at(axis))} picture={picture} />
          <div class="nni-units-foot">
            <DeadCount store={store} mask={mask} />
            <MaskBar mask={mask} what="units" editing={editable ? store.editingMask : null} change={change} />
            <span class="nni-grow" />
            <PythonLine text={`insp.units(${quoted(site.key)}${axis === -1 ? "" : `, axis=${axis}`})`} />
          </div>
          <p class="nni-faint nni-small">
            {count(units + data.header.more)} units of {count(data.header.each)} values each{batchText(axes, axis)}, {data.header.source}
          </p>
          <p class="nni-faint nni-small">
            Crossed out: dead ({data.header.behind ? `off behind the ${ACTIVATION_NAMES[data.header.behind] ?? data.header.behind}` : "never anything but 0"}). Corner: has NaN or Inf.{data.header.more > 0 && ` ${count(data.header.more)} more units are left out.`}
          </p>
        </>
      )}
    </section>
  );
}

/** That the units are measured over all examples, whichever one is chosen; "" along the axis of the examples. */
function batchText(axes: readonly string[], axis: number): string {
  const batch = axes.findIndex((name, i) => name.startsWith("batch (") && i !== axes.length + axis);
  return batch < 0 ? "" : ` over all examples, ${axes[batch]!}`;
}

/** The legend of the strip's colours: as in the panel "Values", grey below 0 and blue above. */
function StripLegend({ data, figure }: { data: UnitsData; figure: UnitStatistic }) {
  const range = unitRange(data.figures[figure], figure);
  return (
    <div class="nni-legend">
      <ColourBar range={range} show={figure === "zero_fraction" ? percent : real} />
      <span class="nni-faint">
        {figure === "mean" && (range.signed ? "Grey is below 0, blue above." : "None is below 0.")}
        {figure === "zero_fraction" && "The share of its values that are exactly 0."}
      </span>
    </div>
  );
}

function DeadCount({ store, mask }: { store: Store; mask: Uint8Array }) {
  const data = store.queries.units.value?.data;
  if (!data) return null;
  const behind = ACTIVATION_NAMES[data.header.behind];
  let [dead, bad] = [0, 0];
  for (let unit = 0; unit < data.header.units; unit++) {
    if (isDead(data, unit) && mask[unit]) dead += 1;
    if (data.figures.nonfinite[unit] > 0) bad += 1;
  }
  return (
    <>
      <span class={dead > 0 ? "nni-change" : "nni-faint"} data-testid="nni-dead-units" data-value={dead}>
        {dead === 0 ? "No dead unit" : `${count(dead)} of ${count(data.header.units)} dead`}{behind && dead > 0 ? ` behind the ${behind}` : ""}
      </span>
      {bad > 0 && <span class="nni-bad">{count(bad)} with NaN or Inf</span>}
    </>
  );
}
