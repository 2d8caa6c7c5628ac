// The histograms of the selected site's activation and gradient.
import { useMemo } from "preact/hooks";
import { AXES, useLog } from "../charts/axis";
import { precision, toBars } from "../charts/bins";
import { Histogram } from "../charts/Histogram";
import { histogramKey, statistic, type FrameData } from "../kernel/decode";
import { Waiting } from "../header/Waiting";
import type { Store } from "../store";
import { Choice } from "../ui/Choice";
import { count } from "../ui/format";
import { EACH } from "../ui/quantities";
import { ids } from "../ui/testids";

export function Distributions({ store, index }: { store: Store; index: number }) {
  const step = store.frame.value?.header.step;
  return (
    <section class="nni-section" aria-label="Distributions">
      <div class="nni-heading">
        <h4>{store.timeline.held.value === null && !store.saved.value ? "Distribution now" : `Distribution at step ${count(step)}`}</h4>
        <span class="nni-grow" />
        <Choice
          label="Axis of values"
          testid={ids.axis}
          value={store.axis.value}
          options={AXES}
          choose={(axis) => (store.axis.value = axis)}
        />
      </div>
      <div class="nni-pair">
        {EACH.map(({ quantity, index: q, word }) => (
          <One key={quantity} store={store} site={index} q={q} quantity={quantity} word={word} />
        ))}
      </div>
    </section>
  );
}

interface OneProps {
  store: Store;
  site: number;
  q: number;
  quantity: (typeof EACH)[number]["quantity"];
  word: string;
}

function One({ store, site, q, quantity, word }: OneProps) {
  const frame = store.frame.value;
  const before = store.timeline.pinned.value?.histograms.get(histogramKey(site, q));
  const behind = useMemo(() => (before ? toBars(before) : undefined), [before]);
  const pairs = frame?.histograms.get(histogramKey(site, q));
  const bars = useMemo(() => (pairs ? toBars(pairs) : null), [pairs]);
  const log = useLog(store.axis.value, bars, `${site} ${q}`);
  const precise = frame ? precision((name) => statistic(frame, site, q, name)) : "";
  return (
    <figure class="nni-figure" data-testid={ids.hist(quantity)}>
      <figcaption>
        <span class={`nni-q-${quantity}`}>{word}</span>
        <NotFinite frame={frame} site={site} q={q} />
      </figcaption>
      {frame && bars && bars.length > 0 ? (
        <Histogram bars={bars} log={log} quantity={quantity} word={word} behind={behind} precise={precise} />
      ) : (
        <div class="nni-nothing">
          {frame ? reason(frame, site, q, word, bars !== null) : <Waiting store={store} before="No pass yet" />}
        </div>
      )}
    </figure>
  );
}

function reason(frame: FrameData, site: number, q: number, word: string, sent: boolean): string {
  if (Number.isNaN(statistic(frame, site, q, "size"))) return `No ${word} was measured here.`;
  return sent ? "No finite value." : "Comes with the next frame.";
}

function NotFinite({ frame, site, q }: { frame: FrameData | null; site: number; q: number }) {
  if (!frame) return null;
  const found = (["nan", "posinf", "neginf"] as const)
    .map((name, i) => [statistic(frame, site, q, name), ["NaN", "+Inf", "−Inf"][i]] as const)
    .filter(([n]) => n > 0);
  if (found.length === 0) return null;
  return <span class="nni-bad">not drawn: {found.map(([n, name]) => `${count(n)} ${name}`).join(", ")}</span>;
}
