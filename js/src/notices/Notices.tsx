// Lines for the user to read: the kernel's notices, failed requests, late answers.
// Invariant: every line also gives its level in words, and stays until it is dismissed or solved.
import type { Bridge } from "../kernel/bridge";
import { label } from "../kernel/sites";
import type { NoticeLine, Store } from "../store";
import { LEVEL_NAMES } from "../ui/Badge";

export function Notices({ store, bridge }: { store: Store; bridge: Bridge }) {
  const lines = store.notices.value;
  const late = bridge.late.value > 0;
  const silent = bridge.silent.value;
  if (lines.length === 0 && !late) return null;
  return (
    <div class="nni-notices" aria-live="polite">
      {late && (
        <div class="nni-notice nni-notice-info" data-testid="nni-notice" data-level="info">
          <b>Note</b>
          <span class="nni-notice-text">{bridge.unanswered.value > 0 ? unansweredText(bridge.kernelStatus, silent, store.pendingNote.value) : "The kernel has not answered yet: it may be compiling, or running a cell."}</span>
        </div>
      )}
      {lines.map((line) => (
        <NoticeRow key={line.id} line={line} store={store} />
      ))}
    </div>
  );
}

/** What is known of a kernel that has not answered a click: whether it is busy, or gone. */
function unansweredText(kernel: string, silent: boolean, waits: string): string {
  if (["dead", "terminating"].includes(kernel)) return "The kernel is dead. Restart it, and run the cells again.";
  if (kernel === "idle") return "The kernel does not answer, although no cell runs. Restart it if this stays so.";
  if (kernel === "busy" || !silent) return `The kernel is busy and has not answered yet.${waits && ` What you have clicked ${waits}.`}`;
  return "Nothing has come from the kernel since your click. If no cell is running, the kernel may be dead.";
}

function NoticeRow({ line, store }: { line: NoticeLine; store: Store }) {
  const level = line.level in LEVEL_NAMES ? (line.level as keyof typeof LEVEL_NAMES) : "info";
  return (
    <div class={`nni-notice nni-notice-${level}`} data-testid="nni-notice" data-level={line.level}>
      <b>{LEVEL_NAMES[level]}</b>
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
