// What the panels "Values" and "Attention" show: the part of the site and the view in sight, and in the
// menu the axes, the example by its number, the range of the colours, a mask, and reading again.
import { visibleText, type InputsState } from "../inputs/state";
import type { HeldArray, Site } from "../kernel/protocol";
import { MaskBar } from "../masks/MaskBar";
import type { Store } from "../store";
import { ButtonGroup } from "../ui/ButtonGroup";
import { Menu } from "../ui/Menu";
import { RangeChoice } from "./Legend";
import { NumberInput } from "../ui/NumberInput";
import { Select } from "../ui/Select";
import { fixedIndex, lengthOf, possibleViews, sliderAxes, MOST_TILES, type ViewAxes, type View } from "./layout";
import { showsMask, pictureMask } from "./pictureMask";
import type { ValuesPart, ValuesState } from "./state";
import { arrayName, shapeText } from "./text";

const PARTS: readonly ValuesPart[] = ["output", "input", "gradient", "parameter"];
/** What a view is called; the others have their own names. */
const VIEW_NAMES: Partial<Record<View, string>> = { images: "maps", attention: "matrices" };

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
      <Select label="Part of the site" testid="nni-values-part" value={values.part.value} options={parts} choose={(part) => values.setPart(site.key, part)} />
      {array && shown && (
        <Select label="View" testid="nni-values-view" value={shown.view} options={possibleViews(array, values.patches.value !== null)} word={(view) => VIEW_NAMES[view] ?? view} choose={(view) => values.setView(view)} />
      )}
      <ValuesMenu store={store} site={site} />
    </>
  );
}

export function AttentionOptions({ store, site }: Props) {
  return <ValuesMenu store={store} site={site} />;
}

function ValuesMenu({ store, site }: Props) {
  const values = store.values;
  const [arrays, array, shown] = [values.arrays.value, values.array.value, values.shown.value];
  const masked = pictureMask(store, site);
  return (
    <Menu label="More about the values">
      {(arrays?.perturbed || values.clean.value) && (
        <span class="nni-menu-line">
          perturbations
          <ButtonGroup
            label="With or without perturbations"
            testid="nni-values-clean"
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
                {arrayName(a, arrays)} {shapeText(a)}
              </option>
            ))}
          </select>
        </label>
      )}
      {array && shown && <AxisChoices values={values} array={array} shown={shown} />}
      {array && /^complex/.test(array.dtype) && (
        <span class="nni-menu-line">
          complex numbers
          <ButtonGroup
            label="Part of complex numbers"
            value={values.component.value === "value" ? "abs" : values.component.value}
            options={["abs", "real", "imag"]}
            choose={(component) => values.setComponent(component)}
          />
        </span>
      )}
      {array && shown && <Sliders values={values} array={array} shown={shown} inputs={store.inputs} examples />}
      <RangeChoice robust={values.robust} />
      {masked && !showsMask(store, masked.mask) && (
        <span class="nni-menu-line">
          <MaskBar mask={masked.mask} what="places of the picture" editing={store.editingMask} change={masked.change} />
        </span>
      )}
      <button type="button" class="nni-button" onClick={() => values.open(site.key)}>
        Read again
      </button>
    </Menu>
  );
}

/** Which axes are rows, columns and pictures. */
function AxisChoices({ values, array, shown }: { values: ValuesState; array: HeldArray; shown: ViewAxes }) {
  const rank = array.shape.length;
  if (rank < 2) return null;
  return (
    <>
      {shown.view !== "line" && shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="rows" title="down" />}
      {shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="columns" title="across" />}
      {(shown.view === "images" || shown.view === "attention") && <AxisChoice values={values} array={array} shown={shown} place="tiles" title="pictures" none="one" />}
      {(shown.view === "tokens" || shown.view === "patches") && (
        <span class="nni-menu-line">
          each token
          <ButtonGroup
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
  shown: ViewAxes;
  inputs: InputsState;
  /** Those of the examples, which a row of pictures or texts chooses too, or the others. */
  examples: boolean;
}

/** A slider and a number for each axis of which one index is shown, and for the pages of many pictures. */
export function Sliders({ values, array, shown, inputs, examples }: SlidersProps) {
  const box = values.box.value;
  const labels = inputs.labels(array.axes, array.shape, fixedIndex(array, shown, values.index.value));
  const pages = Math.ceil(lengthOf(array, shown.tiles) / MOST_TILES);
  const axes = sliderAxes(array, shown).filter((axis) => (array.axes[axis] === "batch" && inputs.hasExampleRow(values.holdsExamples(axis))) === examples);
  return (
    <>
      {axes.map((axis) => (
        <Slider key={axis} name={array.axes[axis]!} length={array.shape[axis]!} value={values.index.value[axis] ?? 0} word={labels[axis]} change={(n) => values.setIndex(axis, n)} />
      ))}
      {!examples && pages > 1 && box && (
        <Slider
          name={`${array.axes[shown.tiles]}, page`}
          length={pages}
          value={Math.floor(box.tiles[0] / MOST_TILES)}
          change={(page) => values.setBox({ ...box, tiles: [page * MOST_TILES, Math.min((page + 1) * MOST_TILES, lengthOf(array, shown.tiles))] })}
        />
      )}
    </>
  );
}

interface ChoiceProps {
  values: ValuesState;
  array: HeldArray;
  shown: ViewAxes;
  place: "tiles" | "rows" | "columns";
  title: string;
  none?: string;
}

function AxisChoice({ values, array, shown, place, title, none }: ChoiceProps) {
  return (
    <label>
      {title}
      <select value={String(shown[place])} data-testid={`nni-values-axis-${place}`} onChange={(event) => values.setAxis(place, Number(event.currentTarget.value))}>
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
      <NumberInput min={0} max={most} step={1} value={value} disabled={most === 0} aria-label={`${name}, as a number`} data-testid={`nni-values-index-${name}`} change={change} />
      <span class="nni-faint">
        of {length} {typeof word === "string" && <bdi class="nni-word nni-quoted-word">{visibleText(word)}</bdi>}
      </span>
    </div>
  );
}
