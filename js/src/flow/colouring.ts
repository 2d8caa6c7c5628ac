// The figure that colours the nodes of a flow, and its scale.
// Invariant: sizes are coloured by their logarithm (they span decades), effects and counts from 0;
// a node without a measurement has no colour, unlike the least value. ui/base.css has the colours.
import { notFiniteCount, statistic, type FrameData } from "../kernel/decode";
import type { Effect } from "../kernel/protocol";

export const COLOURINGS = ["none", "activation norm", "gradient norm", "activation std", "NaN and Inf", "effect"] as const;
export type Colouring = (typeof COLOURINGS)[number];

export interface ColourScale {
  readonly low: number;
  readonly high: number;
  /** Whether the scale is logarithmic. */
  readonly log: boolean;
  /** Site key -> a number from 0 to 1; missing if not measured. */
  readonly shares: ReadonlyMap<string, number>;
  readonly values: ReadonlyMap<string, number>;
}

export function nodeValue(figure: Colouring, frame: FrameData | null, index: number, effect: Effect | null, key: string): number {
  if (figure === "effect") {
    const found = effect?.sites.find((one) => one.site === key);
    return found ? (found.change ?? Infinity) : NaN;
  }
  if (!frame || figure === "none") return NaN;
  switch (figure) {
    case "activation norm":
      return statistic(frame, index, 0, "norm");
    case "gradient norm":
      return statistic(frame, index, 1, "norm");
    case "activation std":
      return statistic(frame, index, 0, "std");
    case "NaN and Inf":
      return notFiniteCount((name) => statistic(frame, index, 0, name));
  }
}

export function colourScale(figure: Colouring, values: ReadonlyMap<string, number>): ColourScale {
  const log = figure !== "effect" && figure !== "NaN and Inf";
  const known = [...values].filter(([, value]) => !Number.isNaN(value));
  const finite = known.map(([, value]) => value).filter((value) => Number.isFinite(value) && (!log || value > 0));
  const low = log ? Math.min(...finite) : 0;
  const high = Math.max(...finite);
  const at = (value: number): number => (log ? Math.log(value) : value);
  const span = at(high) - at(low);
  const shares = new Map<string, number>();
  for (const [key, value] of known) {
    if (value === Infinity) shares.set(key, 1);
    else if (finite.length === 0 || (log && value <= 0)) shares.set(key, 0);
    else shares.set(key, span > 0 ? (at(value) - at(low)) / span : value > 0 ? 1 : 0);
  }
  return { low: finite.length > 0 ? low : NaN, high: finite.length > 0 ? high : NaN, log, shares, values: new Map(known) };
}
