// The curves of all metrics, one below another, each with its name, its value at the cursor and the ends
// of its axis. Invariant: each is at least 44 pixels high; more of them than fit scroll.
import type { ComponentChildren } from "preact";
import { useCallback, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import type { CurveData } from "../kernel/decode";
import { decimal } from "../ui/format";
import { observeSize } from "../ui/observeSize";
import { finiteRange, paintCurve, type CurveMarks } from "./curve";

interface MetricRow {
  readonly curve: CurveData;
  readonly log: boolean;
  readonly possible: boolean;
  readonly value: ComponentChildren;
  readonly exactly: string;
  readonly gaps: ComponentChildren;
}

interface Props {
  readonly rows: readonly MetricRow[];
  readonly marks: CurveMarks;
  readonly toggle: (curve: CurveData) => void;
}

export function Curves({ rows, marks, toggle }: Props) {
  return (
    <div class="nni-curves" tabIndex={rows.length > 0 ? 0 : -1} role="group" aria-label="Metrics over the steps">
      {rows.map((row) => (
        <MetricPlot key={row.curve.name} {...row} marks={marks} toggle={toggle} />
      ))}
    </div>
  );
}

function MetricPlot({ curve, log, possible, value, exactly, gaps, marks, toggle }: MetricRow & Omit<Props, "rows">) {
  const { name, points } = curve;
  const plot = useRef<HTMLDivElement>(null);
  const [height, setHeight] = useState(44);
  useLayoutEffect(() => observeSize(plot.current!, () => setHeight(Math.max(plot.current!.clientHeight, 1))), []);
  const paint = useCallback((area: Area) => paintCurve(area, points, marks, log), [points, marks, log]);
  const [low, high] = finiteRange(points, log);
  return (
    <figure class="nni-metric" data-testid={`nni-metric-${name}`} data-value={exactly}>
      <figcaption>
        <span class="nni-metric-name" title={name}>
          {name}
        </span>
        <span>
          {value}{" "}
          {possible && (
            <button
              type="button"
              class="nni-link nni-small"
              aria-label={`${log ? "log" : "linear"} axis of ${name}`}
              title={log ? "Show it on a linear axis" : "Show it on a logarithmic axis"}
              data-testid={`nni-metric-log-${name}`}
              onClick={() => toggle(curve)}
            >
              {log ? "log" : "linear"}
            </button>
          )}
        </span>
        {gaps}
      </figcaption>
      <span class="nni-metric-ends nni-faint nni-small" aria-hidden="true">
        <span>{high > -Infinity && decimal(high)}</span>
        <span>{low < Infinity && low !== high && decimal(low)}</span>
      </span>
      <div class="nni-metric-plot" ref={plot}>
        <Canvas height={height} label={`${name} over the steps`} paint={paint} />
      </div>
    </figure>
  );
}
