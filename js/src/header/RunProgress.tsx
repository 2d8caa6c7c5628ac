// The progress of the run, and its speed.
// Invariants: whatever takes a while is named in place of "running", with the time so far;
// the progress is shown once, in steps done if a loop counts them, else as the step on
// screen; that is the step of the drawn frame, not of the newest one received.
import type { Progress } from "../kernel/protocol";
import type { Store } from "../store";
import { count, exact, real } from "../ui/format";
import { ids } from "../ui/testids";
import { Waiting } from "./Waiting";

export function RunProgress({ store }: { store: Store }) {
  const progress = store.progress.value;
  const step = store.frame.value?.header.step ?? (progress?.kind ? progress.step : undefined);
  const recorded = store.state.value?.recorded;
  const status = recorded ? RECORDED[recorded.run] : progress ? statusOf(progress) : "waiting";
  const onScreen = step === undefined ? "no step yet" : `step ${count(step)}`;
  const waits = store.waiting.value.length > 0;
  const text = progress?.kind === "watch" ? doneOf(progress) : onScreen;
  return (
    <div class="nni-run">
      <span class="nni-progress" data-testid={ids.progress} data-value={exact(progress?.step)} data-state={status}>
        {progress?.kind === "watch" && progress.total !== null && <Bar progress={progress} total={progress.total} text={text} />}
        <span class="nni-step" title={`On screen: ${onScreen}`} data-testid={ids.step} data-value={exact(step)}>
          {text}
        </span>
      </span>
      {waits ? (
        <span class="nni-status nni-status-waiting" role="status">
          <Waiting store={store} />
        </span>
      ) : (
        <span class={`nni-status nni-status-${status}`}>{status}</span>
      )}
      {progress?.running && !waits && progress.rate !== null && (
        <span class="nni-rate">{real(Number(progress.rate.toPrecision(3)))} steps/s</span>
      )}
    </div>
  );
}

function Bar({ progress: { kind, step }, total, text }: { progress: Progress; total: number; text: string }) {
  return (
    <span
      class="nni-bar"
      role="progressbar"
      aria-label={`${kind}: steps`}
      aria-valuemin={0}
      aria-valuemax={total}
      aria-valuenow={step}
      aria-valuetext={text}
    >
      <span style={{ transform: `scaleX(${total ? Math.min(step / total, 1) : 0})` }} />
    </span>
  );
}

function doneOf({ step, total }: Progress): string {
  return total === null ? `${count(step)} steps` : `${count(step)} of ${count(total)}`;
}

/** How a run that happens elsewhere is. */
const RECORDED = { running: "running", stalled: "stalled", ended: "finished", gone: "stopped" } as const;

/** A loop that was left before its end is idle, not finished. */
function statusOf({ kind, running, step, total }: Progress): string {
  if (running) return "running";
  return kind === "watch" && step >= (total ?? 0) ? "finished" : "idle";
}
