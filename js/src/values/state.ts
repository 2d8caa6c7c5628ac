// The state of the panel "Values": the arrays, the slice and window of one of them, and its cells.
// Invariants: at most one request of each kind is under way, and the last wish is always sent; an
// answer is accepted by its content, not by its time; the picture stays until other cells have
// come, so that nothing flickers.
import { batch, computed, signal } from "@preact/signals";
import { exampleAt, type InputsState } from "../inputs/state";
import type { KernelRequest, ValueMessage } from "../kernel/bridge";
import { LatestRequest } from "../kernel/latest";
import type { Arrays, HeldArray } from "../kernel/protocol";
import { decodeValues, type ReadCells } from "./cells";
import { covers, fixedIndex, lengthOf, possibleViews, readRequest, sameSlice, viewAxes, defaultView, wholeBox, withAxis, type Box, type Cursor, type PictureState, type ReadRequest, type ViewAxes, type View } from "./layout";
import { asGrid, patchGrid } from "../inputs/patches";

export type ValuesPart = Arrays["part"];

export class ValuesState implements PictureState {
  readonly part = signal<ValuesPart>("output");
  readonly clean = signal(false);
  readonly arrays = signal<Arrays | null>(null);
  /** Why there is nothing to show; "" if there is something. */
  readonly problem = signal("");
  readonly busy = signal(false);
  readonly array = signal<HeldArray | null>(null);
  readonly shown = signal<ViewAxes | null>(null);
  readonly index = signal<readonly number[]>([]);
  readonly box = signal<Box | null>(null);
  readonly component = signal<ReadRequest["component"]>("value");
  readonly robust = signal(true);
  readonly hue = computed(() => (this.part.value === "gradient" ? "orange" : "blue"));
  readonly cells = signal<ReadCells | null>(null);
  readonly cursor = signal<Cursor | null>(null);
  readonly share = signal(0);
  /** How much of it shows through the map that is laid over it. */
  readonly overlayShare = signal(0.4);
  readonly pictures = computed(() => this.inputs?.inputs.value?.pictures ?? null);
  readonly patches = computed(() => this.array.value && patchGrid(this.array.value, this.pictures.value));
  readonly drawn = computed(() => {
    const [cells, grid] = [this.cells.value, this.patches.value];
    return this.shown.value?.view !== "patches" ? cells : cells && grid && asGrid(cells, grid);
  });
  readonly large = signal(0);
  /** The tile that is shown large: the chosen one, if it is among those in sight. */
  readonly tile = computed(() => {
    const [large, [first, end]] = [this.large.value, this.box.value?.tiles ?? [0, Infinity]];
    return large >= first && large < end ? large : first;
  });
  /** The value under the cursor with every digit; null until it is known. */
  readonly exact = signal<string | null>(null);

  private most: readonly number[] = [64, 64, 64]; // many tiles at once are slow, and the room is not known yet
  private readonly opening = new LatestRequest<OpenRequest>(
    (wish, settle) => this.ask({ type: "show_values", ...wish }, settle),
    (wish, error, next) => {
      if (!next) this.opened(wish, error);
      return true;
    },
  );
  private readonly reading = new LatestRequest<ReadRequest>(
    (wish, settle) => this.ask(wish, settle),
    (wish, error, next) => {
      if (error && wish.array === this.array.value?.number) this.problem.value = error;
      return next !== null && !this.hasCells(next);
    },
  );
  private readonly pointing = new LatestRequest<ReadRequest>((wish, settle) => this.ask(wish, settle));
  private site: string | null = null;

  constructor(
    private readonly ask: (request: KernelRequest, settle: (error: string | null) => void) => void,
    private readonly inputs?: InputsState,
  ) {}

  // ---- messages ----

  receive(message: ValueMessage, buffer: DataView | undefined): void {
    if (message.type === "arrays") return this.takeArrays(message);
    const decoded = decodeValues(message, buffer);
    const array = this.array.value;
    if (!array || message.array !== array.number) return;
    if (!Array.isArray(decoded)) {
      const wish = this.wantedCells();
      if (wish && sameSlice(message, wish)) this.cells.value = decoded;
      return;
    }
    const wish = this.wantedValue();
    if (wish && sameSlice(message, wish) && String(message.starts) === String(wish.starts)) this.exact.value = decoded[0] ?? null;
  }

  private takeArrays(message: Arrays): void {
    if (message.site !== this.site || message.part !== this.part.value || message.clean !== this.clean.value) return;
    batch(() => {
      this.arrays.value = message;
      this.problem.value = "";
      const old = this.array.value;
      const same = message.arrays.find((a) => old && a.call === old.call && a.name === old.name && String(a.axes) === String(old.axes));
      this.choose(same ?? message.arrays[0] ?? null);
    });
  }

  // ---- actions of the user ----

  /** Request the arrays of a site, even those on screen: they may have changed. */
  open(site: string): void {
    if (site !== this.site) this.reset();
    this.site = site;
    const wish = { site, part: this.part.value, clean: this.clean.value };
    this.busy.value = true;
    this.opening.ask(wish);
  }

  setPart(site: string, part: ValuesPart): void {
    this.reset();
    this.part.value = part;
    this.open(site);
  }

  setClean(site: string, clean: boolean): void {
    this.clean.value = clean;
    this.open(site);
  }

  choose(array: HeldArray | null): void {
    const old = this.array.value;
    batch(() => {
      this.array.value = array;
      const like = array && old && String(array.shape) === String(old.shape) && String(array.axes) === String(old.axes);
      if (array && !like) {
        this.cells.value = null;
        this.component.value = "value";
        this.index.value = array.shape.map((_, axis) => (this.holdsExamples(axis) ? this.inputs!.example.peek() : 0));
        this.large.value = 0;
        this.setShown(viewAxes(array, defaultView(array)));
      }
    });
    this.read();
    this.point(this.cursor.value);
  }

