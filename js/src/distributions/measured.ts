// The distributions of the selected site: what was measured in the pass on screen, and its parameters.
import { useMemo } from "preact/hooks";
import { histogramKey, parameterKey, statistic, type FrameData, type HistoryData, type Measured, type ParameterData, type ParameterOfFrame } from "../kernel/decode";
import { useLook } from "../kernel/looks";
import type { Site, Statistic } from "../kernel/protocol";
import { EACH } from "../kernel/quantities";
import type { Store } from "../store";
import type { Distribution, Figures } from "./Card";

const TITLES = { output: "activations", gradient: "gradient" } as const;

/** What was measured of the selected site in the pass on screen. */
export function useMeasured(store: Store, index: number): readonly Distribution[] {
  const [frame, behind, histories] = [store.frame.value, store.behind.value, store.histories.value];
  return useMemo(() => {
    const of = (one: FrameData, q: number): Figures => (name: Statistic) => statistic(one, index, q, name);
    return EACH.map(({ quantity, index: q }) => {
      const history = histories.get(q);
      const here = history?.header.site === index && history.header.steps > 0 ? history : undefined;
      return {
        name: quantity,
        title: TITLES[quantity],
        tone: quantity,
        figures: frame && of(frame, q),
        pairs: frame?.histograms.get(histogramKey(index, q)),
        before: behind ? { figures: of(behind, q), pairs: behind.histograms.get(histogramKey(index, q)) } : undefined,
        history: here,
      } satisfies Distribution;
    });
  }, [frame, behind, histories, index]);
}

/** A parameter of the selected site: its values, and their gradient where it was measured. */
export interface ParameterOfSite {
  readonly name: string;
  readonly path: string;
  readonly value: Distribution;
  readonly gradient: Distribution | null;
}

/** The parameters, the largest first: those of the pass on screen, or where it has none their present values. */
export function useParameters(store: Store, site: Site, index: number): readonly ParameterOfSite[] {
  const [frame, behind, histories] = [store.frame.value, store.behind.value, store.parameterHistories.value];
  const measured = frame && frame.parameters.length > 0 && frame.histograms.has(histogramKey(index, 0)) ? frame.parameters : null;
  const none = measured !== null || site.parameters === 0 || store.missing.value.has("parameters") || site.single;
  useLook(store.looks, "parameters", site.key, frame?.header.seq, -1, !none);
  const seen = store.looks.parameters.value;
  const list = !none && seen?.site === site.key ? seen.data?.list : undefined;
  return useMemo(() => {
    const found = measured ? measured.map((one) => ofPass(one, behind, histories, index)) : (list ?? []).map((one) => ofNow(one, site.key));
    const size = (one: ParameterOfSite): number => one.value.figures?.("size") ?? 0;
    return found.filter((one) => one !== null).sort((a, b) => size(b) - size(a));
  }, [measured, list, behind, histories, index, site.key]);
}

const figuresOf = (one: Measured): Figures => (name: Statistic) => one.figures[name];

function ofPass({ path, name, measured }: ParameterOfFrame, behind: FrameData | null, histories: ReadonlyMap<string, HistoryData>, index: number): ParameterOfSite | null {
  const before = behind?.parameters.find((one) => one.path === path)?.measured;
  const made = (j: number, title: string, tone: Distribution["tone"]): Distribution | null => {
    const [one, was, history] = [measured[j], before?.[j], histories.get(parameterKey(path, j))];
    if (!one) return null;
    return {
      name: j === 0 ? name : `${name}-gradient`,
      path,
      title,
      hint: path,
      tone,
      figures: figuresOf(one),
      pairs: one.pairs,
      before: was ? { figures: figuresOf(was), pairs: was.pairs } : undefined,
      history: history?.header.site === index ? history : undefined,
    };
  };
  const value = made(0, name, "weight");
  return value && { name, path, value, gradient: made(1, `${name} gradient`, "gradient") };
}

function ofNow({ path, array, figures, pairs }: ParameterData, site: string): ParameterOfSite {
  const name = path.startsWith(`${site}/`) ? path.slice(site.length + 1) : path;
  const value: Distribution = { name: path, path, title: name, hint: `${path}, ${array}`, tone: "weight", figures: (one) => figures[one], pairs };
  return { name, path, value, gradient: null };
}
