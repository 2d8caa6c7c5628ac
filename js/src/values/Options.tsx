// What the panels "Values" and "Attention" show: the part of the site and the view in sight, and in the
// menu the axes, the example by its number, the range of the colours, a mask, and reading again.
import { visible, type InputsState } from "../inputs/state";
import type { HeldArray, Site } from "../kernel/protocol";
import { MaskBar } from "../masks/MaskBar";
import type { Store } from "../store";
import { Choice } from "../ui/Choice";
import { More } from "../ui/More";
import { Pick } from "../ui/Pick";
import { ids } from "../ui/testids";
import { fixed, lengthOf, possible, slid, TILES, type Shown, type View } from "./layout";
import { isEdited, maskOf } from "./mask";
import type { Part, ValuesState } from "./state";
import { nameOf, shapeText } from "./text";

const PARTS: readonly Part[] = ["output", "input", "gradient", "parameter"];
/** What a view is called; the others have their own names. */
const VIEWS: Partial<Record<View, string>> = { images: "maps", attention: "matrices" };

interface Props {
  store: Store;
  site: Site;
}

export function ValuesOptions({ store, site }: Props) {
  const values = store.values;
  const [arrays, array, shown] = [values.arrays.value, values.array.value, values.shown.value];
  const parts = PARTS.filter((part) => part === values.part.value || !arrays || arrays.parts.includes(part));
  return (
    <>
      <Pick label="Part of the site" testid={ids.valuesPart} value={values.part.value} options={parts} choose={(part) => values.setPart(site.key, part)} />
      {array && shown && (
        <Pick label="View" testid={ids.valuesView} value={shown.view} options={possible(array, values.patches.value !== null)} word={(view) => VIEWS[view] ?? view} choose={(view) => values.setView(view)} />
      )}
      <ValuesMore store={store} site={site} />
    </>
  );
}

export function AttentionOptions({ store, site }: Props) {
  return <ValuesMore store={store} site={site} />;
}

function ValuesMore({ store, site }: Props) {
  const values = store.values;
  const [arrays, array, shown] = [values.arrays.value, values.array.value, values.shown.value];
  const masked = maskOf(store, site);
  return (
    <More label="More about the values">
      {(arrays?.perturbed || values.clean.value) && (
        <span class="nni-more-line">
          perturbations
          <Choice
            label="With or without perturbations"
            testid={ids.valuesClean}
            value={values.clean.value ? "clean" : "perturbed"}
            options={["perturbed", "clean"]}
            choose={(chosen) => values.setClean(site.key, chosen === "clean")}
          />
        </span>
      )}
      {arrays && arrays.arrays.length > 1 && array && (
        <label>
          array
          <select
            value={String(array.number)}
            onChange={(event) => values.choose(arrays.arrays.find((a) => String(a.number) === event.currentTarget.value) ?? null)}
          >
            {arrays.arrays.map((a) => (
              <option key={a.number} value={String(a.number)}>
                {nameOf(a, arrays)} {shapeText(a)}
              </option>
            ))}
          </select>
        </label>
      )}
      {array && shown && <Shapes values={values} array={array} shown={shown} />}
      {array && /^complex/.test(array.dtype) && (
        <span class="nni-more-line">
          complex numbers
          <Choice
            label="Part of complex numbers"
            value={values.component.value === "value" ? "abs" : values.component.value}
            options={["abs", "real", "imag"]}
            choose={(component) => values.setComponent(component)}
          />
        </span>
      )}
      {array && shown && <Sliders values={values} array={array} shown={shown} inputs={store.inputs} examples />}
      <span class="nni-more-line">
        colours of
        <Choice
          label="Range of the colours"
          value={values.robust.value ? "1–99 %" : "all"}
          options={["1–99 %", "all"]}
          choose={(chosen) => (values.robust.value = chosen !== "all")}
        />
      </span>
      {masked && !isEdited(store, masked.mask) && (
        <span class="nni-more-line">
          <MaskBar mask={masked.mask} what="places of the picture" editing={store.editingMask} change={masked.change} />
        </span>
      )}
      <button type="button" class="nni-button" onClick={() => values.open(site.key)}>
        Read again
      </button>
    </More>
  );
}

