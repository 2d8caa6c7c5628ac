// What each head of an attention, or each expert of a router, did over the steps: a row for each, and for each figure
// its number at the step on screen and a line. Invariants: the lines of a column have one scale, which has 0; a step of
// which nothing is known is a gap.
import { linear, type Scale } from "../charts/scale";
import { useStepAxis } from "../distributions/stepAxis";
import type { ChoicesData } from "../kernel/decode";
import type { Site } from "../kernel/protocol";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { count, exact, percent, tick } from "../ui/format";

/** What a figure is called, and what it is; the numbers of some are shares. */
const STAT_NAMES: Readonly<Record<string, readonly [name: string, what: string, share: boolean]>> = {
  evenness: ["entropy", "The entropy as a share of the most that it can be: 100 % if all keys get as much, 0 if one gets everything", true],
  distance: ["distance", "Positions between a query and the keys that it looks at, weighted by probability", false],
  first: ["first key", "The probability of the first key", true],
  logit: ["max logit", "The greatest number that enters the softmax", false],
  load: ["load", "The share of the tokens that choose the expert", true],
  router_entropy: ["router entropy", "The entropy of the router's softmax over the experts, as a share of the most that it can be", true],
  dropped: ["dropped", "The share of its tokens that the expert has no room for", true],
};

export function HeadStats({ store, site }: { store: Store; site: Site }) {
  const steps = useStepAxis(store);
  const found = store.choices.value.filter((one) => store.sites.value?.list[one.header.site] === site);
  return (
    <section aria-label="Over the steps">
      {found.map((one) => (
        <HeadTable key={one.header.key} of={one} shown={steps.shown ?? steps.newest} newest={steps.newest} />
      ))}
      {found.length > 0 && <PythonLine text={`insp.figure(${quoted(found[0]!.header.key)})`} />}
    </section>
  );
}

function HeadTable({ of: { header, steps, figures }, shown, newest }: { of: ChoicesData; shown: number; newest: number }) {
  const at = Math.max(steps.findLastIndex((step) => step <= shown), 0);
  const columns = header.figures.map((name, i) => {
    const known = figures[i]!.flatMap((row) => [...row].filter(Number.isFinite));
    const scale = linear(Math.min(0, ...known), Math.max(1e-9, ...known));
    const [word = name, what, share] = STAT_NAMES[name] ?? [];
    return { name, rows: figures[i]!, scale, word, what, text: share ? percent : tick };
  });
  return (
    <>
      <table class="nni-numbers nni-head-stats" style={{ "--columns": columns.length }}>
        <caption class="nni-faint nni-small">{`${header.key}, step ${count(steps[at])}`}</caption>
        <thead>
          <tr>
            <th scope="col">{header.experts ? "expert" : "head"}</th>
            {columns.map(({ name, word, what }) => (
              <th key={name} scope="col" title={what}>
                {word}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {Array.from({ length: header.rows }, (_, row) => (
            <tr key={row} data-testid="nni-head-stat">
              <th scope="row">{row}</th>
              {columns.map(({ name, rows, scale, text }) => (
                <td key={name} data-value={exact(rows[row]![at])}>
                  {(row === 0 || name !== "router_entropy") && (
                    <span>
                      <svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">
                        <path d={linePath(steps, rows[row]!, newest, scale)} vector-effect="non-scaling-stroke" />
                      </svg>
                      {text(rows[row]![at]!)}
                    </span>
                  )}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {header.more > 0 && <p class="nni-faint nni-small nni-notes">{count(header.more)} more are left out.</p>}
    </>
  );
}

/** A line over the steps, in a box of 100 by 16. */
function linePath(steps: Float64Array, values: Float64Array, newest: number, scale: Scale): string {
  let [path, pen] = ["", "M"];
  values.forEach((value, i) => {
    if (Number.isFinite(value)) path += `${pen}${((100 * steps[i]!) / Math.max(newest, 1)).toFixed(1)} ${(15 - 14 * scale.at(value)).toFixed(1)}h.1`;
    pen = Number.isFinite(value) ? "L" : "M";
  });
  return path;
}
