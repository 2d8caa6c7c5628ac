// The columns that the tree can show: the content of each, and how it is sorted and compared.
// Invariant: a figure that was not measured is NaN here, whatever the reason.
import { notFiniteCount, rowStatistic, statistic, type FrameData } from "../kernel/decode";
import { QUANTITIES, ROW_STATS, type Site, type Statistic } from "../kernel/protocol";
import type { Comparison } from "../time/comparison";
import type { Layout } from "../frame/layout";
import { NOT_MEASURED, compact, count, percent, real, shortType } from "../ui/format";

export interface Column {
  readonly id: string;
  /** The short name in the head; `name` is the full one. */
  readonly title: string;
  readonly name: string;
  /** The width of the column in the grid. That of a text is `letter` pixels for each letter of the longest one, up to
   * `most`; of these it keeps `kept` where there is little room. */
  readonly width: string | { readonly letter: number; readonly most: number; readonly kept: number };
  readonly least: number;
  /** The value to sort by; a text is sorted from A to Z first. */
  readonly text?: (site: Site) => string;
  readonly value?: (site: Site, frame: FrameData | null, index: number, moved: OutputChanges) => number;
  readonly show?: (value: number) => string;
  /** How it is compared with a pinned pass; undefined if it cannot be compared. */
  readonly comparison?: Comparison;
  readonly alarming?: boolean;
  /** What stands there if values behind the figure are not finite; "" if all are. */
  readonly bad?: (frame: FrameData | null, index: number) => string;
  /** Whether the figure is also a bar, from 0 to 1. */
  readonly meter?: boolean;
}

/** How far the output of each site moved by the perturbations, by its key. */
export type OutputChanges = ReadonlyMap<string, number>;

const OUTPUT = QUANTITIES.indexOf("output");
const GRADIENT = QUANTITIES.indexOf("gradient");

const siteStatistic =
  (quantity: number, name: Statistic) =>
  (_: Site, frame: FrameData | null, index: number): number =>
    frame ? statistic(frame, index, quantity, name) : NaN;

function notFiniteValues(_: Site, frame: FrameData | null, index: number): number {
  const counted = [OUTPUT, GRADIENT].map((q) => notFiniteCount((name) => siteStatistic(q, name)(_, frame, index)));
  const known = counted.filter((n) => !Number.isNaN(n));
  return known.length === 0 ? NaN : known.reduce((a, b) => a + b);
}

export function zeroFraction(frame: FrameData | null, index: number): number {
  return frame ? statistic(frame, index, OUTPUT, "zeros") / statistic(frame, index, OUTPUT, "size") : NaN;
}

const parameterStatistic =
  (name: (typeof ROW_STATS)[number]) =>
  (_: Site, frame: FrameData | null, index: number): number =>
    frame ? rowStatistic(frame, index, name) : NaN;

function notFiniteName(frame: FrameData | null, index: number): string {
  if (!frame) return "";
  const [nan, up, down] = (["nan", "posinf", "neginf"] as const).map((name) => statistic(frame, index, GRADIENT, name));
  return nan > 0 ? "NaN" : up > 0 || down > 0 ? "Inf" : "";
}

const NUMBER_COLUMN = { width: "66px", least: 66, show: real } as const;

