// The panel "Attention": the matrix of one head, all heads to choose from, and what the query under the
// crosshair looks at: the text coloured by its weights, and the keys with the greatest.
// Invariant: while nothing is pointed at, the last query is shown, so that there is something to read.
import { Examples } from "../inputs/Examples";
import type { Site } from "../kernel/protocol";
import { PythonLine } from "../python/PythonLine";
import type { Store } from "../store";
import { Tile } from "../values/Tiles";
import { Legend } from "../values/Legend";
import { Sliders } from "../values/Options";
import { Picture } from "../values/Picture";
import { lengthOf, type Cursor } from "../values/layout";
import { valuesExpression, shapeText } from "../values/text";
import { ValuesPlaceholder, Readout, ValuesSource, useValues } from "../values/ValuesPanel";
import { HeadStats } from "./HeadStats";
import { topKeys, TopKeys } from "./TopKeys";

interface Props {
  store: Store;
  site: Site;
}

/** The pattern, where its values can be had, and what the heads did over the steps. */
export function AttentionPanel(props: Props) {
  const { sites, missingPanels } = props.store;
  return (
    <>
      {sites.value?.attending.has(props.site.key) && !missingPanels.value.has("values") && <AttentionMatrix {...props} />}
      <HeadStats {...props} />
    </>
  );
}

function AttentionMatrix({ store, site }: Props) {
  useValues(store, site, true);
  const { values, inputs } = store;
  const [arrays, array, shown, box] = [values.arrays.value, values.array.value, values.shown.value, values.box.value];
  const ready = arrays && array && shown && box && values.problem.value === "" && arrays.part === "attention";
  if (!ready) return <ValuesPlaceholder store={store} />;
  const large = values.tile.value;
  const cells = values.drawn.value;
  const heads = shown.tiles < 0 ? [] : Array.from({ length: box.tiles[1] - box.tiles[0] }, (_, i) => box.tiles[0] + i);
  const last: Cursor = { tile: large, row: Math.max(Math.ceil(box.rows[1]) - 1, 0), column: 0 };
  const query = values.cursor.value ?? last;
  const found = cells ? topKeys(cells, query, lengthOf(array, shown.columns)) : [];
  const name = shown.tiles < 0 ? "" : array.axes[shown.tiles]!;
  return (
    <section class="nni-attention" aria-label="Attention">
      <div class="nni-matrix">
        <Picture
          values={values}
          inputs={inputs}
          label={`attention of ${site.key || "the model"}, ${shapeText(array)}${name && `, ${name} ${large}`}`}
          drawn={null}
          single
          marked={found[0] ? { ...query, column: found[0].from } : query}
        />
      </div>
      {heads.length > 1 && (
        <div class="nni-heads" role="group" aria-label={`${name}s`}>
          {heads.map((head) => (
            <button
              key={head}
              type="button"
              aria-pressed={head === large}
              aria-label={`${name} ${head}`}
              data-testid={`nni-attention-head-${head}`}
              onClick={() => {
                values.large.value = head;
                if (values.cursor.value) values.point({ ...values.cursor.value, tile: head });
              }}
            >
              <Tile values={values} tile={head} label="" />
              <span>{head}</span>
            </button>
          ))}
        </div>
      )}
      <TopKeys store={store} query={query} keys={found} />
      <div class="nni-values-foot">
        {cells && <Legend values={values} cells={cells} />}
        <Readout values={values} inputs={inputs} />
      </div>
      <div class="nni-axes">
        <Sliders values={values} array={array} shown={shown} inputs={inputs} examples={false} />
      </div>
      <Examples store={store} />
      <ValuesSource values={values} />
      <PythonLine text={valuesExpression(arrays, array, shown, values.index.value)} testid="nni-values-expression" line={inputs.line} />
    </section>
  );
}
