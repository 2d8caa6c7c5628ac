// The modes of the module and of the modules in it, each with a switch for inspected passes.
// Invariant: a switch shows the value in force from the kernel, and says that the model stays as is.
import type { Nnx, NnxMode } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { Store } from "../store";
import { Truncation } from "./Truncation";

export function ModeList({ store, page }: { store: Store; page: Nnx }) {
  return (
    <section aria-label="Modes">
      <h4>
        modes <span class="nni-faint nni-small">for insp.run, insp.step and the effect only: the model and a watched loop keep their own</span>
      </h4>
      {page.modes.length === 0 && <p class="nni-faint">Nothing here can be switched: no set_view, and no flag such as deterministic.</p>}
      <ul class="nni-modes">
        {page.modes.map((mode) => (
          <ModeRow key={`${mode.module}\n${mode.name}`} store={store} site={page.site} mode={mode} />
        ))}
      </ul>
      <Truncation shown={page.modes.length} total={page.modes_total} what="modes" />
    </section>
  );
}

function ModeRow({ store, site, mode }: { store: Store; site: string; mode: NnxMode }) {
  const { nnx } = store;
  const waits = store.replayNote.value !== "" || nnx.switching.value === `${mode.module}\n${mode.name}`;
  const name = `${mode.name} of ${label(mode.module)}`;
  const call = `insp.modes.set(${JSON.stringify(mode.module)}, ${mode.name}=...)`;
  return (
    <li data-testid="nni-nnx-mode" data-module={mode.module} data-name={mode.name}>
      {mode.flag ? (
        <button
          type="button"
          class="nni-switch"
          role="switch"
          aria-checked={mode.value === true}
          aria-label={`${name}, for inspected passes`}
          title={call}
          disabled={waits}
          onClick={() => nnx.switchMode(site, mode.module, mode.name, mode.value !== true)}
        >
          <span />
        </button>
      ) : (
        <code class="nni-small" title={call}>
          {mode.in_force}
        </code>
      )}
      <span class="nni-mode-name" title={mode.documentation}>
        <span class="nni-path-text">
          <b>{mode.name}</b>
          {mode.flag && `=${mode.in_force}`}
        </span>
        <span class="nni-faint nni-path-text" title={`${label(mode.module)}: ${mode.type}`}>
          {label(mode.module)}
          {mode.switched && ` (its own: ${mode.own})`}
        </span>
      </span>
      <span>
        {mode.switched && (
          <button type="button" class="nni-button nni-quiet-button" disabled={waits} onClick={() => nnx.switchMode(site, mode.module, mode.name, null)}>
            Undo
          </button>
        )}
      </span>
    </li>
  );
}
