// The panel "Values": any slice of any array of the selected site, in the pass on screen. Maps have the
// input's picture, the chosen map and both laid over each other first, then all maps.
// Invariant: it asks the kernel when it is first shown and when its arrays may have changed; during a
// loop it asks only when the user does, so that the loop is left alone.
import { useEffect, useState } from "preact/hooks";
import { Examples } from "../inputs/Examples";
import { visibleText, type InputsState } from "../inputs/state";
import type { HeldArray, Site } from "../kernel/protocol";
import { MaskBar } from "../masks/MaskBar";
import { PythonLine } from "../python/PythonLine";
import type { Store } from "../store";
import { BesideInput, LargeMap } from "./Tiles";
import { largestRows } from "./cells";
import { Legend } from "./Legend";
import { showsMask, pictureMask } from "./pictureMask";
import { Sliders } from "./Options";
import { Picture } from "./Picture";
import type { ValuesState } from "./state";
import { blockText, exactAt, valuesExpression, runExpression, indexAt, extentText, indexText, shapeText, shortest } from "./text";

const REREAD_MS = 150;
const ANNOUNCE_MS = 350;

/** Opens the arrays of a site: its attention, or another part. */
export function useValues(store: Store, site: Site, attention: boolean): void {
  const values = store.values;
  const running = store.progress.value?.running ?? false;
  const elsewhere = !!store.state.value?.recorded;
  const seq = running ? -1 : (store.frame.value?.header.seq ?? 0);
  useEffect(() => {
    if ((values.part.peek() === "attention") !== attention) values.setPart(site.key, attention ? "attention" : "output");
    else values.open(site.key);
  }, [site.key, attention]);
  useEffect(() => {
    if (elsewhere) return; // a run is asked only when the user does
    const timer = setTimeout(() => values.open(site.key), REREAD_MS);
    return () => clearTimeout(timer);
  }, [seq]);
  const example = store.inputs.example.value;
  useEffect(() => values.follow(example), [example]);
}

export function ValuesPanel({ store, site }: { store: Store; site: Site }) {
  useValues(store, site, false);
  const values = store.values;
  const [arrays, array, shown, box] = [values.arrays.value, values.array.value, values.shown.value, values.box.value];
  const ready = arrays && array && shown && box && values.problem.value === "" && arrays.part !== "attention";
  if (!ready) return <ValuesPlaceholder store={store} />;
  const masked = pictureMask(store, site);
  const maps = shown.view === "images" && box.tiles[1] - box.tiles[0] > 1;
  const picture = <Picture values={values} inputs={store.inputs} label={`${arrays.part} of ${site.key || "the model"}, ${shapeText(array)}, as ${shown.view}`} drawn={masked} />;
  const said = store.inputs.inputs.value?.examples[store.inputs.example.value]?.label;
  return (
    <section class="nni-values" aria-label="Values" data-maps={maps ? "" : undefined}>
      {maps && (
        <LargeMap
          values={values}
          caption={
            <>
              <b>example {store.inputs.example.value}</b>
              {said ? <bdi>, {said}</bdi> : ""}
            </>
          }
        />
      )}
      {maps ? picture : <BesideInput values={values}>{picture}</BesideInput>}
      <div class="nni-values-foot">
        {values.drawn.value && <Legend values={values} cells={values.drawn.value} />}
        <Readout values={values} inputs={store.inputs} />
        {masked && showsMask(store, masked.mask) && <MaskBar mask={masked.mask} what="places of the picture" editing={store.editingMask} change={masked.change} />}
      </div>
      <div class="nni-axes">
        <Sliders values={values} array={array} shown={shown} inputs={store.inputs} examples={false} />
      </div>
      <LargestGradients store={store} />
      <Examples store={store} />
      <ValuesSource values={values} />
      <PythonLine text={store.state.value?.recorded ? runExpression(arrays, array) : valuesExpression(arrays, array, shown, values.index.value)} testid="nni-values-expression" line={store.inputs.line} />
    </section>
  );
}