export const COLUMNS: readonly Column[] = [
  { id: "type", title: "type", name: "Type", width: { letter: 8.5, most: 132, kept: 0 }, least: 44, text: (site) => site.kind },
  { id: "shape", title: "output", name: "Output shape, for the example", width: { letter: 6.7, most: 160, kept: 94 }, least: 46, text: (site) => site.output },
  { id: "parameters", title: "params", name: "Parameters", width: "64px", least: 64, value: (site) => site.parameters, show: compact },
  { id: "flops", title: "FLOPs", name: "FLOPs", width: "64px", least: 64, value: (site) => site.flops ?? NaN, show: compact },
  { id: "ms", title: "time, ms", name: "Time of a step with submodules, by insp.profile", ...NUMBER_COLUMN, value: (site) => site.step_ms ?? NaN },
  { id: "kept", title: "kept", name: "Bytes kept for the backward pass, with submodules", ...NUMBER_COLUMN, value: (site) => site.kept_bytes ?? NaN, show: compact },
  { id: "possible", title: "of poss.", name: "FLOPs, of those possible in that time", ...NUMBER_COLUMN, value: (site) => site.of_possible ?? NaN, show: percent },
  { id: "calls", title: "calls", name: "Calls in one pass", width: "48px", least: 48, value: (site) => site.calls, show: count },
  { id: "spark", title: "activations", name: "Activations, as a sparkline", width: "72px", least: 72 },
  { id: "mean", title: "mean", name: "Activation mean", ...NUMBER_COLUMN, value: siteStatistic(OUTPUT, "mean"), comparison: "difference" },
  { id: "std", title: "std", name: "Activation std", ...NUMBER_COLUMN, value: siteStatistic(OUTPUT, "std"), comparison: "ratio" },
  { id: "norm", title: "‖activ.‖", name: "Activation norm", ...NUMBER_COLUMN, value: siteStatistic(OUTPUT, "norm"), comparison: "ratio" },
  { id: "min", title: "min", name: "Activation min", ...NUMBER_COLUMN, value: siteStatistic(OUTPUT, "min"), comparison: "difference" },
  { id: "max", title: "max", name: "Activation max", ...NUMBER_COLUMN, value: siteStatistic(OUTPUT, "max"), comparison: "difference" },
  { id: "zeros", title: "zeros", name: "Activation zeros, in percent", ...NUMBER_COLUMN, value: (_, frame, i) => zeroFraction(frame, i), show: percent, comparison: "points" },
  { id: "gradient", title: "‖gradient‖", name: "Gradient norm", ...NUMBER_COLUMN, value: siteStatistic(GRADIENT, "norm"), comparison: "ratio", bad: notFiniteName },
  { id: "update", title: "Δw ÷ w", name: "Norm of the update, divided by the norm of the weights", ...NUMBER_COLUMN, value: parameterStatistic("update_ratio"), comparison: "ratio" },
  { id: "lost", title: "Δw lost", name: "Update that the parameter's dtype rounds to nothing, in percent of its elements", ...NUMBER_COLUMN, value: parameterStatistic("update_lost"), show: percent, comparison: "points" },
  { id: "weights", title: "‖w‖", name: "Norm of the parameters", ...NUMBER_COLUMN, value: parameterStatistic("parameter_norm"), comparison: "ratio" },
  { id: "weight-gradient", title: "‖∇w‖", name: "Norm of the parameters' gradient", ...NUMBER_COLUMN, value: parameterStatistic("parameter_gradient_norm"), comparison: "ratio" },
  { id: "moved", title: "moved", name: "Change of the output by the perturbations, in percent of its norm", width: "60px", least: 60, value: (site, _, __, moved) => moved.get(site.key) ?? NaN, show: percent, meter: true },
  { id: "gradient-std", title: "grad. std", name: "Gradient std", ...NUMBER_COLUMN, value: siteStatistic(GRADIENT, "std"), comparison: "ratio" },
  { id: "nonfinite", title: "NaN/Inf", name: "NaN and Inf, activation and gradient", ...NUMBER_COLUMN, value: notFiniteValues, show: count, comparison: "difference", alarming: true },
]; // prettier-ignore

/** The columns that a layout has, unless others were chosen. That of the update is there once one was seen; while
 * something is perturbed, how far it moved stands in its place. After `insp.profile` there is the time. */
export function defaultColumns(layout: Layout, perturbed: boolean, updates: boolean, profiled: boolean): ReadonlySet<string> {
  const more = { narrow: [], medium: ["type", "shape"], side: [], wide: ["shape"] }[layout];
  return new Set([...more, "spark", "gradient", profiled ? "ms" : "", ...(perturbed ? ["moved"] : updates ? ["update"] : [])]);
}

/** The least width of the module's own column, which gets the width that remains: of the longest name two badges and
 * its place in the tree included, but no more than `NAME_WIDTH` pixels or a third. */
const NAME_WIDTH = 112;
const GAP = 8;

/** The columns as a grid, and the width below which the rows scroll sideways. */
export function columnGrid(columns: readonly Column[], sites: readonly Site[]): { readonly grid: string; readonly least: number } {
  const sized = columns.map(({ width, least, text }) => {
    if (typeof width === "string") return { width, least };
    const longest = sites.reduce((most, site) => Math.max(most, shortType(text!(site)).length), 0);
    const needed = Math.max(Math.min(Math.ceil(longest * width.letter), width.most), least);
    const kept = Math.max(Math.min(needed, width.kept), least);
    return { width: `minmax(${kept}px, ${needed}px)`, least: kept };
  });
  const needed = sites.reduce((most, site) => Math.max(most, 12 * site.depth + 7 * site.name.length), 0) + 75;
  const name = { width: `minmax(min(${needed}px, max(${NAME_WIDTH}px, min(176px, 30%))), 1fr)`, least: Math.min(needed, NAME_WIDTH) };
  return {
    grid: [name, ...sized].map((column) => column.width).join(" "),
    least: [name, ...sized].reduce((sum, column) => sum + column.least + GAP, 12),
  };
}

export function columnText(column: Column, value: number): string {
  return Number.isNaN(value) ? NOT_MEASURED : column.show!(value);
}
