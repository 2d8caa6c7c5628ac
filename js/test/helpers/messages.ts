// Messages as the kernel sends them, of a small model, with their buffers.
import { HISTORY_BINS, HISTORY_QUANTILES, QUANTITIES, ROW_STATS, SPARK, STATISTICS, UNIT_STATS, VERSION } from "../../src/kernel/protocol";
import type { Effect, Frame, Layout, Passes, Perturbation, Site, State, Statistic, UnitStats } from "../../src/kernel/protocol";

export function site(key: string, parent: number, more: Partial<Site> = {}): Site {
  const name = key.split("/").at(-1)!;
  return {
    key, name, parent, kind: "Linear", depth: key === "" ? 0 : key.split("/").length, inputs: "float32[2]",
    output: "float32[2]", parameters: 6, flops: 12, calls: 1, stacked: 1, aliases: [], source: "model.py:1",
    perturbable: true, unseen: "", layer: -1, note: "", array: "", single: false,
    step_ms: null, kept_bytes: null, of_possible: null, counted: false, ...more,
  }; // prettier-ignore
}

export const SITES = [
  site("", -1, { name: "MLP", kind: "MLP" }),
  site("blocks", 0, { kind: "List", perturbable: false }),
  site("blocks/0", 1),
  site("blocks/1", 1, { kind: "Dropout" }),
  site("head", 0),
];

export function layout(sites: readonly Site[] = SITES, id = 1): Layout {
  return { type: "layout", version: VERSION, layout: id, model: "MLP", sites, attending: [], sequences: true, where: "" };
}

export const progress = { kind: "watch", running: true, step: 1, total: 10, rate: 2 };

export function state(more: Partial<State> = {}): State {
  return {
    type: "state", version: VERSION, seq: 1, selected: "blocks/0", perturbations: [], training_perturbed: false,
    listening: "during", compiling: 0, effect: null, no_effect: "", progress, notices: [], python: "", closed: false, waiting: [], recorded: null,
    cost: {
      plain_seconds: null, inspected_seconds: null, compilations: 0, bytes_sent: 0, frames_dropped: 0, errors: 0,
      tree_seconds: null, pass_seconds: null, step_seconds: null, tracker_seconds: null,
    },
    ...more,
  }; // prettier-ignore
}

export function perturbation(id: number, site: string, more: Partial<Perturbation> = {}): Perturbation {
  return {
    id, site, sites: [site], reach: 1, kind: "Zero", at: "output", acts_on: "value", expression: "nni.Zero()",
    strength: null, strength_name: "", low: 0, high: 0, units: 0, units_off: 0, mask: "", python: "", enabled: true, pending: false,
    compiling: false, not_acting: "", axis: -1, columns: 0, ...more,
  }; // prettier-ignore
}

export function scale(id: number, site: string, strength: number, more: Partial<Perturbation> = {}): Perturbation {
  const expression = `nni.Scale(factor=${strength})`;
  return perturbation(id, site, { kind: "Scale", expression, strength, strength_name: "factor", low: 0, high: 2, ...more });
}

export function effect(more: Partial<Effect> = {}): Effect {
  return { source: "the example", clean: {}, perturbed: {}, output_change: null, kl: null, top1_changed: null, sites: [], alone: [], moved: {}, ...more };
}

/** A frame whose every figure is `value`, except that `edit` may change the table. */
/** Where a figure stands in a frame's table. */
export const cell = (site: number, quantity: number, name: Statistic): number =>
  (site * QUANTITIES.length + quantity) * STATISTICS.length + STATISTICS.indexOf(name);

export function frame(
  seq: number,
  {
    layout: id = 1,
    step = seq as number,
    number = step as number,
    held = false,
    sites = SITES.length,
    value = 1,
    update = NaN,
    edit = (table: Float64Array): unknown => table,
  } = {},
): [Frame, DataView] {
  const cells = sites * QUANTITIES.length * STATISTICS.length;
  const floats = new Float64Array(cells + sites * ROW_STATS.length).fill(value, 0, cells).fill(NaN, cells);
  for (let i = 0; i < sites; i++) floats[cells + i * ROW_STATS.length + ROW_STATS.indexOf("update_ratio")] = update;
  edit(floats.subarray(0, cells));
  const counts = [0, 0xf8, 7, 3, 0, 7, 5]; // 3 in bin 0x3f8, 5 in bin 0x400
  const bytes = new Uint8Array(floats.byteLength + sites * QUANTITIES.length * SPARK + counts.length);
  bytes.set(new Uint8Array(floats.buffer), 0);
  bytes.set(counts, bytes.length - counts.length);
  const header: Frame = {
    type: "frame", version: VERSION, seq, layout: id, step, perturbed: false, metrics: {},
    histograms: [{ site: 2, quantity: 0, bytes: counts.length }], parameters: [], more: 0, progress: { ...progress, step }, number, held,
  }; // prettier-ignore
  return [header, new DataView(bytes.buffer)];
}

/** Passes of these (number, step, perturbed, setting), all of one kind. */
export function passes(rows: readonly (readonly [number, number, number, number])[], thinned = 0): [Passes, DataView] {
  const table = new Float64Array(rows.flatMap(([number, step, on, setting]) => [number, step, on, 0, setting]));
  return [{ type: "passes", version: VERSION, passes: rows.length, kinds: ["watch"], thinned }, new DataView(table.buffer)];
}

export const HISTORY_FLOATS = (steps: number): number =>
  steps + steps * HISTORY_QUANTILES.length + HISTORY_BINS + 1 + steps * HISTORY_BINS;

/** Figures of so many units; unit 1 is dead. */
export function units(count: number, site = "blocks/0", more: Partial<UnitStats> = {}): [UnitStats, DataView] {
  const header: UnitStats = {
    type: "units", version: VERSION, id: 1, site, each: 2, source: "the example", units: count, more: 0, why: "", axis: -1, axes: [], behind: "", ...more,
  }; // prettier-ignore
  const figures = Float64Array.from({ length: UNIT_STATS.length * count }, (_, i) => i / 8);
  figures.fill(0, UNIT_STATS.indexOf("zero_fraction") * count); // and those after it
  for (const name of ["zero_fraction", "dead"] as const) figures[UNIT_STATS.indexOf(name) * count + 1] = 1; // unit 1 is dead
  return [header, new DataView(figures.buffer)];
}
