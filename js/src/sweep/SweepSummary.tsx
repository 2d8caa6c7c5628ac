// What a sweep has found, in a sentence: the site that matters most, and those without which the loss falls.
import type { Sweep, SweepRow } from "../kernel/protocol";
import { label } from "../kernel/sites";
import { percent, tick } from "../ui/format";
import { isZeroSweep, rank, type Measure } from "./measures";

const MOST_NAMES = 2;

export function SweepSummary({ sweep, measure }: { sweep: Sweep; measure: Measure }) {
  const rows = rank(sweep, measure).filter((row) => !row.why_not);
  const [first, ...others] = rows;
  if (!first) return null;
  const value = first[measure];
  const zeros = isZeroSweep(sweep);
  const condition = zeros ? "without it" : `with ${sweep.perturbation} there`;
  const name = <b>{label(first.site)}</b>;
  if (value === 0) return <p class="nni-sweep-summary">No site changes {measure === "loss_change" ? "the loss" : measure === "output_change" ? "the output" : "the predictions"}.</p>;
  if (measure === "loss_change") {
    const fall = others.filter((row) => (row.loss_change ?? 0) < 0);
    return (
      <p class="nni-sweep-summary">
        {name} matters most: {condition} the loss {value === null ? "is not finite" : lossText(value, sweep.loss)}.{" "}
        {fall.length > 0 && (value === null || value > 0) && (
          <>
            {zeros ? "Without" : "At"} <SiteNames rows={fall} /> it <b>falls</b>.
          </>
        )}
      </p>
    );
  }
  const by = value === null ? "it is not finite" : measure === "output_change" ? `by ${percent(value)}` : measure === "kl" ? `KL ${tick(value)}` : `${percent(value)} of them`;
  return (
    <p class="nni-sweep-summary">
      {name} changes the {measure === "output_change" ? "output" : "predictions"} most: {by}.
    </p>
  );
}

function lossText(by: number, from: number | null): string {
  const way = by > 0 ? "rises" : "falls";
  return from === null ? `${way} by ${tick(Math.abs(by))}` : `${way} from ${tick(from)} to ${tick(from + by)}`;
}

function SiteNames({ rows }: { rows: readonly SweepRow[] }) {
  const names = rows.slice(0, rows.length > MOST_NAMES + 1 ? MOST_NAMES : rows.length);
  const more = rows.length - names.length;
  return (
    <>
      {names.map((row, i) => (
        <span key={row.site}>
          {i > 0 && (i === names.length - 1 && more === 0 ? " or " : ", ")}
          <b>{label(row.site)}</b>
        </span>
      ))}
      {more > 0 && ` or ${more} others`}
    </>
  );
}
