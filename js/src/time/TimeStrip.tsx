// The strip under the header: the pass on screen, a slider over the recorded passes, and the pinned
// pass to compare with. Invariants: nothing here moves as steps arrive; every stop of the slider is
// a pass that exists; thinned passes are gone and counted.
import { useMemo } from "preact/hooks";
import type { Store } from "../store";
import { Origin, Perturbed } from "../ui/Badge";
import { count, exact } from "../ui/format";
import { ids } from "../ui/testids";
import { pinnedName } from "./names";
import type { PassList } from "./passes";
import { SPEEDS } from "./timeline";

/** Whose batch a pass shows, by its kind. */
const BATCH: Readonly<Record<string, string>> = {
  watch: "loop's batch",
  step: "step's batch",
  run: "run's batch",
  push: "pushed",
};

export function TimeStrip({ store }: { store: Store }) {
  const { timeline } = store;
  const passes = timeline.passes.value;
  const frame = store.frame.value;
  const held = timeline.held.value;
  const playing = timeline.playing.value;
  const index = frame || held !== null ? timeline.index() : 0;
  const none = passes.count < 2;
  const saved = store.saved.value;
  const at = frame ? passes.indexOf(frame.header.number) : -1;
  const words = none || index >= passes.count ? "no other pass" : describe(passes, index);
  return (
    <div class="nni-time" role="group" aria-label="Time" data-testid={ids.time} data-state={held === null ? "follow" : "held"}>
      <span class="nni-time-buttons">
        <button
          type="button"
          class="nni-button nni-time-follow"
          aria-pressed={held !== null}
          data-testid={ids.pause}
          title={held === null ? "Hold this pass on screen; the run goes on" : "Show the newest pass again"}
          onClick={() => store.setPaused(held === null)}
        >
          {held === null ? "❚❚ Hold" : "▶ Follow"}
        </button>
        <button type="button" class="nni-icon" title="One pass back" aria-label="One pass back" data-testid={ids.stepBack} disabled={none || index <= 0} onClick={() => timeline.stepBy(-1)}>
          ◂
        </button>
        <button
          type="button"
          class="nni-icon"
          title={playing ? "Stop playing" : "Play the recorded passes"}
          aria-label={playing ? "Stop playing" : "Play the recorded passes"}
          aria-pressed={playing}
          data-testid={ids.play}
          disabled={none}
          onClick={() => (playing ? timeline.stop() : timeline.play())}
        >
          {playing ? "■" : "▷"}
        </button>
        <button type="button" class="nni-icon" title="One pass forward" aria-label="One pass forward" data-testid={ids.stepForward} disabled={none || index >= passes.count - 1} onClick={() => timeline.stepBy(1)}>
          ▸
        </button>
        <select
          aria-label="Speed, in passes per second"
          title="Speed, in passes per second"
          value={timeline.speed.value}
          data-testid={ids.speed}
          onChange={(event) => (timeline.speed.value = Number(event.currentTarget.value))}
        >
          {SPEEDS.map((speed) => (
            <option key={speed} value={speed}>
              {speed}/s
            </option>
          ))}
        </select>
      </span>
      <span class="nni-time-track">
        <Marks passes={passes} pinned={timeline.pinned.value?.header.number} />
        <input
          type="range"
          min={0}
          max={Math.max(passes.count - 1, 1)}
          step={1}
          value={none ? 1 : index}
          disabled={none}
          aria-label="Recorded pass on screen"
          aria-valuetext={words}
          data-testid={ids.scrub}
          data-value={exact(frame?.header.number)}
          onInput={(event) => {
            timeline.stop();
            timeline.goTo(Number(event.currentTarget.value));
          }}
        />
      </span>
      <span class="nni-time-where" title={whole(passes)} data-testid={ids.timeStep} data-value={exact(frame?.header.step)}>
        <Origin of={held !== null ? "held" : saved ? "saved" : "live"} />
        {at >= 0 && passes.perturbed(at) && <Perturbed on />}
        {held === null && !saved ? at >= 0 && BATCH[passes.kind(at)] : `step ${count(frame?.header.step)}`}
      </span>
      <Pin store={store} />
    </div>
  );
}

function Pin({ store }: { store: Store }) {
  const pinned = store.timeline.pinned.value;
  const shown = store.frame.value;
  return (
    <span class="nni-time-pin">
      <button
        type="button"
        class="nni-button"
        aria-pressed={pinned !== null}
        disabled={!shown && !pinned}
        data-testid={ids.pin}
        title={pinned ? "Compare with no pass" : "Keep this pass to compare others with it"}
        onClick={() => (pinned ? store.timeline.unpin() : store.timeline.pin())}
      >
        {pinned ? "Unpin" : "Pin"}
      </button>
      <span class="nni-time-pinned" title={pinnedName(store)} data-testid={ids.pinned} data-value={exact(pinned?.header.step)}>
        {pinned ? `vs ${pinnedName(store)}` : ""}
      </span>
    </span>
  );
}

/** Below the slider: the perturbed passes, and the places where the perturbations changed. */
function Marks({ passes, pinned }: { passes: PassList; pinned: number | undefined }) {
  const [spans, changes] = useMemo(() => outlines(passes), [passes]);
  const last = Math.max(passes.count - 1, 1);
  const at = pinned === undefined ? -1 : passes.indexOf(pinned);
  return (
    <svg class="nni-time-marks" viewBox={`0 0 ${last} 10`} preserveAspectRatio="none" aria-hidden="true">
      <path class="nni-time-on" d={spans} />
      <path class="nni-time-changed" d={changes} />
      {at >= 0 && <path class="nni-time-at" d={`M${at} 0V10`} />}
    </svg>
  );
}

function outlines(passes: PassList): [spans: string, changes: string] {
  let [spans, changes] = ["", ""];
  let from = -1;
  for (let i = 0; i <= passes.count; i++) {
    const on = i < passes.count && passes.perturbed(i);
    if (on && from < 0) from = i;
    if (!on && from >= 0) {
      spans += `M${Math.max(from - 0.5, 0)} 6H${Math.min(i - 0.5, passes.count - 1)}`;
      from = -1;
    }
    if (i < passes.count && passes.changed(i)) changes += `M${i} 2V10`;
  }
  return [spans, changes];
}

function describe(passes: PassList, index: number): string {
  const changed = passes.changed(index) ? "; the perturbations changed here" : "";
  const on = passes.perturbed(index) ? ", perturbed" : "";
  return `step ${passes.step(index)}, ${passes.kind(index)}${on}: pass ${index + 1} of ${passes.count}${changed}`;
}

function whole(passes: PassList): string {
  if (passes.count === 0) return "No pass is recorded yet";
  const gone = passes.thinned > 0 ? `; ${count(passes.thinned)} older ones were thinned out` : "";
  return `${count(passes.count)} passes are recorded, steps ${passes.step(0)} to ${passes.step(passes.count - 1)}${gone}`;
}
