// The curves of all metrics, one below another, each with its name, its value at the cursor and the ends
// of its axis. Invariant: each is at least 44 pixels high; more of them than fit scroll.
import type { ComponentChildren } from "preact";
import { useCallback, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import type { CurveData } from "../kernel/decode";
import { plain } from "../ui/format";
import { onSize } from "../ui/size";
import { ids } from "../ui/testids";
import { ends, paintCurve, type Marks } from "./curve";

interface Row {
  readonly curve: CurveData;
  readonly log: boolean;
  readonly possible: boolean;
  readonly value: ComponentChildren;
  readonly exactly: string;
  readonly gaps: ComponentChildren;
}

interface Props {
  readonly rows: readonly Row[];
  readonly marks: Marks;
  readonly toggle: (curve: CurveData) => void;
}

export function Curves({ rows, marks, toggle }: Props) {
  return (
    <div class="nni-curves" tabIndex={rows.length > 0 ? 0 : -1} role="group" aria-label="Metrics over the steps">
      {rows.map((row) => (
        <One key={row.curve.name} {...row} marks={marks} toggle={toggle} />
      ))}
    </div>
  );
}

function One({ curve, log, possible, value, exactly, gaps, marks, toggle }: Row & Omit<Props, "rows">) {
  const { name, points } = curve;
  const plot = useRef<HTMLDivElement>(null);
  const [height, setHeight] = useState(44);
  useLayoutEffect(() => onSize(plot.current!, () => setHeight(Math.max(plot.current!.clientHeight, 1))), []);
  const paint = useCallback((area: Area) => paintCurve(area, points, marks, log), [points, marks, log]);
  const [low, high] = ends(points, log);
  return (
    <figure class="nni-metric" data-testid={ids.metric(name)} data-value={exactly}>
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
              data-testid={ids.metricLog(name)}
              onClick={() => toggle(curve)}
            >
              {log ? "log" : "linear"}
            </button>
          )}
        </span>
        {gaps}
      </figcaption>
      <span class="nni-metric-ends nni-faint nni-small" aria-hidden="true">
        <span>{high > -Infinity && plain(high)}</span>
        <span>{low < Infinity && low !== high && plain(low)}</span>
      </span>
      <div class="nni-metric-plot" ref={plot}>
        <Canvas height={height} label={`${name} over the steps`} paint={paint} />
      </div>
    </figure>
  );
}
