// The panel "Attribution": how much each token or pixel of the input counts for an output.
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { Examples } from "../inputs/Examples";
import { visibleText } from "../inputs/state";
import type { Attributed, Study } from "../kernel/protocol";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { exact, real } from "../ui/format";
import { Menu } from "../ui/Menu";
import { Select } from "../ui/Select";
import { BesideInput } from "../values/Tiles";
import { cellAt, colourRange } from "../values/cells";
import { ColourBar, Legend, RangeChoice } from "../values/Legend";
import { Picture } from "../values/Picture";
import { WordStrip } from "../words/WordStrip";
import { StudyForm, StudyStatus, exampleQuery, TokenField, IntegerField } from "./controls";

type Method = Study["method"];
const METHODS: Readonly<Record<Method, string>> = {
  gradient: "gradient",
  gradient_times_input: "gradient × input",
  integrated_gradients: "integrated gradients",
};

export function AttributionPanel({ store }: { store: Store }) {
  const { studies, inputs } = store;
  const wish = studies.options.value;
  const shown = studies.attribution.value;
  const found = shown?.found ?? null;
  const example = inputs.example.value;
  studies.useExample("attribution", example, store.replayNote.value === "");
  const given = [
    wish.token !== null && `output=${wish.token}`,
    `method=${quoted(wish.method)}`,
    wish.position !== -1 && `position=${wish.position}`,
  ].filter(Boolean);
  return (
    <section class="nni-words-panel" aria-label="Attribution">
      {!found && <p class="nni-faint">How much does each token or pixel of the input count for an output? Compute attributes every example of the batch by itself.</p>}
      <StudyStatus store={store} what="attribution" now={shown?.latest} found={found ? attributionText(found) : ""} />
      {found && <Scores store={store} found={found} />}
      <Examples store={store} />
      <PythonLine text={`insp.attribute(${given.join(", ")})${exampleQuery(example)}`} line={store.inputs.line} />
    </section>
  );
}

export function AttributionOptions({ store }: { store: Store }) {
  const { studies, inputs } = store;
  const wish = studies.options.value;
  return (
    <StudyForm store={store} name="Compute an attribution" running={studies.attribution.value?.latest.running ?? false} start={() => studies.request("attribution", { example: inputs.example.value }, true)}>
      <Select label="By" value={wish.method} options={Object.keys(METHODS) as Method[]} word={(method) => METHODS[method]} choose={(method) => studies.setOptions({ method })} />
      <Menu label="More about the attribution">
        <TokenField name="class or token" hint="largest" value={wish.token} choose={(token) => studies.setOptions({ token })} />
        <IntegerField
          name="at position"
          title="Of logits at each position, the position whose logit is attributed; -1 is the last."
          least={-Infinity}
          value={wish.position}
          choose={(position) => studies.setOptions({ position })}
        />
        <RangeChoice robust={studies.pixels.robust} />
      </Menu>
    </StudyForm>
  );
}

function attributionText(found: Attributed): string {
  const of = found.of ? `what ${found.of} returns` : "the input";
  const what = found.word ? `the logit of “${visibleText(found.word)}”` : "the chosen output";
  const output = found.output === null ? "not finite" : real(found.output);
  const said = `${METHODS[found.method as Method]} of ${what} (${output}) by ${of}, of ${found.source}.`;
  if (found.difference === null) return said;
  const sum = found.scores.reduce<number>((all, one) => all + (one ?? NaN), 0);
  return `${said} The scores add up to ${real(sum)}; the output differs from the baseline's by ${real(found.difference)}.`;
}

function Scores({ store, found }: { store: Store; found: Attributed }) {
  return found.shape.length < 2 ? <PositionScores found={found} /> : <PixelScores store={store} found={found} />;
}

function PositionScores({ found }: { found: Attributed }) {
  const [at, point] = useState<number | null>(null);
  const values = useMemo(() => Float64Array.from(found.scores, (one) => one ?? NaN), [found]);
  const range = useMemo(() => ({ ...colourRange({ mean: values, low: null, high: null }, false), hue: "orange" as const }), [values]);
  const words = useMemo(() => (found.words.length > 0 ? found.words : found.scores.map((_, i) => String(i))), [found]);
  return (
    <>
      <WordStrip words={words} values={values} range={range} at={at} point={point} label={`The ${words.length} places of the input, coloured by how much each counts.`} />
      <UnderPointer value={at === null ? null : values[at]!} hint="Point at a place for its score">
        {at} <bdi class="nni-word">{visibleText(words[at ?? 0] ?? "")}</bdi> {real(values[at ?? 0])}
      </UnderPointer>
      <div class="nni-legend">
        <ColourBar range={range} />
      </div>
      <SignHint count={values.length} signed={range.signed} />
    </>
  );
}

function PixelScores({ store, found }: { store: Store; found: Attributed }) {
  const { inputs, studies } = store;
  const pixels = studies.pixels;
  const [cells, cursor, array] = [pixels.drawn.value!, pixels.cursor.value, pixels.array.value!];
  const at = cursor ? cellAt(cells, 0, cursor.row, cursor.column) : -1;
  const [row, column] = [cursor?.row, cursor?.column].map((n) => Math.floor((n ?? 0) / found.blocks) * found.blocks);
  const sum = found.blocks > 1 ? `, the sum of ${found.blocks} × ${found.blocks} pixels` : "";
  return (
    <>
      <BesideInput values={pixels}>
        <Picture values={pixels} inputs={inputs} label={`How much each of ${array.shape.join(" by ")} pixels counts`} drawn={null} />
      </BesideInput>
      <UnderPointer value={at < 0 ? null : cells.mean[at]!} hint="Point at a pixel for its score">{`row ${row}, column ${column}${sum}: ${real(cells.mean[at])}`}</UnderPointer>
      <Legend values={pixels} cells={cells} />
      <SignHint count={cells.mean.length} signed={cells.mean.some((one) => one < 0)} />
    </>
  );
}

/** The score that is pointed at. */
function UnderPointer({ value, hint, children }: { value: number | null; hint: string; children: ComponentChildren }) {
  return (
    <p class="nni-under-pointer" aria-live="polite" data-testid="nni-attribution-pointed" data-value={value === null ? "" : exact(value)}>
      {value === null ? <span class="nni-faint">{hint}</span> : children}
    </p>
  );
}

function SignHint({ count, signed }: { count: number; signed: boolean }) {
  return (
    <p class="nni-faint nni-small" data-testid="nni-attribution" data-value={count}>
      {signed ? "Orange counts for it, grey against." : "How much each counts."}
    </p>
  );
}
