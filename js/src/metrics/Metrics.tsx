// The metrics of training, as the loop reported them (a perturbation's effect has its own table).
// Each is a small curve in a chart of its own, because their scales have nothing in common; the axis
// is logarithmic where that shows more, until the user chooses.
import { useCallback, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { canBeLog, paintCurve, suitsLog } from "../charts/curve";
import type { CurveData } from "../kernel/decode";
import type { Store } from "../store";
import { count, exact, plain } from "../ui/format";
import { ids } from "../ui/testids";

export function Metrics({ store }: { store: Store }) {
  const curves = store.curves.value.filter((curve) => curve.points.length > 0);
  if (curves.length === 0) return null;
  return (
    <section class="nni-metrics" aria-label="Training metrics">
      <h4>Training metrics</h4>
      <div class="nni-curves">
        {curves.map((curve) => (
          <Curve key={curve.name} curve={curve} />
        ))}
      </div>
    </section>
  );
}

function Curve({ curve: { name, points, recorded, notFinite } }: { curve: CurveData }) {
  const last = points[points.length - 1];
  const known = Number.isFinite(last);
  const said = known ? plain(last, 4) : "not finite"; // a step without the metric has no point
  const gaps = notFinite > 0 ? `${count(notFinite)} of ${count(recorded)} not finite` : "";
  const [chosen, choose] = useState<boolean | null>(null);
  const possible = canBeLog(points);
  const log = possible && (chosen ?? suitsLog(points));
  const paint = useCallback((area: Area) => paintCurve(area, points, area.palette.metric, log), [points, log]);
  return (
    <figure class="nni-metric" data-testid={ids.metric(name)} data-value={exact(last)}>
      <figcaption>
        <span title={name}>{name}</span>
        {possible && (
          <button type="button" class="nni-link nni-small" aria-label={`${log ? "log" : "linear"} axis of ${name}`} title={log ? "Show it on a linear axis" : "Show it on a logarithmic axis"} data-testid={ids.metricLog(name)} onClick={() => choose(!log)}>
            {log ? "log" : "linear"}
          </button>
        )}
        <b class={known ? undefined : "nni-bad"}>{said}</b>
      </figcaption>
      {points.some((one, i) => i % 2 === 1 && Number.isFinite(one)) && <Canvas height={84} label={`${name} over the steps, last value ${said}`} paint={paint} />}
      {gaps && (
        <span class="nni-metric-gaps nni-bad nni-small" title={`${gaps}: the recorded values that are NaN or Inf. Their steps are marked on the axis.`} data-testid={ids.metricGaps(name)}>
          {gaps}
        </span>
      )}
    </figure>
  );
}
