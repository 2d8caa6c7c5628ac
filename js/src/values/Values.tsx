// The panel "Values": any slice of any array of the selected site, in the pass on screen.
// Invariant: it asks the kernel when it is first shown and when its arrays may have changed; during a
// loop it asks only when the user does, so that the loop is left alone.
import { useEffect, useState } from "preact/hooks";
import { visible, type InputsState } from "../inputs/state";
import type { HeldArray, Site } from "../kernel/protocol";
import { overPicture } from "../masks/drawn";
import { MaskBar } from "../masks/MaskBar";
import { Python } from "../python/Python";
import type { Store } from "../store";
import { Choice } from "../ui/Choice";
import { ids } from "../ui/testids";
import { Axes } from "./Axes";
import { Beside } from "./Beside";
import { possible } from "./layout";
import { Legend } from "./Legend";
import { Looks } from "./Looks";
import { Picture, type Drawn } from "./Picture";
import type { Part, ValuesState } from "./state";
import { blockText, exactAt, expression, expressionOfRun, indexAt, leftOut, nameOf, place, shapeText, shortest } from "./text";

const PARTS: readonly Part[] = ["output", "input", "gradient", "parameter", "attention"];
const AGAIN_MS = 150;
const SAID_MS = 350;

export function ValuesPanel({ store, site }: { store: Store; site: Site }) {
  const values = store.values;
  const running = store.progress.value?.running ?? false;
  const elsewhere = !!store.state.value?.recorded;
  const seq = running ? -1 : (store.frame.value?.header.seq ?? 0);
  useEffect(() => values.open(site.key), [site.key]);
  useEffect(() => {
    if (elsewhere) return; // each request makes the run measure a step
    const timer = setTimeout(() => values.open(site.key), AGAIN_MS);
    return () => clearTimeout(timer);
  }, [seq]);

  const example = store.inputs.example.value;
  useEffect(() => values.follow(example), [example]);

  const [arrays, array, shown, cells] = [values.arrays.value, values.array.value, values.shown.value, values.cells.value];
  const drawn = values.drawn.value;
  const masked = maskOf(store, site);
  const parts = PARTS.filter((part) => part === values.part.value || (arrays ? arrays.parts.includes(part) : part !== "attention"));
  return (
    <section class="nni-values" aria-label="Values">
      <div class="nni-values-bar">
        <Choice label="Part of the site" testid={ids.valuesPart} value={values.part.value} options={parts} choose={(part) => values.setPart(site.key, part)} />
        {(arrays?.perturbed || values.clean.value) && (
          <Choice
            label="With or without perturbations"
            testid={ids.valuesClean}
            value={values.clean.value ? "clean" : "perturbed"}
            options={["perturbed", "clean"]}
            choose={(chosen) => values.setClean(site.key, chosen === "clean")}
          />
        )}
        {arrays && arrays.arrays.length > 1 && array && (
          <select
            class="nni-values-array"
            aria-label="Array"
            data-testid={ids.valuesArray}
            value={String(array.number)}
            onChange={(event) => values.choose(arrays.arrays.find((a) => String(a.number) === event.currentTarget.value) ?? null)}
          >
            {arrays.arrays.map((a) => (
              <option key={a.number} value={String(a.number)}>
                {nameOf(a, arrays)} {shapeText(a)}
              </option>
            ))}
          </select>
        )}
        {array && shown && (
          <Choice label="View" testid={ids.valuesView} value={shown.view} options={possible(array, values.patches.value !== null)} choose={(view) => values.setView(view)} />
        )}
        {array && /^complex/.test(array.dtype) && (
          <Choice
            label="Part of complex numbers"
            testid={ids.valuesComponent}
            value={values.component.value === "value" ? "abs" : values.component.value}
            options={["abs", "real", "imag"]}
            choose={(component) => values.setComponent(component)}
          />
        )}
        <span class="nni-grow" />
        <button type="button" class="nni-button" data-testid={ids.valuesRead} onClick={() => values.open(site.key)}>
          Read again
        </button>
      </div>
      <p class="nni-values-source nni-faint nni-small" data-testid={ids.valuesSource}>
        {arrays ? [shapeText0(values), arrays.source, ...arrays.notes].filter(Boolean).join(" ") : values.busy.value ? elsewhere ? "The run measures its next step…" : "Computing this module's values…" : ""}
      </p>
      {values.problem.value !== "" && (
        <p class="nni-unseen" role="status" data-testid={ids.valuesProblem}>
          {values.problem.value}
        </p>
      )}
      {arrays && array && shown && values.problem.value === "" && (
        <>
          <Axes values={values} array={array} shown={shown} inputs={store.inputs} />
          <div class="nni-units-foot">
            <Readout values={values} inputs={store.inputs} />
            {masked && <MaskBar mask={masked.mask} what="places of the picture" editing={store.editingMask} change={masked.change} />}
          </div>
          <Beside values={values}>
            <Picture values={values} inputs={store.inputs} label={`${arrays.part} of ${site.key || "the model"}, ${shapeText(array)}, as ${shown.view}`} drawn={masked} />
          </Beside>
          {shown.view === "attention" && <Looks values={values} inputs={store.inputs} />}
          {drawn ? <Legend values={values} cells={drawn} /> : <div class="nni-legend" />}
          <p class="nni-faint nni-small nni-told" data-testid={ids.valuesLeftOut}>
            {cells ? leftOut(array, shown, cells) : ""}
          </p>
          <Python text={elsewhere ? expressionOfRun(arrays, array) : expression(arrays, array, shown, values.index.value)} testid={ids.valuesExpression} line={store.inputs.line} />
        </>
      )}
    </section>
  );
}

