// What lower precision would make of the newest pass: the share of the values of the selected module and of its
// parameters that would become 0, lose precision or be too large in a dtype; then those of all, the worst first.
// Invariant: the kernel computes; what is estimated, and by how much it may be off, stands below the table.
import { useState } from "preact/hooks";
import { useSiteQuery } from "../kernel/queries";
import { CASTS, CAST_STATS, type CastRow, type Site } from "../kernel/protocol";
import { PythonLine } from "../python/PythonLine";
import type { Store } from "../store";
import { count, exact, percent } from "../ui/format";
import { Select } from "../ui/Select";

const SCALES = ["as it is", "with a scale for each array"] as const;
const COLUMNS = ["→ 0", "subnormal", "too large"] as const;
const MOST_ROWS = 40;

export function CastsPanel({ store, site }: { store: Store; site: Site }) {
  useSiteQuery(store.queries, "casts", "", store.frame.value?.header.seq);
  const [dtype, choose] = useState<(typeof CASTS)[number]>("bfloat16");
  const [scale, scaleBy] = useState<(typeof SCALES)[number]>(SCALES[0]);
  const seen = store.queries.casts.value;
  if (!seen?.data) return <div class="nni-nothing nni-section">{seen?.error || "Reading …"}</div>;
  const { header, shares } = seen.data;
  const all = header.rows.map((row, i) => {
    const at = (i * CASTS.length + CASTS.indexOf(dtype)) * CAST_STATS.length;
    const [zero, subnormal, over, scaled, rest] = shares.subarray(at, at + CAST_STATS.length) as unknown as number[];
    return { row, figures: scale === SCALES[0] ? [zero, subnormal, over] : [scaled, rest, 0 * scaled] };
  });
  const worst = all.filter(({ figures }) => figures[0] + figures[2] > 0).sort((a, b) => b.figures[0] + b.figures[2] - a.figures[0] - a.figures[2]);
  const table = (title: string, rows: typeof all, named: boolean) => (
    <table class="nni-numbers nni-casts">
      <thead>
        <tr>
          {[title, ...COLUMNS].map((word) => (
            <th key={word} scope="col">
              {word}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.map(({ row, figures }) => (
          <tr key={`${row.site} ${row.name}`} data-testid="nni-cast" data-site={row.site}>
            <th scope="row" title={named ? rowName(row) : undefined}>
              {named ? (
                <button type="button" class="nni-link" onClick={() => store.select(row.site)}>
                  {rowName(row)}
                </button>
              ) : (
                row.name
              )}
            </th>
            {figures.map((share, i) => (
              <td key={COLUMNS[i]} data-value={exact(share)}>
                {percent(share)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
  return (
    <section class="nni-section" aria-label="Lower precision">
      <div class="nni-heading">
        <Select labelled label="In" testid="nni-cast-dtype" value={dtype} options={CASTS} choose={choose} />
        <Select label="Scale" testid="nni-cast-scale" value={scale} options={SCALES} choose={scaleBy} />
      </div>
      {table(`step ${count(header.step)}`, all.filter(({ row }) => row.site === site.key), false)}
      {worst.length > 0 ? table("in all modules, worst first", worst.slice(0, MOST_ROWS), true) : <p class="nni-faint">No value of any module would become 0 or be too large.</p>}
      <p class="nni-faint nni-small nni-notes">
        Shares of the finite values of a measured pass, from its histograms. “→ 0” are nonzero values that would be rounded to 0, “subnormal” those that keep fewer bits.{" "}
        {scale === SCALES[0]
          ? "They are exact unless the histogram is that of a sample; values between 61,440 and 65,536 (float16) or 448 and 480 (float8_e4m3fn) are divided evenly."
          : "A scale makes the largest value of an array the largest number of the dtype. Values within 12.5 % of a limit are divided evenly, so a share is off by theirs at most."}
        {worst.length > MOST_ROWS && ` ${count(worst.length - MOST_ROWS)} more are left out.`}
        {header.total > header.rows.length && ` Only ${count(header.rows.length)} of ${count(header.total)} arrays are here.`}
      </p>
      <PythonLine text="insp.recording.casts_frame()" />
    </section>
  );
}

const rowName = ({ site, name }: CastRow): string => `${site || "model"} · ${name}`;
