// The input's picture beside what is drawn, with the place that is looked at, and how much of it shows
// through. Invariant: a picture is shown only where rows and columns of the array are those of the
// picture, and the example of each is known.
import type { ComponentChildren } from "preact";
import { LaidOver } from "../inputs/LaidOver";
import { thumbnail } from "../inputs/pictures";
import { lengthOf, type Pictured } from "./layout";
import type { Under } from "./painting";
import { toGrid } from "../inputs/patches";

/** What lies under the cells, with a key for what is drawn; nothing if nothing shows through. */
export function under(values: Pictured): (Under & { key: string }) | undefined {
  const [array, shown, share, grid] = [values.array.value, values.shown.value, values.share.value, values.patches.value];
  const pictures = values.pictures.value;
  if (!array || !shown || !pictures || share === 0) return undefined;
  const whole = shown.view === "patches" && grid ? ([grid.rows, grid.columns] as const) : ([lengthOf(array, shown.rows), lengthOf(array, shown.columns)] as const);
  const key = [share, pictures.pixels.length, values.index.value].join();
  return { share, whole, key, of: (tile) => thumbnail(pictures, values.example(tile)) };
}

export function Beside({ values, children }: { values: Pictured; children: ComponentChildren }) {
  const [array, shown, cursor, grid] = [values.array.value!, values.shown.value!, values.cursor.value, values.patches.value];
  const pictures = values.pictures.value;
  const example = values.example(cursor?.tile ?? values.box.value?.tiles[0] ?? 0);
  if (!pictures || example < 0 || example >= pictures.count) return <div class="nni-beside">{children}</div>;
  const of = shown.view === "patches" && grid;
  const at = cursor && of ? toGrid(cursor, of) : cursor;
  const [rows, columns] = of ? [of.rows, of.columns] : [lengthOf(array, shown.rows), lengthOf(array, shown.columns)];
  const mark = at && at.row >= 0 ? ([at.row / rows, (at.row + 1) / rows, at.column / columns, (at.column + 1) / columns] as const) : null;
  return (
    <div class="nni-beside">
      <LaidOver pictures={pictures} example={example} mark={mark} share={values.share} />
      {children}
    </div>
  );
}
