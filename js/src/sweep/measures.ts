// What a sweep measures at each site, and its rows by one of these.
import type { Sweep, SweepRow } from "../kernel/protocol";
import { percent, real, signed } from "../ui/format";

export const MEASURES = {
  loss_change: { unit: "loss", word: "loss", title: "Change of the loss", show: signed },
  output_change: { unit: "output", word: "output", title: "Relative norm of the change of the output", show: percent },
  kl: { unit: "KL", word: "KL", title: "KL(clean || perturbed), in nats", show: real },
  top1_changed: { unit: "top-1", word: "top-1", title: "Share of the predictions that changed", show: percent },
} as const;
export type Measure = keyof typeof MEASURES;

/** Whether the model itself was set to zero, which says nothing about the model: it is no row. */
export const omitsModel = (sweep: Sweep): boolean => isZeroSweep(sweep) && sweep.rows.some((row) => row.site === "");

export const isZeroSweep = (sweep: Sweep): boolean => /^(nni\.)?Zero\(/.test(sweep.perturbation);

/** Sites that are not finite first, then the largest; sites without a figure last. */
export function rank(sweep: Sweep, measure: Measure): SweepRow[] {
  const size = (row: SweepRow): number => (row.why_not ? -1 : row[measure] === null ? Infinity : Math.abs(row[measure]));
  return sweep.rows.filter((row) => !isZeroSweep(sweep) || row.site !== "").sort((a, b) => size(b) - size(a) || 0);
}
