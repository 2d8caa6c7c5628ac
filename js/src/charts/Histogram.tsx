// One histogram as SVG: bars, axis, and the range and count under the pointer or the arrow keys.
// On the log axis bins keep their own edges; on the linear one their counts are spread over equal
// widths. Areas are counts on either; all bars are one path (a hundred elements cost 8 ms a frame).
// Invariant: a tall bar of zeros is cut and labelled, so that the rest stays readable; the line
// about a bar keeps its place even when it is empty.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, percent, real, tick } from "../ui/format";
import { ids } from "../ui/testids";
import { isZero, quantile, rebin, total, type Bar } from "./bins";
import { pinnedOutline } from "./outline";
import { labels, linear, symlog, type Scale } from "./scale";
import { textWidth } from "./text";

interface Props {
  bars: readonly Bar[];
  log: boolean;
  quantity: string;
  word: string;
  /** The histogram of the pinned pass, drawn as an outline. */
  behind?: readonly Bar[] | undefined;
  /** What `precision` says. */
  precise: string;
}

const WIDTH = 400;
const HEIGHT = 110;
const LINEAR_BARS = 64;
/** The share of counts nearest zero that the log axis may draw as its middle. */
const MIDDLE = 0.03;

interface Drawn extends Bar {
  readonly from: number;
  readonly to: number;
  readonly text: string;
}

export function Histogram({ bars, log, quantity, word, behind, precise }: Props) {
  const [at, setAt] = useState<number | null>(null);
  const svg = useRef<SVGSVGElement>(null);
  const { drawn, scale } = useMemo(() => (log ? onLog(bars) : onLinear(bars)), [bars, log]);
  const [length, setLength] = useState(WIDTH);
  const ticks = useMemo(() => labels(scale, length, tick, (text) => textWidth(text, svg.current)), [scale, length]);
  useLayoutEffect(() => {
    const element = svg.current!;
    const measure = (): void => setLength(element.getBoundingClientRect().width || WIDTH);
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const all = total(bars);
  const values = precise || `${count(all)} values`;
  const heights = drawn.map((bar) => bar.count / Math.max(bar.to - bar.from, 1e-9));
  const { top, cut } = ceiling(heights);
  const y = (i: number): number => HEIGHT * (1 - Math.min(heights[i] / top, 1));
  const active = at === null ? undefined : drawn[Math.min(at, drawn.length - 1)];

  const point = (event: PointerEvent): void => {
    const box = svg.current!.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const found = drawn.findIndex((bar) => x >= bar.from && x < bar.to);
    setAt(found >= 0 ? found : null);
  };
  const key = (event: KeyboardEvent): void => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step === 0) return;
    event.preventDefault();
    event.stopPropagation();
    setAt(Math.min(Math.max((at ?? (step > 0 ? -1 : drawn.length)) + step, 0), drawn.length - 1));
  };

  return (
    <div class="nni-histogram">
      <svg
        ref={svg}
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        tabIndex={0}
        aria-label={`Histogram of the ${word}: ${values}, ${summary(bars)}`}
        onPointerMove={point}
        onPointerLeave={() => setAt(null)}
        onBlur={() => setAt(null)}
        onKeyDown={key}
      >
        {ticks.map((t) => (
          <line key={t.value} class="nni-grid" x1={t.at * WIDTH} x2={t.at * WIDTH} y1={0} y2={HEIGHT} />
        ))}
        <path class={`nni-bar-${quantity}`} d={drawn.map((bar, i) => (i === cut ? "" : outline(bar, y(i)))).join("")} />
        {cut !== null && <path class={`nni-bar-${quantity} nni-cut`} d={outline(drawn[cut], y(cut))} />}
        {behind && <path class="nni-behind" data-testid={ids.behind(quantity)} d={pinnedOutline(behind, all, scale, top, WIDTH, HEIGHT)} />}
        {active && <path class="nni-active" d={outline(active, y(drawn.indexOf(active)))} />}
        <line class="nni-axis" x1={0} x2={WIDTH} y1={HEIGHT} y2={HEIGHT} />
      </svg>
      <div class="nni-ticks" aria-hidden="true">
        {ticks.map((t) => (
          <span key={t.value} style={{ left: `${t.left}px` }}>
            {t.text}
          </span>
        ))}
      </div>
      <p class="nni-told" data-testid={ids.histCount(quantity)} data-value={Math.round(all)} title={precise} aria-live={active ? "polite" : "off"}>
        {active
          ? `${active.text}: ${count(active.count)} (${percent(active.count / all)})`
          : cut === null
            ? values
            : `${values}; cut bar: ${percent(drawn[cut].count / all)}`}
      </p>
    </div>
  );
}

