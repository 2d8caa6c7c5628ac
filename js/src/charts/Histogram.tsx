// One histogram as SVG: bars, an outline of another pass, an axis, and a red column for the values
// that are not finite. All bars are one path (a hundred elements cost 8 ms a frame).
// Invariants: what is under the pointer or the arrow keys is said outside, so that nothing covers the
// chart; a tall bar that is cut says how much it holds.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, percent, real, tick } from "../ui/format";
import { observeSize } from "../ui/observeSize";
import { quantile, total, type Bar } from "./bins";
import { outlineOf, placeBars, barText, type PlacedBar } from "./bars";
import { labels } from "./scale";
import { textWidth } from "./text";

export interface NotFinite {
  /** "NaN", "Inf" or both. */
  readonly name: string;
  readonly count: number;
  /** Of all values. */
  readonly share: number;
}

interface Props {
  bars: readonly Bar[];
  log: boolean;
  /** For the test ids. */
  quantity: string;
  tone: string;
  word: string;
  /** The histogram of another pass, drawn as an outline. */
  other?: readonly Bar[] | undefined;
  bad?: NotFinite | null;
  /** What `precision` says. */
  sampling: string;
  /** Takes what is known of the bar under the pointer or the keys; null if there is none. */
  setReadout: (text: string | null) => void;
}

const [WIDTH, HEIGHT] = [400, 100];
const NO_BARS: readonly Bar[] = [];

export function Histogram({ bars, log, quantity, tone, word, other = NO_BARS, bad, sampling, setReadout }: Props) {
  const [at, setAt] = useState<number | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const chart = useMemo(() => (bars.length + other.length > 0 ? placeBars(bars, other, log) : null), [bars, other, log]);
  const [length, setLength] = useState(WIDTH);
  const ticks = useMemo(() => (chart ? labels(chart.scale, length, tick, (text) => textWidth(text, svg.current)) : []), [chart, length]);
  useLayoutEffect(() => {
    const element = svg.current!;
    return observeSize(element, () => setLength(element.getBoundingClientRect().width || WIDTH));
  }, []);
  const drawn = chart?.bars ?? [];
  const all = total(bars);
  const highest = chart && chart.top > 0 ? chart.top : Math.max(...drawn.map((bar) => bar.height), 1e-9);
  const y = (bar: PlacedBar): number => HEIGHT * (1 - Math.min(bar.height / highest, 1));
  const active = at === null ? undefined : drawn[Math.min(at, drawn.length - 1)];
  const cut = chart && chart.top > 0 ? chart.cut : null;
  const go = (to: number | null): void => {
    setAt(to);
    setReadout(to === null || !drawn[to] ? null : barText(drawn[to]!, all));
  };

  const point = (event: PointerEvent): void => {
    const box = svg.current!.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const found = drawn.findIndex((bar) => x >= bar.from && x < bar.to);
    go(found >= 0 ? found : null);
  };
  const key = (event: KeyboardEvent): void => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step === 0 || drawn.length === 0) return;
    event.preventDefault();
    event.stopPropagation();
    go(Math.min(Math.max((at ?? (step > 0 ? -1 : drawn.length)) + step, 0), drawn.length - 1));
  };
  const said = [sampling || `${count(all)} values`, bars.length > 0 ? quantileText(bars) : "no finite value", bad ? `${count(bad.count)} ${bad.name}` : ""];

  return (
    <div class="nni-hist" data-bad={bad ? "" : undefined}>
      <svg
        ref={svg}
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        tabIndex={0}
        aria-label={`Histogram of the ${word}: ${said.filter(Boolean).join(", ")}`}
        onPointerMove={point}
        onPointerLeave={() => go(null)}
        onBlur={() => go(null)}
        onKeyDown={key}
      >
        {ticks.map((t) => (
          <line key={t.value} class="nni-grid" x1={t.at * WIDTH} x2={t.at * WIDTH} y1={0} y2={HEIGHT} />
        ))}
        <path class={`nni-bar-${tone}`} d={drawn.map((bar) => (bar === cut ? "" : barPath(bar, y(bar)))).join("")} />
        {cut && <path class={`nni-bar-${tone} nni-cut`} d={barPath(cut, y(cut))} />}
        {chart && chart.other.length > 0 && <path class="nni-outline" data-testid={`nni-behind-${quantity}`} d={outlineOf({ ...chart, top: highest }, WIDTH, HEIGHT)} />}
        {active && <path class="nni-active-bar" d={barPath(active, y(active))} />}
        <line class="nni-axis" x1={0} x2={WIDTH} y1={HEIGHT} y2={HEIGHT} />
      </svg>
      {cut && (
        <span class="nni-cut-share" title="This bar is higher than the chart" style={{ [cut.from > 0.5 ? "right" : "left"]: `${100 * (cut.from > 0.5 ? 1 - cut.from : cut.to)}%` }}>
          ▴ {percent(cut.count / all)}
        </span>
      )}
      {bars.length === 0 && <span class="nni-hist-none">no finite value</span>}
      {bad && (
        <span class="nni-hist-bad" title={`${count(bad.count)} values, ${percent(bad.share)}, are ${bad.name}`} aria-hidden="true">
          <i style={{ height: `${100 * bad.share}%` }} />
        </span>
      )}
      <div class="nni-ticks" aria-hidden="true">
        {ticks.map((t) => (
          <span key={t.value} style={{ left: `${t.left}px` }}>
            {t.text}
          </span>
        ))}
      </div>
      {bad && (
        <span class="nni-hist-bad-name" aria-hidden="true">
          {bad.name}
        </span>
      )}
    </div>
  );
}

function barPath(bar: PlacedBar, y: number): string {
  const width = Math.max((bar.to - bar.from) * WIDTH - 0.6, 0.8);
  return `M${(bar.from * WIDTH).toFixed(2)} ${HEIGHT}V${y.toFixed(2)}h${width.toFixed(2)}V${HEIGHT}z`;
}

function quantileText(bars: readonly Bar[]): string {
  return `median about ${real(quantile(bars, 0.5))}, 1 % to 99 % from about ${real(quantile(bars, 0.01))} to ${real(quantile(bars, 0.99))}`;
}