/** The examples with the greatest gradient, which make the loss large; only where each example is a row. */
function LargestGradients({ store: { values, inputs } }: { store: Store }) {
  const [array, shown, cells] = [values.array.value!, values.shown.value!, values.cells.value];
  const rows = array.axes[shown.rows] === "batch" && cells?.header.counts[1] === array.shape[shown.rows] && cells?.header.counts[2] === array.shape[shown.columns];
  const found = rows && values.arrays.value!.part === "gradient" ? largestRows(cells!, 3) : [];
  if (found.length < 2) return null;
  return (
    <p class="nni-key">
      greatest gradient:
      {found.map((row) => (
        <button key={row} type="button" class="nni-link" onClick={() => inputs.choose(row)}>
          example {row}
        </button>
      ))}
    </p>
  );
}

/** What keeps the values from being shown. */
export function ValuesPlaceholder({ store }: { store: Store }) {
  const problem = store.values.problem.value;
  return (
    <>
      {problem !== "" ? (
        <p class="nni-unseen" role="status" data-testid="nni-values-problem">
          {problem}
        </p>
      ) : (
        <p class="nni-faint">{store.state.value?.recorded ? "The run is to send what this module returns in its next step…" : "Computing this module's values…"}</p>
      )}
      <Examples store={store} />
    </>
  );
}

/** Where the values come from, and what is not drawn. */
export function ValuesSource({ values }: { values: ValuesState }) {
  const [arrays, array, shown, cells] = [values.arrays.value!, values.array.value!, values.shown.value!, values.cells.value];
  return (
    <p class="nni-values-source nni-faint nni-small">
      <span data-testid="nni-values-source">{[`${shapeText(array)}.`, arrays.source, ...arrays.notes].filter(Boolean).join(" ")}</span>{" "}
      <span data-testid="nni-values-left-out">{cells ? `${extentText(array, shown, cells)}.` : ""}</span>
    </p>
  );
}

/** The words of an element's positions, as text: "the", or "query the", "key cat" of several. */
function wordTexts(inputs: InputsState, array: HeldArray, at: readonly number[]): string[] {
  const found = inputs.labels(array.axes, array.shape, at).flatMap((word, axis) => (word === null ? [] : [[array.axes[axis]!, visibleText(word)] as const]));
  return found.map(([axis, word]) => (found.length > 1 ? `${axis} ${word}` : word));
}

/** The element under the crosshair. The spoken text waits until the crosshair rests. */
export function Readout({ values, inputs }: { values: ValuesState; inputs: InputsState }) {
  const [array, shown, cells, cursor] = [values.array.value, values.shown.value, values.cells.value, values.cursor.value];
  const known = array && shown && cells && cursor ? exactAt(array, shown, cells, cursor, values.exact.value) : null;
  const at = array && shown && cursor ? indexText(array, shown, values.index.value, cursor) : "";
  const words = array && shown && cursor ? wordTexts(inputs, array, indexAt(array, shown, values.index.value, cursor)) : [];
  const value = known === null || !array ? "" : shortest(known, shown!.over >= 0 ? "float32" : array.dtype);
  const block = cells && cursor ? blockText(cells, cursor) : "";
  const [said, say] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => say(at === "" ? "" : `${[at, ...words].join(" ")}: ${value || "…"}`), ANNOUNCE_MS);
    return () => clearTimeout(timer);
  }, [at, value, words.join("\n")]);
  return (
    <div class="nni-readout">
      <span class="nni-readout-line">
        <span class="nni-faint">{at || "Point at a cell, or use the arrow keys"}</span>
        {words.map((word, i) => (
          <bdi key={i} class="nni-word nni-quoted-word">
            {word}
          </bdi>
        ))}
        <b data-testid="nni-value-exact" data-value={known ?? ""} data-place={at}>
          {cursor ? (value || "…") : ""}
        </b>
      </span>
      {cells?.header.block.some((n) => n > 1) && (
        <span class="nni-readout-line nni-faint" data-testid="nni-value-block">
          {block}
        </span>
      )}
      <span class="nni-hidden" aria-live="polite">
        {said}
      </span>
    </div>
  );
}
