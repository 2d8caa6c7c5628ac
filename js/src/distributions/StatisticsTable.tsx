// The figures of the selected site as a table: a row for each distribution, and one for each that it is
// compared with. Invariants: a dash means "not measured"; a column of NaN, +Inf or −Inf is there only if
// it is not 0 throughout, and then it stands out.
import type { Statistic } from "../kernel/protocol";
import { NOT_MEASURED, compact, count, exact, percent, real } from "../ui/format";
import type { Distribution, Statistics } from "./Card";

const STATISTIC_NAMES: Readonly<Record<Exclude<Statistic, "seen">, string>> = {
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
type ShownStatistic = keyof typeof STATISTIC_NAMES;
const COUNTS: ReadonlySet<ShownStatistic> = new Set(["size", "nan", "posinf", "neginf"]);
const ALARMING: ReadonlySet<ShownStatistic> = new Set(["nan", "posinf", "neginf"]);
/** In a narrow table they are in a second line. */
const SECOND_LINE: ReadonlySet<ShownStatistic> = new Set(["size", "min", "max"]);

interface Props {
  head: string;
  rows: readonly Distribution[];
  /** The name of what they are compared with. */
  before: string;
}

export function StatisticsTable({ head, rows, before }: Props) {
  const all = rows.flatMap((row) => [row.statistics, row.reference?.statistics].filter((one) => !!one));
  const columns = (Object.keys(STATISTIC_NAMES) as ShownStatistic[]).filter((name) => !ALARMING.has(name) || all.some((statistics) => statistics(name) > 0));
  return (
    <table class="nni-numbers" data-testid="nni-figures" style={{ "--columns": columns.length }}>
      <thead>
        <tr>
          <th scope="col">{head}</th>
          {columns.map((name) => (
            <th key={name} scope="col" data-second={SECOND_LINE.has(name) ? "" : undefined}>
              {STATISTIC_NAMES[name]}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.flatMap((row) => [
          <Row key={row.name} row={row} statistics={row.statistics} columns={columns} name={row.name} title={row.title} />,
          row.reference && <Row key={`before ${row.name}`} row={row} statistics={row.reference.statistics} columns={columns} name={`pinned-${row.name}`} title={before} />,
        ])}
      </tbody>
    </table>
  );
}

interface RowProps {
  row: Distribution;
  statistics: Statistics | null;
  columns: readonly ShownStatistic[];
  name: string;
  title: string;
}

function Row({ row, statistics, columns, name, title }: RowProps) {
  return (
    <tr data-testid={isParameter(row) ? "nni-parameter" : undefined} data-site={row.path}>
      <th scope="row" class={`nni-q-${row.tone}`} title={row.hint}>
        {title}
      </th>
      {columns.map((column) => {
        const value = statistics ? statistics(column) : NaN;
        return (
          <td
            key={column}
            class={ALARMING.has(column) && value > 0 ? "nni-bad" : undefined}
            title={Number.isNaN(value) ? "not measured" : String(value)}
            data-second={SECOND_LINE.has(column) ? STATISTIC_NAMES[column] : undefined}
            data-testid={isParameter(row) ? `nni-parameter-${column}` : `nni-stat-${name}-${column}`}
            data-value={exact(value)}
          >
            {Number.isNaN(value) ? NOT_MEASURED : cellText(column, value, statistics!("size"))}
          </td>
        );
      })}
    </tr>
  );
}

/** Whether it is the values of a parameter. */
const isParameter = (row: Distribution): boolean => row.path !== undefined && row.tone === "weight";

function cellText(name: ShownStatistic, value: number, size: number): string {
  if (name === "zeros") return percent(value / size);
  if (!COUNTS.has(name)) return real(value);
  return value >= 1e6 ? compact(value) : count(value);
}
