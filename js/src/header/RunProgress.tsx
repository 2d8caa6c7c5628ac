// The step on screen, how far the run is, how fast, and the button that holds the step.
// Invariant: the step shown is that of the frame drawn, not of the newest received.
import type { Progress } from "../protocol";
import type { Store } from "../store";
import { count, exact, real } from "../format";
import { ids } from "../testids";

export function RunProgress({ store }: { store: Store }) {
  const progress = store.progress.value;
  const frame = store.frame.value;
  const paused = store.paused.value;
  const step = frame?.header.step ?? progress?.step;
  const status = progress ? statusOf(progress) : "waiting";
  return (
    <div class="nni-run">
      <span class="nni-step" data-testid={ids.step} data-value={exact(step)}>
        {step === undefined ? "no step yet" : `step ${count(step)}`}
      </span>
      {progress && <Bar progress={progress} status={status} />}
      <span class={`nni-status nni-status-${status}`}>{status}</span>
      {progress?.running && progress.rate !== null && (
        <span class="nni-rate">{real(Number(progress.rate.toPrecision(3)))} steps/s</span>
      )}
      <button
        type="button"
        class="nni-button"
        aria-pressed={paused}
        data-testid={ids.pause}
        title={paused ? "Show the newest step again" : "Hold this step on screen; the run goes on"}
        onClick={() => store.setPaused(!paused)}
      >
        {paused ? "▶ Follow" : "❚❚ Hold"}
      </button>
    </div>
  );
}

function Bar({ progress, status }: { progress: Progress; status: string }) {
  const { step, total } = progress;
  const fraction = total ? Math.min(step / total, 1) : 0;
  const text = total === null ? `${count(step)} steps` : `${count(step)} of ${count(total)}`;
  return (
    <span class="nni-progress" data-testid={ids.progress} data-value={exact(step)} data-state={status}>
      {total !== null && (
        <span
          class="nni-bar"
          role="progressbar"
          aria-label={`${progress.kind}: steps`}
          aria-valuemin={0}
          aria-valuemax={total}
          aria-valuenow={step}
          aria-valuetext={text}
        >
          <span style={{ transform: `scaleX(${fraction})` }} />
        </span>
      )}
      <span class="nni-of">{text}</span>
    </span>
  );
}

function statusOf({ running, step, total }: Progress): string {
  if (running) return "running";
  return total !== null && step >= total ? "finished" : "idle";
}