/** Which axes are rows, columns and pictures. */
function Shapes({ values, array, shown }: { values: ValuesState; array: HeldArray; shown: Shown }) {
  const rank = array.shape.length;
  if (rank < 2) return null;
  return (
    <>
      {shown.view !== "line" && shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="rows" title="down" />}
      {shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="columns" title="across" />}
      {(shown.view === "images" || shown.view === "attention") && <AxisChoice values={values} array={array} shown={shown} place="tiles" title="pictures" none="one" />}
      {(shown.view === "tokens" || shown.view === "patches") && (
        <span class="nni-more-line">
          each token
          <Choice
            label="Shown for each token"
            value={shown.over >= 0 ? "norm" : "one unit"}
            options={["norm", "one unit"]}
            choose={(chosen) => {
              const feature = array.axes.indexOf("feature") < 0 ? rank - 1 : array.axes.indexOf("feature");
              values.setShown({ ...shown, over: chosen === "norm" ? feature : -1 });
            }}
          />
        </span>
      )}
    </>
  );
}

interface SlidersProps {
  values: ValuesState;
  array: HeldArray;
  shown: Shown;
  inputs: InputsState;
  /** Those of the examples, which a row of pictures or texts chooses too, or the others. */
  examples: boolean;
}

/** A slider and a number for each axis of which one index is shown, and for the pages of many pictures. */
export function Sliders({ values, array, shown, inputs, examples }: SlidersProps) {
  const box = values.box.value;
  const labels = inputs.labels(array.axes, array.shape, fixed(array, shown, values.index.value));
  const pages = Math.ceil(lengthOf(array, shown.tiles) / TILES);
  const axes = slid(array, shown).filter((axis) => (array.axes[axis] === "batch" && inputs.rowOf(values.holdsExamples(axis))) === examples);
  return (
    <>
      {axes.map((axis) => (
        <Slider key={axis} name={array.axes[axis]!} length={array.shape[axis]!} value={values.index.value[axis] ?? 0} word={labels[axis]} change={(n) => values.setIndex(axis, n)} />
      ))}
      {!examples && pages > 1 && box && (
        <Slider
          name={`${array.axes[shown.tiles]}, page`}
          length={pages}
          value={Math.floor(box.tiles[0] / TILES)}
          change={(page) => values.setBox({ ...box, tiles: [page * TILES, Math.min((page + 1) * TILES, lengthOf(array, shown.tiles))] })}
        />
      )}
    </>
  );
}

interface ChoiceProps {
  values: ValuesState;
  array: HeldArray;
  shown: Shown;
  place: "tiles" | "rows" | "columns";
  title: string;
  none?: string;
}

function AxisChoice({ values, array, shown, place, title, none }: ChoiceProps) {
  return (
    <label>
      {title}
      <select value={String(shown[place])} data-testid={ids.valuesAxis(place)} onChange={(event) => values.setAxis(place, Number(event.currentTarget.value))}>
        {none !== undefined && <option value="-1">{none}</option>}
        {none === undefined && shown[place] < 0 && <option value="-1">–</option>}
        {array.axes.map((name, axis) => (
          <option key={axis} value={String(axis)} disabled={axis === shown.over}>
            {name} ({array.shape[axis]})
          </option>
        ))}
      </select>
    </label>
  );
}

interface SliderProps {
  name: string;
  length: number;
  value: number;
  word?: string | null | undefined;
  change: (n: number) => void;
}

function Slider({ name, length, value, word, change }: SliderProps) {
  const most = Math.max(length - 1, 0);
  return (
    <div class="nni-slider">
      <span>{name}</span>
      <input
        type="range"
        min={0}
        max={most}
        step={1}
        value={value}
        disabled={most === 0}
        aria-label={name}
        onInput={(event) => change(Number(event.currentTarget.value))}
      />
      <input
        type="number"
        min={0}
        max={most}
        step={1}
        value={value}
        disabled={most === 0}
        aria-label={`${name}, as a number`}
        data-testid={ids.valuesIndex(name)}
        onInput={(event) => event.currentTarget.value !== "" && change(Number(event.currentTarget.value))}
      />
      <span class="nni-faint">
        of {length} {typeof word === "string" && <bdi class="nni-word nni-said-word">{visible(word)}</bdi>}
      </span>
    </div>
  );
}
