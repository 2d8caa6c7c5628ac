// The figures of the selected site as a table: a row for each distribution, and one for each that it is
// compared with. Invariants: a dash means "not measured"; a column of NaN, +Inf or −Inf is there only if
// it is not 0 throughout, and then it stands out.
import type { Statistic } from "../kernel/protocol";
import { NOT_MEASURED, compact, count, exact, percent, real } from "../ui/format";
import { ids } from "../ui/testids";
import type { Distribution, Figures } from "./Card";

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
type Shown = keyof typeof NAMES;
const COUNTS: ReadonlySet<Shown> = new Set(["size", "nan", "posinf", "neginf"]);
const ALARMING: ReadonlySet<Shown> = new Set(["nan", "posinf", "neginf"]);
/** In a narrow table they are in a second line. */
const SECOND: ReadonlySet<Shown> = new Set(["size", "min", "max"]);

interface Props {
  head: string;
  rows: readonly Distribution[];
  /** The name of what they are compared with. */
  before: string;
}

export function Numbers({ head, rows, before }: Props) {
  const all = rows.flatMap((row) => [row.figures, row.before?.figures].filter((one) => !!one));
  const columns = (Object.keys(NAMES) as Shown[]).filter((name) => !ALARMING.has(name) || all.some((figures) => figures(name) > 0));
  return (
    <table class="nni-numbers" data-testid={ids.figures} style={{ "--columns": columns.length }}>
      <thead>
        <tr>
          <th scope="col">{head}</th>
          {columns.map((name) => (
            <th key={name} scope="col" data-second={SECOND.has(name) ? "" : undefined}>
              {NAMES[name]}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.flatMap((row) => [
          <Row key={row.name} row={row} figures={row.figures} columns={columns} name={row.name} title={row.title} />,
          row.before && <Row key={`before ${row.name}`} row={row} figures={row.before.figures} columns={columns} name={`pinned-${row.name}`} title={before} />,
        ])}
      </tbody>
    </table>
  );
}

interface RowProps {
  row: Distribution;
  figures: Figures | null;
  columns: readonly Shown[];
  name: string;
  title: string;
}

function Row({ row, figures, columns, name, title }: RowProps) {
  return (
    <tr data-testid={isValue(row) ? ids.parameter : undefined} data-site={row.path}>
      <th scope="row" class={`nni-q-${row.tone}`} title={row.hint}>
        {title}
      </th>
      {columns.map((column) => {
        const value = figures ? figures(column) : NaN;
        return (
          <td
            key={column}
            class={ALARMING.has(column) && value > 0 ? "nni-bad" : undefined}
            title={Number.isNaN(value) ? "not measured" : String(value)}
            data-second={SECOND.has(column) ? NAMES[column] : undefined}
            data-testid={isValue(row) ? ids.parameterStat(column) : ids.stat(name, column)}
            data-value={exact(value)}
          >
            {Number.isNaN(value) ? NOT_MEASURED : text(column, value, figures!("size"))}
          </td>
        );
      })}
    </tr>
  );
}

/** Whether it is the values of a parameter. */
const isValue = (row: Distribution): boolean => row.path !== undefined && row.tone === "weight";

function text(name: Shown, value: number, size: number): string {
  if (name === "zeros") return percent(value / size);
  if (!COUNTS.has(name)) return real(value);
  return value >= 1e6 ? compact(value) : count(value);
}