function outline(bar: Drawn, y: number): string {
  const width = Math.max((bar.to - bar.from) * WIDTH - 0.6, 0.8);
  return `M${(bar.from * WIDTH).toFixed(2)} ${HEIGHT}V${y.toFixed(2)}h${width.toFixed(2)}V${HEIGHT}z`;
}

const range = (low: number, high: number): string => `${real(low)} … ${real(high)}`;

function summary(bars: readonly Bar[]): string {
  return `median about ${real(quantile(bars, 0.5))}, 1 % to 99 % from about ${real(quantile(bars, 0.01))} to ${real(quantile(bars, 0.99))}`;
}

function onLinear(bars: readonly Bar[]): { drawn: Drawn[]; scale: Scale } {
  const equal = rebin(bars, LINEAR_BARS);
  const scale = linear(equal[0].low, equal[equal.length - 1].high);
  const drawn = equal.map((bar, i) => ({
    ...bar,
    from: i / LINEAR_BARS,
    to: (i + 1) / LINEAR_BARS,
    text: range(bar.low, bar.high),
  }));
  return { drawn, scale };
}

/** Negative values, a middle for values near zero, positive values; either side may be missing. */
function onLog(bars: readonly Bar[]): { drawn: Drawn[]; scale: Scale } {
  const threshold = middleOf(bars);
  const small = (bar: Bar): boolean => !isZero(bar) && bar.low >= -threshold && bar.high <= threshold;
  const merged: (Bar & { text: string })[] = bars
    .filter((bar) => !small(bar) && !isZero(bar))
    .map((bar) => ({ ...bar, text: range(bar.low, bar.high) }));
  const near = threshold / 3;
  const zero = total(bars.filter(isZero));
  const below = total(bars.filter((bar) => small(bar) && bar.high <= 0));
  const above = total(bars.filter((bar) => small(bar) && bar.low >= 0));
  if (below > 0) merged.push({ low: -threshold, high: -near, count: below, text: range(-threshold, 0) });
  if (zero > 0) merged.push({ low: -near, high: near, count: zero, text: "0" });
  if (above > 0) merged.push({ low: near, high: threshold, count: above, text: range(0, threshold) });
  merged.sort((a, b) => a.low - b.low);
  const scale = symlog(merged[0].low, merged[merged.length - 1].high, threshold, 0.25);
  return { drawn: merged.map((bar) => ({ ...bar, from: scale.at(bar.low), to: scale.at(bar.high) })), scale };
}

/** The edge of the bin below which only few values lie nearer to zero. */
function middleOf(bars: readonly Bar[]): number {
  const sizes = bars
    .filter((bar) => !isZero(bar))
    .map((bar) => ({ near: Math.min(Math.abs(bar.low), Math.abs(bar.high)), count: bar.count }))
    .sort((a, b) => a.near - b.near);
  if (sizes.length === 0) return 1;
  let left = sizes.reduce((sum, s) => sum + s.count, 0) * MIDDLE;
  for (const size of sizes) {
    left -= size.count;
    if (left < 0) return size.near;
  }
  return sizes[sizes.length - 1].near;
}

/** The height of the chart; one bar that towers over all others is cut. */
function ceiling(heights: readonly number[]): { top: number; cut: number | null } {
  const sorted = heights.map((h, i) => [h, i] as const).sort((a, b) => b[0] - a[0]);
  const [highest, second] = [sorted[0], sorted[1]];
  if (second && second[0] > 0 && highest[0] > 4 * second[0]) return { top: second[0] * 1.6, cut: highest[1] };
  return { top: highest[0] * 1.04, cut: null };
}