  setView(view: View): void {
    const array = this.array.value;
    if (array && possibleViews(array, this.patches.value !== null).includes(view)) this.setShown(viewAxes(array, view));
  }

  setAxis(place: "tiles" | "rows" | "columns", axis: number): void {
    if (this.shown.value) this.setShown(withAxis(this.shown.value, place, axis));
  }

  setShown(shown: ViewAxes): void {
    const array = this.array.value;
    if (!array) return;
    batch(() => {
      this.shown.value = shown;
      this.box.value = wholeBox(array, shown);
      this.point(null);
    });
    this.read();
  }

  showAll(): void {
    if (this.shown.value) this.setShown(this.shown.value);
  }

  openTile(tile: number): void {
    const shown = this.shown.value;
    if (!shown || shown.tiles < 0) return;
    this.setShown({ ...shown, tiles: -1 });
    this.setIndex(shown.tiles, tile);
  }

  example(tile: number): number {
    const [array, shown, inputs] = [this.array.value, this.shown.value, this.inputs?.inputs.value];
    if (!array || !shown || !inputs?.pictures || this.part.value === "parameter") return -1;
    if (shown.view === "images") {
      const [rows, columns] = [lengthOf(array, shown.rows), lengthOf(array, shown.columns)];
      const distortion = Math.abs(Math.log((rows * inputs.pictures.columns) / (columns * inputs.pictures.rows)));
      if (!(distortion < 0.25 && Math.min(rows, columns) >= 2 && shown.rows < shown.columns)) return -1;
    } else if (shown.view !== "patches") return -1;
    const at = fixedIndex(array, shown, this.index.value).map((n, axis) => (axis === shown.tiles ? tile : n));
    return exampleAt(array.axes, array.shape, at, inputs);
  }

  /** Whether an axis of the array is that of the examples which all panels look at. */
  holdsExamples(axis: number): boolean {
    const [array, inputs] = [this.array.value, this.inputs?.inputs.value];
    return !!inputs && array?.axes[axis] === "batch" && array.shape[axis] === inputs.batch;
  }

  /** Go to the example that all panels look at. */
  follow(example: number): void {
    const axis = this.array.value?.axes.indexOf("batch") ?? -1;
    if (axis >= 0 && this.holdsExamples(axis) && this.index.value[axis] !== example) this.setIndex(axis, example);
  }

  setIndex(axis: number, value: number): void {
    const length = this.array.value?.shape[axis] ?? 1;
    const next = [...this.index.value];
    next[axis] = Math.min(Math.max(Math.round(value), 0), Math.max(length - 1, 0));
    this.index.value = next;
    if (this.holdsExamples(axis)) this.inputs!.choose(next[axis]!);
    this.read();
    this.point(this.cursor.value);
  }

  setBox(box: Box): void {
    this.box.value = box;
    this.read();
  }

  setComponent(component: ReadRequest["component"]): void {
    this.component.value = component;
    this.read();
  }

  setRoom(rows: number, columns: number): void {
    const tiles = this.box.value ? this.box.value.tiles[1] - this.box.value.tiles[0] : 1;
    const share = Math.ceil(Math.sqrt(tiles));
    const steps = [rows, columns].map((n) => Math.min(Math.max(Math.floor(n / share / 16) * 16, 16), tiles > 1 ? 64 : 384));
    const most = [64, ...steps];
    if (String(most) === String(this.most)) return;
    this.most = most;
    this.read();
  }

  point(cursor: Cursor | null): void {
    batch(() => {
      this.cursor.value = cursor;
      this.exact.value = null;
    });
    const wish = this.wantedValue();
    if (wish) this.pointing.ask(wish);
  }

  // ---- internals ----

  private reset(): void {
    batch(() => {
      this.arrays.value = null;
      this.array.value = null;
      this.cells.value = null;
      this.problem.value = "";
      this.cursor.value = null;
    });
  }

  private wantedCells(): ReadRequest | null {
    const [array, shown, box] = [this.array.value, this.shown.value, this.box.value];
    if (!array || !shown || !box) return null;
    // many tiles are small: the most for one would leave no room for the others
    const cells = box.tiles[1] - box.tiles[0] > 1 ? this.most.map((n) => Math.min(n, 64)) : this.most;
    const most = shown.view === "patches" ? [1, 1, array.shape[shown.columns]!] : cells;
    return readRequest(array, shown, this.index.value, box, most, this.component.value);
  }

  private wantedValue(): ReadRequest | null {
    const [wish, at] = [this.wantedCells(), this.cursor.value];
    if (!wish || !at) return null;
    const starts = [at.tile, at.row, at.column];
    return { ...wish, exact: true, starts, ends: starts.map((n) => n + 1), most: [1, 1, 1] };
  }

  private read(): void {
    const wish = this.wantedCells();
    if (wish && !this.hasCells(wish)) this.reading.ask(wish);
  }

  private hasCells(wish: ReadRequest): boolean {
    return this.cells.value !== null && covers(this.cells.value.header, wish);
  }

  private opened({ site, part }: OpenRequest, error: string | null): void {
    // from a module that attends to one that does not: its output is there
    if (error !== null && part === "attention" && site === this.site) return this.setPart(site, "output");
    batch(() => {
      this.busy.value = false;
      if (error === null) return;
      this.reset();
      this.problem.value = error;
    });
  }
}

interface OpenRequest {
  readonly site: string;
  readonly part: ValuesPart;
  readonly clean: boolean;
}
