// What was compiled, and why: the functions of the user, newest first, and how much the rest took.
// Invariant: it asks when it is opened, and again while the count that stands above it grows.
import { useSiteQuery } from "../kernel/queries";
import type { CompilationRow } from "../kernel/protocol";
import { PythonLine } from "../python/PythonLine";
import type { Store } from "../store";
import { count, seconds } from "../ui/format";

export function Compilations({ store }: { store: Store }) {
  useSiteQuery(store.queries, "compilations", "", store.state.value?.cost?.compilations ?? 0);
  const seen = store.queries.compilations.value;
  if (!seen?.data) return <p class="nni-faint nni-small">{seen?.error ? seen.error : "Asking the kernel …"}</p>;
  const { rows, more, operations, inspector } = seen.data;
  return (
    <div>
      {rows.length === 0 && <p class="nni-faint nni-small">No function of yours was compiled yet.</p>}
      <ol aria-label="Compiled functions, newest first">
        {rows.map((row, i) => (
          <Row key={rows.length + more - i} row={row} />
        ))}
      </ol>
      <p class="nni-faint nni-small">
        {more > 0 && `${count(more)} earlier ones are left out. `}
        {count(operations)} operations outside jitted functions took {seconds(seen.data.operation_seconds)}, and {count(inspector)} programs of the inspector{" "}
        {seconds(seen.data.inspector_seconds)}.
      </p>
      <PythonLine text="insp.compilations" />
    </div>
  );
}

function Row({ row }: { row: CompilationRow }) {
  return (
    <li>
      <b title={row.defined}>{row.function}</b> {row.step !== null && `at step ${row.step}`} <span class="nni-faint">{seconds(row.seconds)}</span>
      <div>{row.why}</div>
      <div class="nni-faint nni-small" title={row.called || row.defined}>
        {fileName(row.called || row.defined)}
      </div>
    </li>
  );
}

/** A file and line without the folders. */
const fileName = (place: string): string => place.slice(Math.max(place.lastIndexOf("/"), place.lastIndexOf("\\")) + 1);
