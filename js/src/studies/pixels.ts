// How much each pixel counts, as the cells of a picture.
// Invariant: the input's picture lies under the cells only if they are of its own pixels.
import { computed, signal } from "@preact/signals";
import type { InputsState } from "../inputs/state";
import type { Attributed, HeldArray } from "../kernel/protocol";
import type { Cells } from "../values/cells";
import { wholeBox, type Box, type Cursor, type PictureState, type ViewAxes } from "../values/layout";

const PIXEL_VIEW: ViewAxes = { view: "images", tiles: -1, rows: 0, columns: 1, over: -1 };

export class PixelsState implements PictureState {
  readonly shown = signal(PIXEL_VIEW);
  readonly index = signal([]);
  readonly patches = signal(null);
  readonly large = signal(0);
  readonly cursor = signal<Cursor | null>(null);
  readonly robust = signal(false);
  readonly hue = signal("orange" as const);
  readonly share = signal(0.4);
  /** Those whose pixels are attributed; null if the scores are not of a picture's pixels. */
  readonly pictures = computed(() => {
    const found = this.found();
    const pictures = found && this.inputs.picturesOf(found.batch);
    if (!found || !pictures || found.example >= pictures.count) return null;
    const sides = [pictures.rows, pictures.columns].map((side) => Math.ceil(side / found.blocks));
    return String(sides) === String(found.shape) ? pictures : null;
  });
  readonly array = computed((): HeldArray | null => {
    const found = this.found();
    if (found?.shape.length !== 2) return null;
    const pictures = this.pictures.value;
    const shape = pictures ? [pictures.rows, pictures.columns] : found.shape.map((side) => side * found.blocks);
    return { number: 0, call: 0, name: "", shape, dtype: "float64", axes: ["height", "width"], bytes: 0 };
  });
  readonly box = computed(() => {
    const [array, zoomed] = [this.array.value, this.zoomed.value];
    if (!array) return null;
    const fits = zoomed && zoomed.rows[1] <= array.shape[0]! && zoomed.columns[1] <= array.shape[1]!;
    return fits ? zoomed : wholeBox(array, PIXEL_VIEW);
  });
  readonly drawn = computed((): Cells | null => {
    const [found, array] = [this.found(), this.array.value];
    if (!found || !array) return null;
    const header = { starts: [0, 0, 0], ends: [1, ...array.shape], block: [1, found.blocks, found.blocks], counts: [1, ...found.shape] };
    return { header, mean: Float64Array.from(found.scores, (one) => one ?? NaN), low: null, high: null, bad: null };
  });
  private readonly zoomed = signal<Box | null>(null);

  constructor(
    private readonly found: () => Attributed | null,
    private readonly inputs: InputsState,
  ) {}

  example(): number {
    return this.pictures.value ? this.found()!.example : -1;
  }

  setBox(box: Box): void {
    this.zoomed.value = box;
  }

  showAll(): void {
    this.zoomed.value = null;
  }

  point(cursor: Cursor | null): void {
    this.cursor.value = cursor;
  }

  setRoom(): void {} // all cells are here

  openTile(): void {} // there is one
}
