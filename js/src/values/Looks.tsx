// The keys that a query looks at most: those of the row under the crosshair, with their weights.
// Invariant: a weight is that of the cells on screen; if a cell stands for several keys, the list says so.
import { visible, type InputsState } from "../inputs/state";
import { real } from "../ui/format";
import { ids } from "../ui/testids";
import { cellAt, type Cells } from "./cells";
import { lengthOf, type Cursor } from "./layout";
import type { ValuesState } from "./state";
import { indexAt } from "./text";

const MOST = 6;

interface Key {
  readonly from: number;
  readonly count: number;
  readonly weight: number;
}

/** The cells of a query with the greatest weights, greatest first. */
export function keysOf(cells: Cells, cursor: Cursor, length: number): Key[] {
  const { starts, block, counts } = cells.header;
  const first = cellAt(cells, cursor.tile, cursor.row, starts[2]!);
  if (first < 0) return [];
  const keys = Array.from({ length: counts[2]! }, (_, i) => {
    const from = starts[2]! + i * block[2]!;
    return { from, count: Math.min(block[2]!, length - from), weight: cells.mean[first + i]! };
  });
  return keys.sort((a, b) => b.weight - a.weight).slice(0, MOST);
}

export function Looks({ values, inputs }: { values: ValuesState; inputs: InputsState }) {
  const [array, shown, cells, cursor] = [values.array.value, values.shown.value, values.drawn.value, values.cursor.value];
  if (!array || !shown || !cells || shown.columns < 0 || shown.rows < 0) return null;
  const [query, key] = [array.axes[shown.rows]!, array.axes[shown.columns]!];
  const word = (axis: number, here: Cursor): string => {
    const found = inputs.labels(array.axes, array.shape, indexAt(array, shown, values.index.value, here))[axis];
    return found ? visible(found) : "";
  };
  const head = shown.tiles < 0 ? "" : `${array.axes[shown.tiles]} ${cursor?.tile}, `;
  return (
    <div class="nni-looks" data-testid={ids.valuesLooks}>
      {cursor ? (
        <span class="nni-faint">
          {head}
          {query} {cursor.row} <bdi class="nni-word">{word(shown.rows, cursor)}</bdi> looks at
        </span>
      ) : (
        <span class="nni-faint">
          Point at a {query} to see the {key}s that it looks at.{shown.tiles >= 0 && ` A click shows a ${array.axes[shown.tiles]} large.`}
        </span>
      )}
      <ol>
        {(cursor ? keysOf(cells, cursor, lengthOf(array, shown.columns)) : []).map(({ from, count, weight }) => (
          <li key={from}>
            <span class="nni-faint">{count > 1 ? `${key}s ${from} to ${from + count - 1}, each` : `${key} ${from}`}</span>
            <bdi class="nni-word">{count > 1 ? "" : word(shown.columns, { ...cursor!, column: from })}</bdi>
            <span class="nni-looks-bar">
              <span style={{ width: `${Math.min(Math.max(weight, 0), 1) * 100}%` }} />
            </span>
            <b>{real(weight)}</b>
          </li>
        ))}
      </ol>
    </div>
  );
}
