// The input's picture beside what is drawn, with the place that is looked at, and how much of it shows
// through; single tiles in pictures of their own. Invariant: a picture is shown only where rows and columns of the array are those of the
// picture, and the example of each is known.
import type { ComponentChildren } from "preact";
import { useCallback, useMemo } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { InputPicture, OpacitySlider } from "../inputs/InputPicture";
import { toGrid } from "../inputs/patches";
import { thumbnail } from "../inputs/pictures";
import { Thumbnail } from "../inputs/Thumbnail";
import type { HeldArray } from "../kernel/protocol";
import { dark } from "../ui/theme";
import { colourRange } from "./cells";
import { lengthOf, type Cursor, type PictureState, type ViewAxes } from "./layout";
import { paintPicture, layOutTiles, raster, type Underlay } from "./painting";
import type { ValuesState } from "./state";

/** How many rows and columns of an array are shown. */
const rowsAndColumns = (array: HeldArray, shown: ViewAxes) => [lengthOf(array, shown.rows), lengthOf(array, shown.columns)] as const;

/** A place as shares of the height and width of a picture with these sides: top, bottom, left, right; null outside it. */
function markedShare({ row, column }: Cursor, [rows, columns]: readonly [number, number]): readonly [number, number, number, number] | null {
  return row >= 0 ? [row / rows, (row + 1) / rows, column / columns, (column + 1) / columns] : null;
}

/** What lies under the cells, with a key for what is drawn; nothing if nothing shows through. */
export function underlay(values: PictureState): (Underlay & { key: string }) | undefined {
  const [array, shown, share, grid] = [values.array.value, values.shown.value, values.share.value, values.patches.value];
  const pictures = values.pictures.value;
  if (!array || !shown || !pictures || share === 0) return undefined;
  const whole = shown.view === "patches" && grid ? ([grid.rows, grid.columns] as const) : rowsAndColumns(array, shown);
  const key = [share, pictures.pixels.length, values.index.value].join();
  return { share, whole, key, of: (tile) => thumbnail(pictures, values.example(tile)) };
}

export function BesideInput({ values, children }: { values: PictureState; children: ComponentChildren }) {
  const [array, shown, cursor, grid] = [values.array.value!, values.shown.value!, values.cursor.value, values.patches.value];
  const pictures = values.pictures.value;
  const example = values.example(cursor?.tile ?? values.box.value?.tiles[0] ?? 0);
  if (!pictures || example < 0 || example >= pictures.count) return <div class="nni-beside">{children}</div>;
  const of = shown.view === "patches" && grid;
  const at = cursor && of ? toGrid(cursor, of) : cursor;
  const mark = at && markedShare(at, of ? [of.rows, of.columns] : rowsAndColumns(array, shown));
  return (
    <div class="nni-beside">
      <InputPicture pictures={pictures} example={example} mark={mark} share={values.share} />
      {children}
    </div>
  );
}

interface TileProps {
  values: PictureState;
  tile: number;
  label: string;
  /** How much of the input's picture shows through. */
  share?: number;
}

/** One tile, as large as its place, whose shape it has. */
export function Tile({ values, tile, label, share = 0 }: TileProps) {
  const [shown, whole, cells, array] = [values.shown.value!, values.box.value!, values.drawn.value, values.array.value!];
  const [robust, night, pictures, cursor] = [values.robust.value, dark.value, values.pictures.value, values.cursor.value];
  const hue = values.hue.value;
  const range = useMemo(() => (cells ? { ...colourRange(cells, robust), hue } : null), [cells, robust, hue]);
  const marked = cursor?.tile === tile ? cursor : null;
  const paint = useCallback(
    (area: Area) => {
      const picture = cells && range ? raster(cells, range, night) : null;
      if (!picture || !cells) return;
      const at = layOutTiles(shown, { ...whole, tiles: [tile, tile + 1] }, area.width, area.height);
      const below: Underlay = { share, whole: rowsAndColumns(array, shown), of: (one) => thumbnail(pictures, values.example(one)) };
      paintPicture(area, at, cells, picture, marked, share > 0 ? below : undefined);
    },
    [cells, range, night, shown, whole, tile, share, pictures, array, values.index.value, marked && `${marked.row} ${marked.column}`],
  );
  const [rows, columns] = [whole.rows, whole.columns].map(([from, to]) => to - from) as [number, number];
  return (
    <span class="nni-tile" style={{ aspectRatio: `${Math.max(columns, 1)} / ${Math.max(rows, 1)}` }}>
      <Canvas label={label} paint={paint} />
    </span>
  );
}

/** The input's picture, the map that is chosen, and the map laid over the picture. */
export function LargeMap({ values, caption }: { values: ValuesState; caption: ComponentChildren }) {
  const [array, shown] = [values.array.value!, values.shown.value!];
  const large = values.tile.value;
  const pictures = values.pictures.value;
  const example = values.example(large);
  const name = `${array.axes[shown.tiles]} ${large}`;
  const known = pictures && example >= 0 && example < pictures.count;
  const mark = values.cursor.value && markedShare(values.cursor.value, rowsAndColumns(array, shown));
  return (
    <div class="nni-large-map">
      {known && (
        <figure>
          <span class="nni-tile" style={{ aspectRatio: `${pictures.columns} / ${pictures.rows}` }}>
            <Thumbnail pictures={pictures} example={example} testid="nni-values-thumbnail" mark={mark} />
          </span>
          <figcaption>{caption}</figcaption>
        </figure>
      )}
      <figure>
        <Tile values={values} tile={large} label={name} />
        <figcaption>
          <b>{name}</b>
        </figcaption>
      </figure>
      {known && (
        <figure>
          <Tile values={values} tile={large} label={`${name} over example ${example}`} share={values.overlayShare.value} />
          <figcaption>
            <b>
              {large} over {example}
            </b>
            <OpacitySlider share={values.overlayShare} />
          </figcaption>
        </figure>
      )}
    </div>
  );
}
