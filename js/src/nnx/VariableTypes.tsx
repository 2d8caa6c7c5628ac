// The Variables by type, with their memory: Param, BatchStat, RngKey, ..., the user's own.
import type { Nnx } from "../kernel/protocol";
import { bytes, compact, count } from "../ui/format";

export function VariableTypes({ page }: { page: Nnx }) {
  return (
    <section aria-label="Variables by type">
      <h4>
        state <span class="nni-faint nni-small">Variables by type; a shared one counts once</span>
      </h4>
      {page.kinds.length === 0 ? (
        <p class="nni-faint">No Variables.</p>
      ) : (
        <table class="nni-nnx-table nni-kinds">
          <thead>
            <tr>
              {["type", "Variables", "numbers", "bytes"].map((word) => (
                <th key={word} scope="col">
                  {word}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {page.kinds.map((kind) => (
              <tr key={kind.type} data-testid="nni-nnx-kind" data-kind={kind.type}>
                <th scope="row">{kind.type || "(plain arrays)"}</th>
                <td data-value={kind.variables}>{count(kind.variables)}</td>
                <td data-value={kind.elements} title={count(kind.elements)}>
                  {compact(kind.elements)}
                </td>
                <td data-value={kind.bytes} title={`${count(kind.bytes)} bytes`}>
                  {bytes(kind.bytes)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
