// The texts and numbers of the panel "Values". Invariant: a value shown as exact is exact; a text
// says so if the array is reduced.
import type { Arrays, HeldArray } from "../kernel/protocol";
import { bytes, compact, count, real } from "../ui/format";
import type { Cells } from "./cells";
import { cellAt, digits } from "./cells";
import { lengthOf, type Cursor, type ViewAxes } from "./layout";

/** Whether the cells themselves have every digit of an element. */
function areExact(array: HeldArray, shown: ViewAxes, cells: Cells): boolean {
  const wide = shown.over < 0 && /^(u?int64|complex)/.test(array.dtype);
  return !wide && cells.header.block.every((n) => n === 1);
}

/** Every digit of the element under the cursor; null until the kernel has sent it. */
export function exactAt(array: HeldArray, shown: ViewAxes, cells: Cells, cursor: Cursor, received: string | null): string | null {
  if (!areExact(array, shown, cells)) return received;
  const at = cellAt(cells, cursor.tile, cursor.row, cursor.column);
  return at < 0 ? received : digits(cells.mean[at]!);
}

/** The shortest form that is unique in the array's own precision. */
export function shortest(text: string, dtype: string): string {
  return text
    .split(" ")
    .map((part) => {
      const value = Number(part);
      if (!/^(b?float|complex64)/.test(dtype) || dtype === "float64" || !Number.isFinite(value)) return signText(part);
      for (let p = 1; p < 10; p++) {
        const short = value.toPrecision(p);
        if (Math.fround(Number(short)) === Math.fround(value)) return signText(digits(Number(short)));
      }
      return signText(part);
    })
    .map((part, i) => (i === 0 ? part : ` ${part.startsWith("−") ? "−" : "+"} ${part.replace("−", "")}i`))
    .join("");
}

function signText(text: string): string {
  return text.replace("-Infinity", "−∞").replace("Infinity", "∞").replace("e+", "e").replace(/-/g, "−");
}

/** The index of an element along each axis. */
export function indexAt(array: HeldArray, shown: ViewAxes, index: readonly number[], cursor: Cursor): number[] {
  const at = { [shown.tiles]: cursor.tile, [shown.rows]: cursor.row, [shown.columns]: cursor.column };
  return array.axes.map((_, axis) => at[axis] ?? index[axis] ?? 0);
}

/** The place of an element: "batch 0, height 3, width 4". */
export function indexText(array: HeldArray, shown: ViewAxes, index: readonly number[], cursor: Cursor): string {
  const at = indexAt(array, shown, index, cursor);
  return array.axes.flatMap((name, axis) => (axis === shown.over ? [] : [`${name} ${at[axis]}`])).join(", ");
}

/** The facts of the block under the cursor; "" if it is one element. */
export function blockText(cells: Cells, cursor: Cursor): string {
  const { block } = cells.header;
  const at = cellAt(cells, cursor.tile, cursor.row, cursor.column);
  if (at < 0 || block.every((n) => n === 1)) return "";
  const range = cells.low && cells.high && Number.isFinite(cells.low[at]!) ? `, from ${real(cells.low[at])} to ${real(cells.high[at])}` : "";
  const bad = cells.bad ? ["NaN", "+∞", "−∞"].map((name, i) => (cells.bad![i]![at]! > 0 ? `, ${count(cells.bad![i]![at])} ${name}` : "")).join("") : "";
  return `block of ${blockSize(block)}: mean ${real(cells.mean[at])}${range}${bad}`;
}

function blockSize(block: readonly number[]): string {
  return block[1] === 1 ? `${count(block[2])}` : `${count(block[1])} × ${count(block[2])}`;
}

/** The parts of the array that are on screen, and those that are not. */
export function extentText(array: HeldArray, shown: ViewAxes, cells: Cells): string {
  const { starts, ends, block } = cells.header;
  const axes = [shown.tiles, shown.rows, shown.columns];
  const windows = axes.map((axis, i) => {
    const length = lengthOf(array, axis);
    const [from, to] = [starts[i]!, Math.min(ends[i]!, length)];
    return axis < 0 || (from === 0 && to === length) ? "" : `${array.axes[axis]} ${count(from)}–${count(to - 1)} of ${count(length)}`;
  });
  const here = axes.reduce((product, axis, i) => product * (axis < 0 ? 1 : ends[i]! - starts[i]!), 1);
  const all = array.shape.reduce((a, b) => a * b, 1);
  const norm = shown.over >= 0 ? lengthOf(array, shown.over) : 1;
  const parts = [`${compact(here * norm)} of ${compact(all)} values (${bytes(array.bytes)} in all)`];
  if (norm > 1 || shown.over >= 0) parts.push(`each cell the norm over ${array.axes[shown.over]}`);
  if (block.some((n) => n > 1)) parts.push(`each cell the mean of ${blockSize(block)} of them`);
  return [...parts, ...windows.filter(Boolean)].join("; ");
}

export function arrayName(array: HeldArray, all: Arrays): string {
  const calls = new Set(all.arrays.map((a) => a.call)).size;
  const call = calls > 1 ? `call ${array.call}` : "";
  return [call, array.name].filter(Boolean).join(" ") || "the array";
}

export function shapeText(array: HeldArray): string {
  return `${array.dtype}[${array.shape.join(", ")}]`;
}

/** The Python that asks a run that happens elsewhere for such values. */
export function runExpression(arrays: Arrays, array: HeldArray): string {
  const call = `run.values(${JSON.stringify(arrays.site)})`;
  return arrays.arrays.length === 1 ? `${call}.value` : `${call}.calls[${array.call}][${JSON.stringify(array.name)}]`;
}

/** The Python that returns the same values; of an example other than the first, its own. */
export function valuesExpression(arrays: Arrays, array: HeldArray, shown: ViewAxes, index: readonly number[]): string {
  const calls = Math.max(...arrays.arrays.map((a) => a.call)) > 0;
  const attends = arrays.part === "attention";
  const parts = [JSON.stringify(attends ? arrays.site + (array.name || "@attention") : arrays.site)];
  if (arrays.part !== "output" && !attends) parts.push(`part="${arrays.part}"`);
  if (calls) parts.push(`call=${array.call}`);
  if (arrays.clean) parts.push("clean=True");
  const leaf = arrays.part === "parameter" ? `[${JSON.stringify(array.name)}]` : arrays.part === "input" || attends ? "" : array.name;
  const batch = array.axes.indexOf("batch");
  const isSlider = batch >= 0 && (leaf === array.name || attends) && ![shown.tiles, shown.rows, shown.columns, shown.over].includes(batch);
  const example = isSlider && index[batch] ? `[${":, ".repeat(batch)}${index[batch]}]` : "";
  return `insp.values(${parts.join(", ")})${leaf}${example}`;
}
