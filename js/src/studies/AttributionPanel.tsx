// The panel "Attribution": how much each token or pixel of the input counts for an output.
import { useCallback, useMemo, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { LaidOver } from "../inputs/LaidOver";
import { thumbnail } from "../inputs/pictures";
import { visible } from "../inputs/state";
import type { Attributed, Pictures, Study } from "../kernel/protocol";
import { Python, quoted } from "../python/Python";
import type { Store } from "../store";
import { exact, real } from "../ui/format";
import { ids } from "../ui/testids";
import { dark } from "../ui/theme";
import { rangeOf, type Range } from "../values/cells";
import { ColourBar } from "../values/Legend";
import { colours, css, NOT_FINITE, shade } from "../charts/colour";
import { Strip } from "../words/Strip";
import { ExampleNumber, Form, Now, ofExample, Token, Whole } from "./Parts";

type Method = Study["method"];
const METHODS: Readonly<Record<Method, string>> = {
  gradient: "gradient",
  gradient_times_input: "gradient × input",
  integrated_gradients: "integrated gradients",
};
const LARGEST = 320;

export function AttributionPanel({ store }: { store: Store }) {
  const { studies, inputs } = store;
  const wish = studies.wish.value;
  const shown = studies.attribution.value;
  const found = shown?.found ?? null;
  const example = inputs.example.value;
  studies.useExample("attribution", example, store.replay.value === "");
  const given = [
    wish.token !== null && `output=${wish.token}`,
    `method=${quoted(wish.method)}`,
    wish.position !== -1 && `position=${wish.position}`,
  ].filter(Boolean);
  return (
    <section class="nni-words-panel" aria-label="Attribution">
      <p class="nni-faint nni-small">How much each token or pixel of the input counts for an output. Every example of the batch is attributed by itself.</p>
      <Form store={store} name="Compute an attribution" running={shown?.now.running ?? false} start={() => studies.ask("attribution", { example }, true)}>
        <label>
          by
          <select value={wish.method} data-testid={ids.attributionMethod} onChange={(event) => studies.change({ method: event.currentTarget.value as Method })}>
            {(Object.keys(METHODS) as Method[]).map((method) => (
              <option key={method} value={method}>
                {METHODS[method]}
              </option>
            ))}
          </select>
        </label>
        <Token name="class or token" hint="largest" value={wish.token} choose={(token) => studies.change({ token })} />
        <Whole
          name="at position"
          title="Of logits at each position, the position whose logit is attributed; -1 is the last."
          least={-Infinity}
          value={wish.position}
          testid={ids.attributionPosition}
          choose={(position) => studies.change({ position })}
        />
        <ExampleNumber store={store} />
      </Form>
      <Now store={store} now={shown?.now} found={found ? saidOf(found) : ""} />
      {found && <Scores store={store} found={found} />}
      <Python text={`insp.attribute(${given.join(", ")})${ofExample(example)}`} testid={ids.attributionPython} />
    </section>
  );
}

function saidOf(found: Attributed): string {
  const of = found.of ? `what ${found.of} returns` : "the input";
  const what = found.word ? `“${visible(found.word)}”` : "the largest logit";
  const said = `${METHODS[found.method as Method]} of ${what} (${real(found.output)}) by ${of}, of ${found.source}.`;
  if (found.difference === null) return said;
  const sum = found.scores.reduce<number>((all, one) => all + (one ?? NaN), 0);
  return `${said} The scores add up to ${real(sum)}; the output differs from the baseline's by ${real(found.difference)}.`;
}

function Scores({ store, found }: { store: Store; found: Attributed }) {
  const [at, point] = useState<number | null>(null);
  const values = useMemo(() => Float64Array.from(found.scores, (one) => one ?? NaN), [found]);
  const range = useMemo(() => rangeOf({ mean: values, low: null, high: null }, false), [values]);
  const flat = found.shape.length < 2;
  const words = useMemo(() => (found.words.length > 0 ? found.words : found.scores.map((_, i) => String(i))), [found]);
  return (
    <>
      {flat ? (
        <Strip words={words} values={values} range={range} at={at} point={point} label={`The ${words.length} places of the input, coloured by how much each counts.`} />
      ) : (
        <Pixels store={store} found={found} values={values} range={range} at={at} point={point} />
      )}
      <p class="nni-told" aria-live="polite" data-testid={ids.attributionTold} data-value={at === null ? "" : exact(values[at])}>
        {at === null ? (
          <span class="nni-faint">Point at a {flat ? "place" : "pixel"} for its score</span>
        ) : flat ? (
          <>
            {at} <bdi class="nni-word">{visible(words[at] ?? "")}</bdi> {real(values[at])}
          </>
        ) : (
          `row ${Math.floor(at / found.shape[1]!) * found.blocks}, column ${(at % found.shape[1]!) * found.blocks}${found.blocks > 1 ? `, the sum of ${found.blocks} × ${found.blocks} pixels` : ""}: ${real(values[at])}`
        )}
      </p>
      <div class="nni-legend" data-testid={ids.attribution} data-value={values.length}>
        <ColourBar range={range} />
        <span class="nni-faint">{range.signed ? "Blue counts against, orange for it." : "How much each counts."}</span>
      </div>
    </>
  );
}

/** The picture whose pixels are attributed; null if the scores are not those of a picture's pixels. */
function pictureOf(store: Store, { shape, blocks, example }: Attributed): Pictures | null {
  const pictures = store.inputs.inputs.value?.pictures ?? null;
  if (!pictures || example >= pictures.count) return null;
  const sides = [pictures.rows, pictures.columns].map((side) => Math.ceil(side / blocks));
  return sides.every((side, i) => side === shape[i]) ? pictures : null;
}

interface PixelsProps {
  store: Store;
  found: Attributed;
  values: Float64Array;
  range: Range;
  at: number | null;
  point: (at: number | null) => void;
}

function Pixels({ store, found, values, range, at, point }: PixelsProps) {
  const [rows, columns] = found.shape as [number, number];
  const pictures = pictureOf(store, found);
  const share = pictures ? store.values.share.value : 0;
  const size = Math.max(1, Math.min(24, Math.floor(LARGEST / Math.max(rows, columns))));
  const night = dark.value;
  const paint = useCallback(
    ({ context }: Area) => {
      const table = colours(range, night);
      const picture = share > 0 ? thumbnail(pictures, found.example) : null;
      if (picture) {
        context.imageSmoothingEnabled = picture.width > columns * size;
        context.drawImage(picture, 0, 0, columns * size, rows * size);
        context.globalAlpha = 1 - share;
      }
      values.forEach((value, i) => {
        context.fillStyle = Number.isFinite(value) ? css(table, shade(value, range) * 3) : css(NOT_FINITE);
        context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size, size);
      });
      context.globalAlpha = 1;
    },
    [values, range, night, rows, columns, size, pictures, share, found.example],
  );
  const under = (event: PointerEvent): number => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const [x, y] = [Math.floor((event.clientX - box.left) / size), Math.floor((event.clientY - box.top) / size)];
    return Math.min(Math.max(y, 0), rows - 1) * columns + Math.min(Math.max(x, 0), columns - 1);
  };
  const [row, column] = at === null ? [0, 0] : [Math.floor(at / columns), at % columns];
  const mark = at === null ? null : ([row / rows, (row + 1) / rows, column / columns, (column + 1) / columns] as const);
  const cells = (
    <div class="nni-pixels" style={{ width: `${columns * size}px` }} onPointerMove={(event) => point(under(event))} onPointerLeave={() => point(null)}>
      <Canvas width={columns * size} height={rows * size} label={`How much each of ${rows} by ${columns} pixels counts`} paint={paint} />
    </div>
  );
  if (!pictures) return cells;
  return (
    <div class="nni-beside">
      <LaidOver pictures={pictures} example={found.example} mark={mark} share={store.values.share} />
      {cells}
    </div>
  );
}
