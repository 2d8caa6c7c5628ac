// The present parameters of the selected module: a histogram and figures for each.
// Invariant: a dash means "not measured"; NaN and Inf are counted and stand out.
import { useMemo } from "preact/hooks";
import { useLog, type Axis } from "../charts/axis";
import { precision, toBars } from "../charts/bins";
import { Histogram } from "../charts/Histogram";
import type { ParameterData } from "../kernel/decode";
import { useLook } from "../kernel/looks";
import type { Site, Statistic } from "../kernel/protocol";
import { Python, quoted } from "../python/Python";
import type { Store } from "../store";
import { compact, count, exact, percent, real } from "../ui/format";
import { ids } from "../ui/testids";

const FIGURES: readonly (readonly [Statistic, string])[] = [
  ["mean", "mean"],
  ["std", "std"],
  ["norm", "norm"],
  ["min", "min"],
  ["max", "max"],
  ["zeros", "zeros"],
  ["nan", "NaN"],
  ["posinf", "+Inf"],
  ["neginf", "−Inf"],
];
const ALARMING: ReadonlySet<Statistic> = new Set(["nan", "posinf", "neginf"]);

export function Parameters({ store, site }: { store: Store; site: Site }) {
  if (site.parameters === 0) return null;
  return <Held store={store} site={site} />;
}

function Held({ store, site }: { store: Store; site: Site }) {
  useLook(store.looks, "parameters", site.key, store.frame.value?.header.seq);
  const seen = store.looks.parameters.value;
  const here = seen?.site === site.key ? seen : null;
  const list = here?.data?.list ?? [];
  const more = here?.data?.header.more ?? 0;
  return (
    <section class="nni-section" aria-label="Parameters">
      <div class="nni-heading">
        <h4>{store.replay.value ? "Parameters when saved" : "Parameters now"}</h4>
        <span class="nni-grow" />
        <Python text={`insp.parameters(${quoted(site.key)})`} />
      </div>
      {here?.error ? <p class="nni-bad nni-small">{here.error}</p> : null}
      {list.length === 0 ? (
        <div class="nni-nothing">{here?.data?.header.why || (here?.error ? "Not known." : "Measuring …")}</div>
      ) : (
        <div class="nni-pair">
          {list.map((one) => (
            <One key={one.path} parameter={one} site={site.key} axis={store.axis.value} />
          ))}
        </div>
      )}
      {more > 0 && <p class="nni-faint nni-small">and {count(more)} more: select a module inside this one to see them.</p>}
    </section>
  );
}

function One({ parameter, site, axis }: { parameter: ParameterData; site: string; axis: Axis }) {
  const { path, array, figures, pairs } = parameter;
  const bars = useMemo(() => toBars(pairs), [pairs]);
  const log = useLog(axis, bars, path);
  const name = path.startsWith(`${site}/`) ? path.slice(site.length + 1) : path;
  return (
    <figure class="nni-figure" data-testid={ids.parameter} data-site={path}>
      <figcaption>
        <span class="nni-q-parameter" title={path}>
          {name}
        </span>
        <span class="nni-faint">{array}</span>
      </figcaption>
      {bars.length > 0 && figures.min === figures.max ? (
        <div class="nni-nothing">Every value is {real(figures.min)}.</div>
      ) : bars.length > 0 ? (
        <Histogram bars={bars} log={log} quantity="parameter" word={`parameter ${path}`} precise={precision((figure) => figures[figure])} />
      ) : (
        <div class="nni-nothing">No finite value.</div>
      )}
      <dl class="nni-inline">
        {FIGURES.map(([name, word]) => (
          <div key={name} class={ALARMING.has(name) && figures[name] > 0 ? "nni-bad" : undefined}>
            <dt>{word}</dt>
            <dd data-testid={ids.parameterStat(name)} data-value={exact(figures[name])} title={String(figures[name])}>
              {text(name, figures[name], figures.size)}
            </dd>
          </div>
        ))}
      </dl>
    </figure>
  );
}

function text(name: Statistic, value: number, size: number): string {
  if (name === "zeros") return percent(value / size);
  if (!ALARMING.has(name)) return real(value);
  return value >= 1e6 ? compact(value) : count(value);
}
