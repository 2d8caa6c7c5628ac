// The distributions of the selected site: what was measured in the pass on screen, and its parameters.
import { useMemo } from "preact/hooks";
import { histogramKey, statistic, type FrameData } from "../kernel/decode";
import { useLook } from "../kernel/looks";
import type { Site, Statistic } from "../kernel/protocol";
import { EACH } from "../kernel/quantities";
import type { Store } from "../store";
import type { Distribution, Figures } from "./Card";

const TITLES = { output: "activations", gradient: "gradient" } as const;

/** What was measured of the selected site in the pass on screen. */
export function useMeasured(store: Store, index: number): readonly Distribution[] {
  const [frame, pinned, histories] = [store.frame.value, store.timeline.pinned.value, store.histories.value];
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
        before: pinned ? { figures: of(pinned, q), pairs: pinned.histograms.get(histogramKey(index, q)) } : undefined,
        history: here,
      } satisfies Distribution;
    });
  }, [frame, pinned, histories, index]);
}

/** The present values of the parameters, the largest first. */
export function useParameters(store: Store, site: Site): readonly Distribution[] {
  const none = site.parameters === 0 || store.missing.value.has("parameters") || site.single;
  useLook(store.looks, "parameters", site.key, store.frame.value?.header.seq, -1, !none);
  const seen = store.looks.parameters.value;
  const list = !none && seen?.site === site.key ? seen.data?.list : undefined;
  return useMemo(
    () =>
      [...(list ?? [])].sort((a, b) => b.figures.size - a.figures.size).map(({ path, array, figures, pairs }) => ({
        name: path,
        path,
        title: path.startsWith(`${site.key}/`) ? path.slice(site.key.length + 1) : path,
        hint: `${path}, ${array}`,
        tone: "weight",
        figures: (name: Statistic) => figures[name],
        pairs,
      })),
    [list, site.key],
  );
}
