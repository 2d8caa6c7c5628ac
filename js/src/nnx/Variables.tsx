// The state: every Variable with its array, its device and its change.
// Invariant: a Variable that is not compared has a dash, never a 0.
import type { Nnx, NnxChange, NnxVariable } from "../kernel/protocol";
import type { Store } from "../store";
import { NOT_MEASURED, bytes, count, exact, percent, real, shortType } from "../ui/format";
import { Truncation } from "./Truncation";
import { SharedReference } from "./SharedReference";

const VALUE_KINDS: Readonly<Record<NnxVariable["held"], string>> = {
  array: "",
  traced: "traced",
  deleted: "donated",
  shape: "no array",
  reference: "reference",
  other: "",
};
const VALUE_HINTS: Readonly<Record<NnxVariable["held"], string>> = {
  array: "",
  traced: "A tracer: the model is inside a transform that is being traced",
  deleted: "Its array was donated to a running step, or deleted; the step puts a new one here",
  shape: "A shape and a dtype without an array",
  reference: "A mutable reference",
  other: "A value that is not a single array",
};

export function Variables({ store, page }: { store: Store; page: Nnx }) {
  const { passed, since } = page;
  return (
    <section aria-label="Variables">
      <p class="nni-small nni-faint nni-nnx-about" data-testid="nni-nnx-since" data-value={exact(since)}>
        {since === null
          ? `“moved”: the values at step ${count(page.step)} are noted; the next look shows how far they moved.`
          : `“moved”: ‖new − old‖ / ‖old‖, ${since === page.step ? "since the last look" : `from step ${count(since)} to step ${count(page.step)}`}.`}
        {passed !== "" && ` “insp.${passed}”: the changes that the last one made in its own copy; the model kept its values.`}
        {page.uncompared !== "" && ` ${page.uncompared}`}
      </p>
      <div class="nni-nnx-scroll" tabIndex={0} role="region" aria-label="Table of Variables">
        <table class="nni-nnx-table">
          <thead>
            <tr>
              {["Variable", "type", "array", "bytes", "on", "moved", ...(passed !== "" ? [`insp.${passed}`] : [])].map((word) => (
                <th key={word} scope="col">
                  {word}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {page.variables.map((variable) => (
              <VariableRow key={variable.path} store={store} page={page} variable={variable} />
            ))}
          </tbody>
        </table>
      </div>
      <Truncation shown={page.variables.length} total={page.variables_total} what="Variables" />
    </section>
  );
}

function VariableRow({ store, page, variable }: { store: Store; page: Nnx; variable: NnxVariable }) {
  const inner = page.site !== "" && variable.path.startsWith(`${page.site}/`) ? variable.path.slice(page.site.length + 1) : variable.path;
  const isLink = variable.module !== page.site && store.sites.value?.byKey.has(variable.module);
  const marked = variable.reference !== 0 && store.nnx.marked.value === variable.reference;
  return (
    <tr
      class={marked ? "nni-marked" : undefined}
      data-testid="nni-nnx-variable"
      data-path={variable.path}
      data-value={exact(variable.change?.relative)}
    >
      <th scope="row">
        <span class="nni-node-head">
          {isLink ? (
            <button type="button" class="nni-link nni-path-text" title={`Select ${variable.module}`} onClick={() => store.select(variable.module)}>
              {inner}
            </button>
          ) : (
            <span class="nni-path-text" title={variable.path}>
              {inner}
            </span>
          )}
          <SharedReference store={store} shared={variable} />
        </span>
      </th>
      <td title={variable.metadata}>{variable.type || "(array)"}</td>
      <td class="nni-attribute" title={variable.value && `value: ${variable.value}`}>
        <span title={`${variable.dtype} ${variable.shape}`}>{arrayText(variable)}</span>
        {variable.value !== "" && ` = ${variable.value}`}
        {VALUE_KINDS[variable.held] !== "" && (
          <span class="nni-value-kind" title={VALUE_HINTS[variable.held]}>
            {VALUE_KINDS[variable.held]}
          </span>
        )}
      </td>
      <td title={`${count(variable.bytes)} bytes`}>{bytes(variable.bytes)}</td>
      <td title={committedText(variable)}>
        {variable.sharding}
        {variable.committed && " ⚓"}
      </td>
      <ChangeCell change={variable.first === null ? variable.change : null} />
      {page.passed !== "" && <ChangeCell change={variable.first === null ? variable.passed : null} />}
    </tr>
  );
}

/** In JAX's notation: f32[3,3,8]. */
function arrayText({ dtype, shape }: NnxVariable): string {
  if (dtype === "") return shape;
  return `${shortType(dtype)}[${shape.replace(/[() ]|,\)/g, "").replace(/,$/, "")}]`;
}

function committedText({ committed, sharding }: NnxVariable): string {
  if (committed === null) return sharding;
  return committed ? `${sharding}; committed: it stays there` : `${sharding}; not committed: a computation may move it`;
}

function ChangeCell({ change }: { change: NnxChange | null }) {
  if (change === null) {
    return (
      <td class="nni-faint" title="Nothing to compare">
        {NOT_MEASURED}
      </td>
    );
  }
  const { same, relative, distance, before, after } = change;
  if (same) {
    return (
      <td class="nni-faint" title="Exactly the same values">
        same
      </td>
    );
  }
  const title = [
    before !== "" && `${before} → ${after}`,
    distance !== null && `norm of the difference: ${String(distance)}`,
    relative !== null && `relative: ${String(relative)}`,
  ];
  const text = before !== "" ? `${before} → ${after}` : relative !== null ? percent(relative) : distance !== null ? `by ${real(distance)}` : "changed";
  return (
    <td class="nni-moved" title={title.filter(Boolean).join("; ")} data-value={exact(relative)}>
      {text}
    </td>
  );
}
