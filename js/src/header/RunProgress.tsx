// How the run is, and the step on screen.
// Invariants: whatever takes a while is named in place of "live", with the time so far; a held pass
// says where the run is; the step is that of the drawn frame, not of the newest one received.
import type { Progress } from "../kernel/protocol";
import type { Store } from "../store";
import { ORIGINS } from "../ui/Badge";
import { count, exact } from "../ui/format";
import { Waiting } from "./Waiting";

export function RunProgress({ store }: { store: Store }) {
  const progress = store.progress.value;
  const step = store.frame.value?.header.step ?? (progress?.kind ? progress.step : undefined);
  const recorded = store.state.value?.recorded;
  const status = recorded ? RECORDED_STATUS[recorded.run] : progress ? runStatus(progress) : "waiting";
  const held = store.timeline.held.value !== null;
  const look = held ? "held" : store.isSaved.value && !recorded ? "saved" : status;
  const waits = store.waiting.value.length > 0;
  const watched = progress?.kind === "watch";
  return (
    <span class="nni-run-progress">
      {waits ? (
        <span class="nni-status nni-status-waiting" role="status">
          <Waiting store={store} />
        </span>
      ) : (
        <span class={`nni-status nni-status-${look}`} title={TITLES[look]}>
          {look === "running" ? "live" : look}
        </span>
      )}
      <span class="nni-progress" data-testid="nni-progress" data-value={exact(progress?.step)} data-state={status}>
        <b class="nni-step" data-testid="nni-step" data-value={exact(step)}>
          {step === undefined ? "no step yet" : `step ${count(step)}`}
        </b>
        {watched && <span class="nni-faint nni-steps-done">{doneText(progress, held)}</span>}
        {watched && progress.total !== null && <Bar progress={progress} total={progress.total} />}
      </span>
    </span>
  );
}

function Bar({ progress: { kind, step }, total }: { progress: Progress; total: number }) {
  return (
    <span
      class="nni-bar"
      role="progressbar"
      aria-label={`${kind}: steps`}
      aria-valuemin={0}
      aria-valuemax={total}
      aria-valuenow={step}
      aria-valuetext={`${count(step)} of ${count(total)}`}
    >
      <span style={{ transform: `scaleX(${total ? Math.min(step / total, 1) : 0})` }} />
    </span>
  );
}

function doneText({ step, total, running }: Progress, held: boolean): string {
  if (held && running) return `run is at ${count(step)}`;
  return total === null ? `${count(step)} done` : `${count(step)} of ${count(total)} done`;
}

/** How a run that happens elsewhere is. */
const RECORDED_STATUS = { running: "running", stalled: "stalled", ended: "finished", gone: "stopped" } as const;

const TITLES: Readonly<Record<string, string>> = { ...ORIGINS, running: ORIGINS.live, idle: "No loop runs" };

/** A loop that was left before its end is idle, not finished. */
function runStatus({ kind, running, step, total }: Progress): string {
  if (running) return "running";
  return kind === "watch" && step >= (total ?? 0) ? "finished" : "idle";
}