/** The mask that can be drawn on the picture of a site's output; null if none can. */
function maskOf(store: Store, site: Site): Drawn | null {
  const [part, array, shown] = [store.values.part.value, store.values.array.value, store.values.shown.value];
  if (!site.perturbable || part !== "output" || store.replay.value !== "" || !array || !shown || shown.over >= 0) return null;
  const found = overPicture(array.axes, array.shape, shown.rows, shown.columns);
  if (!found) return null;
  const over = { site: site.key, ...found };
  return { mask: store.masks.of(over), columns: found.columns, editing: store.editingMask.value, change: (mask) => store.masks.set(over, mask) };
}

function shapeText0(values: ValuesState): string {
  return values.array.value ? `${shapeText(values.array.value)}.` : "";
}

/** The words of an element's positions, as text: "the", or "query the", "key cat" of several. */
function wordsAt(inputs: InputsState, array: HeldArray, at: readonly number[]): string[] {
  const found = inputs.labels(array.axes, array.shape, at).flatMap((word, axis) => (word === null ? [] : [[array.axes[axis]!, visible(word)] as const]));
  return found.map(([axis, word]) => (found.length > 1 ? `${axis} ${word}` : word));
}

/** The element under the crosshair. The spoken text waits until the crosshair rests. */
function Readout({ values, inputs }: { values: ValuesState; inputs: InputsState }) {
  const [array, shown, cells, cursor] = [values.array.value, values.shown.value, values.cells.value, values.cursor.value];
  const known = array && shown && cells && cursor ? exactAt(array, shown, cells, cursor, values.exact.value) : null;
  const at = array && shown && cursor ? place(array, shown, values.index.value, cursor) : "";
  const words = array && shown && cursor ? wordsAt(inputs, array, indexAt(array, shown, values.index.value, cursor)) : [];
  const value = known === null || !array ? "" : shortest(known, shown!.over >= 0 ? "float32" : array.dtype);
  const block = cells && cursor ? blockText(cells, cursor) : "";
  const [said, say] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => say(at === "" ? "" : `${[at, ...words].join(" ")}: ${value || "…"}`), SAID_MS);
    return () => clearTimeout(timer);
  }, [at, value, words.join("\n")]);
  return (
    <div class="nni-readout">
      <span class="nni-readout-line">
        <span class="nni-faint">{at || "Point at a cell, or move with the arrow keys"}</span>
        {words.map((word, i) => (
          <bdi key={i} class="nni-word nni-said-word" data-testid={ids.valueWord}>
            {word}
          </bdi>
        ))}
        <b data-testid={ids.valueExact} data-value={known ?? ""} data-place={at}>
          {cursor ? (value || "…") : ""}
        </b>
      </span>
      {cells?.header.block.some((n) => n > 1) && (
        <span class="nni-readout-line nni-faint" data-testid={ids.valueBlock}>
          {block}
        </span>
      )}
      <span class="nni-unseen-text" aria-live="polite">
        {said}
      </span>
    </div>
  );
}
