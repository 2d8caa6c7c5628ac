// The distributions of the selected site: what was measured in the pass on screen, and its parameters.
import { useMemo } from "preact/hooks";
import { histogramKey, parameterKey, statistic, type FrameData, type HistoryData, type SummaryData, type ParameterData } from "../kernel/decode";
import { CLEAN, type Site, type Statistic } from "../kernel/protocol";
import { NAMED_QUANTITIES } from "../kernel/quantities";
import { isState } from "../kernel/sites";
import type { Store } from "../store";
import type { Distribution, Statistics } from "./Card";

const NO_PARAMETERS: readonly ParameterData[] = [];
const TITLES = { output: "activations", gradient: "gradient" } as const;

/** What was measured of the selected site in the pass on screen. */
export function useDistributions(store: Store, index: number): readonly Distribution[] {
  const [frame, behind, histories] = [store.frame.value, store.comparison.value, store.histories.value];
  return useMemo(() => {
    const of = (one: FrameData, q: number): Statistics => (name: Statistic) => statistic(one, index, q, name);
    const state = isState(store.sites.value?.list[index]);
    return NAMED_QUANTITIES.slice(0, state ? 1 : 2).map(({ quantity, index: q }) => {
      const history = histories.get(q);
      const here = history?.header.site === index && history.header.steps > 0 ? history : undefined;
      return {
        name: quantity,
        title: state ? "state" : TITLES[quantity],
        tone: quantity,
        statistics: frame && of(frame, q),
        pairs: frame?.histograms.get(histogramKey(index, q)),
        reference: behind ? { statistics: of(behind, q), pairs: behind.histograms.get(histogramKey(index, q)) } : undefined,
        history: here,
      } satisfies Distribution;
    });
  }, [frame, behind, histories, index]);
}

/** A parameter of the selected site: its values, and their gradient where it was measured. */
export interface SiteParameter {
  readonly name: string;
  readonly path: string;
  readonly value: Distribution;
  readonly gradient: Distribution | null;
}

/** The parameters that the selected module holds itself, as the pass on screen has them, the largest first. */
export function useParameters(store: Store, site: Site, index: number): readonly SiteParameter[] {
  const [frame, behind, histories] = [store.frame.value, store.comparison.value, store.parameterHistories.value];
  // the frame may still be that of the site that was selected before
  const here = frame?.histograms.has(histogramKey(index, 0)) || frame?.parameters.every(({ path, name }) => path === (site.key ? `${site.key}/${name}` : name));
  const measured = here ? frame!.parameters : NO_PARAMETERS;
  return useMemo(() => {
    const found = measured.map((one) => toSiteParameter(one, behind, histories, index));
    const size = (one: SiteParameter): number => one.value.statistics?.("size") ?? 0;
    return found.filter((one) => one !== null).sort((a, b) => size(b) - size(a));
  }, [measured, behind, histories, index]);
}

const statisticsOf = (one: SummaryData): Statistics => (name: Statistic) => one.figures[name];

function toSiteParameter({ path, name, measured }: ParameterData, behind: FrameData | null, histories: ReadonlyMap<string, HistoryData>, index: number): SiteParameter | null {
  const unperturbed = (behind?.header.number ?? 0) <= CLEAN;
  const before = behind?.parameters.find((one) => one.path === path)?.measured;
  const toDistribution = (j: number, title: string, tone: Distribution["tone"]): Distribution | null => {
    const [one, was, history] = [measured[j], before?.[j], histories.get(parameterKey(path, j))];
    if (!one) return null;
    const same = unperturbed && was && j === 0 && (["mean", "std", "norm"] as const).every((name) => was.figures[name] === one.figures[name]);
    return {
      name: j === 0 ? name : `${name}-gradient`,
      path,
      title,
      hint: path,
      tone,
      statistics: statisticsOf(one),
      pairs: one.pairs,
      reference: was && !same ? { statistics: statisticsOf(was), pairs: was.pairs } : undefined,
      history: history?.header.site === index ? history : undefined,
    };
  };
  const value = toDistribution(0, name, "weight");
  return value && { name, path, value, gradient: toDistribution(1, `${name} gradient`, "gradient") };
}
