// The passes that the recording still has, decoded, and a search for one of them.
// Invariant: they are in ascending order of number; an index is a place on the time strip.
import { runs } from "../charts/scale";
import { lastAtMost } from "../kernel/bisect";
import { Reader } from "../kernel/decode";
import type { Passes } from "../kernel/protocol";

export interface PassTable {
  readonly count: number;
  readonly thinned: number;
  number(index: number): number;
  step(index: number): number;
  perturbed(index: number): boolean;
  kind(index: number): string;
  /** Whether the perturbations differ from those of the pass before. */
  changed(index: number): boolean;
  /** The index of the pass with this number, or of the last one before it; -1 if there is none. */
  indexOf(number: number): number;
}

const PASS_FIELDS = 5;

export function decodePasses(header: Passes, buffer: DataView | undefined): PassTable {
  const rows = new Reader(header.type, buffer, header.passes * PASS_FIELDS).floats(header.passes * PASS_FIELDS);
  const at = (index: number, field: number): number => rows[index * PASS_FIELDS + field];
  return {
    count: header.passes,
    thinned: header.thinned,
    number: (index) => at(index, 0),
    step: (index) => at(index, 1),
    perturbed: (index) => at(index, 2) !== 0,
    kind: (index) => header.kinds[at(index, 3)] ?? "",
    changed: (index) => index > 0 && at(index, 4) !== at(index - 1, 4),
    indexOf: (number) => lastAtMost(header.passes, (i) => at(i, 0), number),
  };
}

/** The steps from which to which something was perturbed. */
export function perturbedSteps(passes: PassTable): (readonly [from: number, to: number])[] {
  return runs(passes.count, passes.perturbed).map(([from, end]) => [passes.step(from), passes.step(end - 1)]);
}

export const NO_PASSES: PassTable = decodePasses({ type: "passes", version: 0, passes: 0, kinds: [], thinned: 0 }, undefined);
