// The figures of one site, activation beside gradient.
// Invariant: a dash means "not measured"; a count of NaN values stands out if it is not 0.
import { statistic, type FrameData } from "../kernel/decode";
import { STATISTICS, type Statistic } from "../kernel/protocol";
import { Waiting } from "../header/Waiting";
import type { Store } from "../store";
import { NOT_MEASURED, compact, count, exact, percent, real } from "../ui/format";
import { EACH } from "../ui/quantities";
import { ids } from "../ui/testids";

const NAMES: Readonly<Record<Exclude<Statistic, "seen">, string>> = {
  size: "values",
  mean: "mean",
  std: "std",
  min: "min",
  max: "max",
  norm: "norm",
  zeros: "zeros",
  nan: "NaN",
  posinf: "+Inf",
  neginf: "−Inf",
};
const SHOWN = STATISTICS.filter((name) => name !== "seen"); // the histogram says it
const COUNTS: ReadonlySet<Statistic> = new Set(["size", "nan", "posinf", "neginf"]);
const WIDE: ReadonlySet<Statistic> = new Set(["mean", "std", "min", "max", "norm"]);
const ALARMING: ReadonlySet<Statistic> = new Set(["nan", "posinf", "neginf"]);

export function Numbers({ store, index }: { store: Store; index: number }) {
  const frame = store.frame.value;
  const pinned = store.timeline.pinned.value;
  const missing = EACH.filter(({ index: q }) => frame && Number.isNaN(statistic(frame, index, q, "size")));
  return (
    <div class="nni-numbers">
      <table class={pinned ? "nni-with-pinned" : undefined}>
        <thead>
          <tr>
            <th />
            {EACH.map(({ quantity, word }) => (
              <th key={quantity} scope="col" class={`nni-q-${quantity}`}>
                {word}
              </th>
            ))}
            {pinned &&
              EACH.map(({ quantity, word }) => (
                <th key={`pinned-${quantity}`} scope="col" class={`nni-q-${quantity} nni-pinned-figure`} title={`The ${word} of the pinned pass`}>
                  pinned
                </th>
              ))}
          </tr>
        </thead>
        <tbody>
          {SHOWN.map((name) => (
            <tr key={name} class={WIDE.has(name) ? "nni-wide" : undefined}>
              <th scope="row">{NAMES[name]}</th>
              {EACH.map(({ quantity, index: q }) => (
                <Cell key={quantity} frame={frame} site={index} q={q} quantity={quantity} name={name} />
              ))}
              {pinned &&
                EACH.map(({ quantity, index: q }) => (
                  <Cell key={`pinned-${quantity}`} frame={pinned} site={index} q={q} quantity={`pinned-${quantity}`} name={name} />
                ))}
            </tr>
          ))}
        </tbody>
      </table>
      <p class="nni-missing">
        {frame === null
          ? <Waiting store={store} before="No pass yet" />
          : missing.length === EACH.length
            ? "Nothing was measured here in this pass."
            : missing.map(({ word }) => `No ${word} was measured here in this pass.`).join(" ")}
      </p>
    </div>
  );
}

interface CellProps {
  frame: FrameData | null;
  site: number;
  q: number;
  quantity: string;
  name: Statistic;
}

function Cell({ frame, site, q, quantity, name }: CellProps) {
  const value = frame ? statistic(frame, site, q, name) : NaN;
  return (
    <td
      class={ALARMING.has(name) && value > 0 ? "nni-bad" : undefined}
      title={Number.isNaN(value) ? "not measured" : String(value)}
      data-testid={ids.stat(quantity, name)}
      data-value={exact(value)}
    >
      {Number.isNaN(value) ? NOT_MEASURED : text(name, value, frame ? statistic(frame, site, q, "size") : NaN)}
    </td>
  );
}

function text(name: Statistic, value: number, size: number): string {
  if (name === "zeros") return percent(value / size);
  if (!COUNTS.has(name)) return real(value);
  return value >= 1e6 ? compact(value) : count(value);
}
