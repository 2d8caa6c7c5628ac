// What a query looks at: the text coloured by its weights, and the keys with the greatest weights.
// Invariant: a weight is that of the cells on screen; if a cell stands for several keys, the list says so.
import { areWholeWords, exampleAt, visibleText } from "../inputs/state";
import type { Store } from "../store";
import { real } from "../ui/format";
import { cellAt, type Cells } from "../values/cells";
import { fixedIndex, type Cursor } from "../values/layout";
import { indexAt } from "../values/text";

const MOST_KEYS = 6;

export interface Key {
  readonly from: number;
  readonly count: number;
  readonly weight: number;
}

/** The cells of a query with the greatest weights, greatest first. */
export function topKeys(cells: Cells, cursor: Cursor, length: number): Key[] {
  const { starts, block, counts } = cells.header;
  const first = cellAt(cells, cursor.tile, cursor.row, starts[2]!);
  if (first < 0) return [];
  const keys = Array.from({ length: counts[2]! }, (_, i) => {
    const from = starts[2]! + i * block[2]!;
    return { from, count: Math.min(block[2]!, length - from), weight: cells.mean[first + i]! };
  });
  return keys.sort((a, b) => b.weight - a.weight).slice(0, MOST_KEYS);
}

export function TopKeys({ store, query, keys }: { store: Store; query: Cursor; keys: readonly Key[] }) {
  const { values, inputs } = store;
  const [array, shown, cells] = [values.array.value!, values.shown.value!, values.drawn.value];
  const [rows, columns] = [array.axes[shown.rows]!, array.axes[shown.columns]!];
  const labels = (at: Cursor): (string | null)[] => inputs.labels(array.axes, array.shape, indexAt(array, shown, values.index.value, at));
  const word = (axis: number, at: Cursor): string => {
    const found = labels(at)[axis];
    return found ? visibleText(found) : "";
  };
  const most = keys[0]?.weight || 1;
  const queryWord = word(shown.rows, query);
  const pointed = values.cursor.value !== null;
  return (
    <div class="nni-top-keys" data-testid="nni-attention-keys">
      <p class="nni-faint nni-small nni-query-line" title={pointed ? undefined : `Point at a ${rows} to see the ${columns}s that it looks at`}>
        <span>
          {shown.tiles >= 0 && `${array.axes[shown.tiles]} ${query.tile}: `}
          {queryWord && <bdi class="nni-word nni-query-word">{queryWord}</bdi>}
          {queryWord ? ` (${rows} ${query.row})` : `${rows} ${query.row}`} looks at
        </span>
        <ZeroHead store={store} head={query.tile} />
      </p>
      {cells && <WeightedText store={store} query={query} cells={cells} most={most} />}
      <ol>
        {keys.map(({ from, count, weight }) => (
          <li key={from} data-testid="nni-attention-key" data-value={from}>
            <span class="nni-key-word">
              <bdi class="nni-word">{count > 1 ? "" : word(shown.columns, { ...query, column: from })}</bdi>{" "}
              <span class="nni-faint">{count > 1 ? `${from} to ${from + count - 1}, each` : from}</span>
            </span>
            <span class="nni-weight-bar" aria-hidden="true">
              <i style={{ width: `${Math.min(Math.max(weight / most, 0), 1) * 100}%` }} />
            </span>
            <span>{real(weight)}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}

/** A button that zeroes the head on screen. It is left out in a recorded run, and where the matrices are not heads. */
function ZeroHead({ store, head }: { store: Store; head: number }) {
  const [{ site }, array, shown] = [store.values.arrays.value!, store.values.array.value!, store.values.shown.value!];
  const axis = shown.tiles - array.axes.length;
  if (array.axes[shown.tiles] !== "head" || store.state.value?.recorded || store.replayNote.value !== "") return null;
  const key = site + (array.name || "@attention");
  const isZeroed = store.perturbations.value.some((p) => p.site === key && p.expression.includes(`[${head}], axis=${axis})`));
  return (
    <button type="button" class="nni-link" disabled={isZeroed} title={isZeroed ? "It is already in the list." : `Set the weights of head ${head} to 0`} data-testid="nni-zero-head" onClick={() => store.perturb(key, "Zero", null, "output", [head], axis)}>
      ◆ Zero head {head}
    </button>
  );
}

/** The text of the example, each word in the shade of its weight; none where a cell stands for several keys. */
function WeightedText({ store, query, cells, most }: { store: Store; query: Cursor; cells: Cells; most: number }) {
  const { values, inputs } = store;
  const [array, shown] = [values.array.value!, values.shown.value!];
  const example = exampleAt(array.axes, array.shape, fixedIndex(array, shown, values.index.value), inputs.inputs.value);
  if (cells.header.block[2] !== 1 || !inputs.isPositionAxis(array.axes[shown.columns]!, array.shape[shown.columns]!)) return null;
  const words = inputs.words(example);
  if (words.length === 0) return null;
  const same = inputs.isPositionAxis(array.axes[shown.rows]!, array.shape[shown.rows]!);
  return (
    <p class="nni-weighted-text" data-apart={areWholeWords(words) ? "" : undefined}>
      {words.map((word, i) => {
        const at = cellAt(cells, query.tile, query.row, i);
        const weight = at < 0 ? 0 : cells.mean[at]!;
        const share = Math.round(Math.min(Math.max(weight / most, 0), 1) * 50);
        return (
          <bdi
            key={i}
            class="nni-word"
            data-query={same && i === query.row ? "" : undefined}
            data-later={weight === 0 && i > query.row ? "" : undefined}
            title={`${i}: ${real(weight)}`}
            style={share > 0 ? `background:color-mix(in srgb, var(--nni-output) ${share}%, transparent)` : undefined}
          >
            {word}
          </bdi>
        );
      })}
    </p>
  );
}
