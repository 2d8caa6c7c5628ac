// Lines for the user to read: the kernel's notices, failed requests, late answers.
// Invariant: every line also gives its level in words, and stays until it is dismissed or solved.
import type { Bridge } from "../kernel/bridge";
import { label } from "../kernel/sites";
import type { Line, Store } from "../store";
import { ids } from "../ui/testids";

const WORDS: Readonly<Record<string, string>> = { error: "Error", warning: "Warning", info: "Note" };

export function Notices({ store, bridge }: { store: Store; bridge: Bridge }) {
  const lines = store.notices.value;
  const late = bridge.late.value > 0;
  if (lines.length === 0 && !late) return null;
  return (
    <div class="nni-notices" aria-live="polite">
      {late && (
        <div class="nni-notice nni-notice-info" data-testid={ids.notice} data-level="info">
          <b>Note</b>
          <span class="nni-notice-text">The kernel has not answered yet (a cell may be running).</span>
        </div>
      )}
      {lines.map((line) => (
        <NoticeLine key={line.id} line={line} store={store} />
      ))}
    </div>
  );
}

function NoticeLine({ line, store }: { line: Line; store: Store }) {
  const level = line.level in WORDS ? line.level : "info";
  return (
    <div class={`nni-notice nni-notice-${level}`} data-testid={ids.notice} data-level={line.level}>
      <b>{WORDS[level]}</b>
      <span class="nni-notice-text">
        {line.text}
        {line.site !== null && store.sites.value?.byKey.has(line.site) && (
          <>
            {" "}
            <button type="button" class="nni-link" onClick={() => store.select(line.site!)}>
              {label(line.site)}
            </button>
          </>
        )}
      </span>
      <button type="button" class="nni-icon" aria-label="Dismiss" title="Dismiss" onClick={() => store.dismiss(line.id)}>
        ×
      </button>
    </div>
  );
}
