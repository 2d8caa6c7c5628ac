// The panel "Words": the text of one example, coloured by a figure of the selected site.
// Invariant: it asks the kernel when it is first shown and when its figures may have changed; during
// a loop only when the user asks for another site, example or unit.
import { useEffect, useMemo } from "preact/hooks";
import { Examples } from "../inputs/Examples";
import { visibleText } from "../inputs/state";
import type { Site } from "../kernel/protocol";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { real } from "../ui/format";
import { NumberInput } from "../ui/NumberInput";
import { Select } from "../ui/Select";
import { colourRange } from "../values/cells";
import { ColourBar } from "../values/Legend";
import type { PositionStatistic, PositionsData } from "./state";
import { WordStrip } from "./WordStrip";

const FIGURE_NAMES: Readonly<Record<PositionStatistic, string>> = {
  norm: "norm",
  unit: "one unit",
  gradient: "gradient",
  gradient_times_activation: "gradient × value",
};

const FIGURE_MEANINGS: Readonly<Record<PositionStatistic, string>> = {
  norm: "The norm over the units at each position.",
  unit: "The value of one unit at each position.",
  gradient: "The norm of the gradient of the loss at each position.",
  gradient_times_activation: "The gradient times the value, added up over the units: what the loss owes to each position.",
};

const NO_VALUES = new Float64Array();

export function WordsOptions({ store }: { store: Store }) {
  const state = store.words;
  const [data, figure, unit] = [state.data.value, state.figure.value, state.unit.value];
  const options = [...(data?.figures.keys() ?? (["norm"] as const))] as PositionStatistic[];
  const axes = data?.header.axes ?? [];
  const able = axes.filter((name) => name !== "");
  return (
    <>
      <Select label="Colour of the words" value={figure} options={options.includes(figure) ? options : [figure]} word={(one) => FIGURE_NAMES[one]} choose={(one) => (state.figure.value = one)} />
      {figure === "unit" && data && (
        <label title={`unit, of ${data.header.units}`}>
          <NumberInput
            class="nni-study-number"
            aria-label={`unit, of ${data.header.units}`}
            min={0}
            max={data.header.units - 1}
            value={unit}
            change={(unit) => state.setUnit(unit)}
          />
        </label>
      )}
      {data && store.replayNote.value === "" && able.length > (data.header.along === null ? 0 : 1) && (
        <Select
          label="Tokens along"
          testid="nni-words-axis"
          value={axes[data.header.along ?? -1] ?? ""}
          options={data.header.along === null ? ["", ...able] : able}
          word={(name) => name || "tokens along …"}
          choose={(name) => name !== "" && state.setAxis(axes.indexOf(name))}
        />
      )}
    </>
  );
}

export function WordsPanel({ store, site }: { store: Store; site: Site }) {
  const { words: state, inputs } = store;
  const batch = inputs.inputs.value;
  const example = Math.min(inputs.example.value, Math.max((batch?.examples.length ?? 1) - 1, 0));
  const running = store.progress.value?.running ?? false;
  const seq = running ? -1 : (store.frame.value?.header.seq ?? 0);
  useEffect(() => state.show(site.key, example), [site.key, example, seq, batch]);

  const [data, figure, unit, at] = [state.data.value, state.figure.value, state.unit.value, state.at.value];
  const values = data?.figures.get(figure) ?? null;
  const hue = figure.startsWith("gradient") ? "orange" : "blue";
  const range = useMemo(() => ({ ...colourRange({ mean: values ?? NO_VALUES, low: null, high: null }, false), hue }) as const, [values, hue]);
  const words = inputs.words(example);
  const along = data && data.header.axis !== null ? `, axis=${data.header.axis}` : "";
  const code = `insp.words(${quoted(site.key)}${example > 0 ? `, ${example}` : ""}${unit > 0 ? `, unit=${unit}` : ""}${along})`;
  return (
    <section class="nni-words-panel" aria-label="Words">
      {state.problem.value !== "" && (
        <p class="nni-unseen" role="status" data-testid="nni-words-problem">
          {state.problem.value}
        </p>
      )}
      <WordStrip
        words={words}
        values={values}
        range={range}
        at={at}
        point={(to) => (state.at.value = to)}
        label={`The ${words.length} words of example ${example}, coloured by ${FIGURE_NAMES[figure]}. Arrows go along them.`}
      />
      <p class="nni-under-pointer" aria-live="polite" data-testid="nni-word-pointed" data-value={at ?? ""}>
        {at === null || at >= words.length ? <span class="nni-faint">Point at a word, or move with the arrow keys</span> : <UnderPointer data={data} word={words[at]!} at={at} />}
      </p>
      <div class="nni-legend">{values ? <ColourBar range={range} /> : null}</div>
      <Examples store={store} />
      {batch && batch.positions > words.length && <p class="nni-faint nni-small">The first {words.length} of {batch.positions} words.</p>}
      <p class="nni-faint nni-small nni-words-source">{data && values ? `${FIGURE_MEANINGS[figure]} ${data.header.source}` : state.busy.value ? "Computing this module's values…" : ""}</p>
      <PythonLine text={code} testid="nni-words-python" line={store.inputs.line} />
    </section>
  );
}

function UnderPointer({ data, word, at }: { data: PositionsData | null; word: string; at: number }) {
  const figures = [...(data?.figures ?? [])].map(([name, of]) => `${name === "unit" ? `unit ${data!.header.unit}` : FIGURE_NAMES[name]} ${real(of[at])}`);
  return (
    <>
      {at} <bdi class="nni-word">{visibleText(word)}</bdi> {figures.join(" · ")}
    </>
  );
}
