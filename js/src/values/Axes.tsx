// The axes shown as rows, columns and pictures, and a slider and a number for every other axis.
import { visible, type InputsState } from "../inputs/state";
import type { HeldArray } from "../kernel/protocol";
import { Choice } from "../ui/Choice";
import { ids } from "../ui/testids";
import { fixed, lengthOf, slid, TILES, type Shown } from "./layout";
import type { ValuesState } from "./state";

export function Axes({ values, array, shown, inputs }: { values: ValuesState; array: HeldArray; shown: Shown; inputs: InputsState }) {
  const rank = array.shape.length;
  const box = values.box.value;
  const labels = inputs.labels(array.axes, array.shape, fixed(array, shown, values.index.value));
  const pages = Math.ceil(lengthOf(array, shown.tiles) / TILES);
  return (
    <div class="nni-axes">
      {rank > 1 && (
        <div class="nni-axes-shown">
          {shown.view !== "line" && shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="rows" title="down" />}
          {shown.view !== "patches" && <AxisChoice values={values} array={array} shown={shown} place="columns" title="across" />}
          {(shown.view === "images" || shown.view === "attention") && (
            <AxisChoice values={values} array={array} shown={shown} place="tiles" title="pictures" none="one" />
          )}
          {shown.over >= 0 && <span class="nni-faint">each cell: the norm over {array.axes[shown.over]}</span>}
          {(shown.view === "tokens" || shown.view === "patches") && (
            <Choice
              label="Shown for each token"
              testid={ids.valuesToken}
              value={shown.over >= 0 ? "norm" : "one unit"}
              options={["norm", "one unit"]}
              choose={(chosen) => {
                const feature = array.axes.indexOf("feature") < 0 ? rank - 1 : array.axes.indexOf("feature");
                values.setShown({ ...shown, over: chosen === "norm" ? feature : -1 });
              }}
            />
          )}
        </div>
      )}
      {slid(array, shown).map((axis) => (
        <Slider key={axis} name={array.axes[axis]!} length={array.shape[axis]!} value={values.index.value[axis] ?? 0} word={labels[axis]} change={(n) => values.setIndex(axis, n)} />
      ))}
      {pages > 1 && box && (
        <Slider
          name={`${array.axes[shown.tiles]}, page`}
          length={pages}
          value={Math.floor(box.tiles[0] / TILES)}
          change={(page) => values.setBox({ ...box, tiles: [page * TILES, Math.min((page + 1) * TILES, lengthOf(array, shown.tiles))] })}
        />
      )}
    </div>
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
