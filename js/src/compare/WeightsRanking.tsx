// The weights of the model against others: each array with how far it moved, largest change first.
// Invariant: the kernel computes; an array without a counterpart says so in words.
import { parseHeights, Sparkline } from "../charts/Sparkline";
import { SPARK, type WeightRow, type Weights } from "../kernel/protocol";
import type { Store } from "../store";
import { count, exact, percent, real } from "../ui/format";
import { SiteLink } from "../ui/SiteLink";

export function WeightsRanking({ weights, store }: { weights: Weights; store: Store }) {
  return (
    <>
      <div class="nni-weights-head nni-faint nni-small">
        <span>
          weights against <b>{weights.name}</b>
        </span>
        <span>change of each</span>
        <span title="The norm of the difference, divided by the norm of the other weights">relative</span>
        <span title="The norm of the difference">distance</span>
      </div>
      <ol class="nni-bars nni-weights" aria-label="Weights by relative change, largest first">
        {weights.rows.map((row) => (
          <RankedWeight key={row.parameter} row={row} name={weights.name} store={store} />
        ))}
      </ol>
      {weights.total > weights.rows.length && (
        <p class="nni-faint nni-small">The {count(weights.rows.length)} largest of {count(weights.total)}; all are in the frame of insp.compare.</p>
      )}
    </>
  );
}

function RankedWeight({ row, name, store }: { row: WeightRow; name: string; store: Store }) {
  const why = row.where === "here" ? `not in ${name}` : row.where === "pinned" ? `only in ${name}` : row.distance === null ? "not comparable" : "";
  const hint = `${row.parameter}, ${row.array}${row.total_variation === null ? "" : `; total variation ${percent(row.total_variation)}`}`;
  return (
    <li data-testid="nni-weight-row" data-site={row.parameter} data-value={exact(row.relative_change)} data-distance={exact(row.distance)} title={hint}>
      <SiteLink store={store} site={row.parameter} title={hint} of={[row.parameter.split("/").slice(0, -1).join("/")]} />
      {why ? (
        <span class="nni-faint nni-reason">{why}</span>
      ) : (
        <>
          <span class="nni-q-parameter">
            {row.change.length === 2 * SPARK && <Sparkline heights={parseHeights(row.change)} width={96} height={16} label={`Histogram of the change of ${row.parameter}`} />}
          </span>
          <span>{row.relative_change === null ? "from 0" : percent(row.relative_change)}</span>
          <span>{real(row.distance)}</span>
        </>
      )}
    </li>
  );
}
