// The calls of the selected module, the docstring of its type, and the values that it sows.
// Invariant: source and documentation are text nodes, exactly as in the file.
import { statistic } from "../kernel/decode";
import { useSiteQuery } from "../kernel/queries";
import type { Excerpt, Site } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { count, real } from "../ui/format";

export function CodePanel({ store, site }: { store: Store; site: Site }) {
  useSiteQuery(store.queries, "code", site.key, store.sites.value?.id);
  const seen = store.queries.code.value;
  const here = seen?.site === site.key ? seen : null;
  const code = here?.data;
  if (!code) return <div class="nni-nothing nni-section">{here?.error || "Reading …"}</div>;
  return (
    <>
      <section class="nni-section" aria-label="Where it is called">
        <div class="nni-heading">
          <h4>{code.excerpts.length > 1 ? `Called in ${count(code.excerpts.length)} places` : "Called here"}</h4>
        </div>
        {code.excerpts.map((one) => (
          <ExcerptView key={`${one.file}:${one.line}`} excerpt={one} />
        ))}
        {code.why && <p class="nni-faint">{code.why}</p>}
      </section>
      <Sown store={store} sown={code.sown} />
      <section class="nni-section" aria-label="Documentation of its type">
        <div class="nni-heading">
          <h4>{code.kind}</h4>
        </div>
        {code.documentation === "" ? (
          <p class="nni-faint">This type has no documentation.</p>
        ) : (
          <p class="nni-documentation" data-testid="nni-documentation">
            {code.documentation}
          </p>
        )}
      </section>
    </>
  );
}

function ExcerptView({ excerpt }: { excerpt: Excerpt }) {
  const { file, function: name, first, line, text } = excerpt;
  return (
    <figure class="nni-excerpt" data-testid="nni-excerpt" data-value={line}>
      <figcaption class="nni-faint nni-small">
        {file}, line {line}
        {name && (
          <>
            , in <code>{name}</code>
          </>
        )}
      </figcaption>
      <pre tabIndex={0} aria-label={`Lines around ${file}, line ${line}`}>
        {text.split("\n").map((one, i) => (
          <span key={i} class={first + i === line ? "nni-line nni-current-line" : "nni-line"} aria-current={first + i === line ? "true" : undefined}>
            <span class="nni-number" aria-hidden="true">
              {first + i}
            </span>
            {one === "" ? " " : one}
            {"\n"}
          </span>
        ))}
      </pre>
    </figure>
  );
}

/** The values that it passes to `sow` or `perturb`: sites of their own, with figures in each frame. */
function Sown({ store, sown }: { store: Store; sown: readonly string[] }) {
  const sites = store.sites.value;
  const frame = store.frame.value;
  if (sown.length === 0 || !sites) return null;
  return (
    <section class="nni-section" aria-label="Sown">
      <div class="nni-heading">
        <h4>Sown in it</h4>
      </div>
      <table class="nni-sown">
        <thead>
          <tr>
            {["name", "kind", "value", "mean", "std", "min", "max", "NaN"].map((word) => (
              <th key={word} scope="col">
                {word}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {sown.map((key) => {
            const index = sites.byKey.get(key);
            const one = index === undefined ? undefined : sites.list[index];
            if (index === undefined || !one) return null;
            return (
              <tr key={key} data-testid="nni-sown" data-site={key}>
                <th scope="row">
                  <button type="button" class="nni-link" onClick={() => store.select(key)}>
                    {one.name || label(key)}
                  </button>
                </th>
                <td>{one.kind}</td>
                <td>{one.output}</td>
                {(["mean", "std", "min", "max", "nan"] as const).map((name) => (
                  <td key={name}>{real(frame ? statistic(frame, index, 0, name) : NaN)}</td>
                ))}
              </tr>
            );
          })}
        </tbody>
      </table>
    </section>
  );
}
