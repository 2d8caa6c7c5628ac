// The buttons of time. The first one is what is wanted most: to hold a run, to follow it again, or to
// play what was recorded; the menu has the rest.
import type { CurveData } from "../kernel/decode";
import type { Store } from "../store";
import { count } from "../ui/format";
import { More } from "../ui/More";
import { ids } from "../ui/testids";
import { canBeLog } from "./curve";
import type { PassList } from "./passes";
import { SPEEDS } from "./timeline";

type Of = { readonly store: Store };

/** Whether new passes arrive. */
const isLive = (store: Store): boolean => store.progress.value?.running === true;

export function Main({ store, word = false }: Of & { word?: boolean }) {
  return isLive(store) && !store.timeline.playing.value ? <HoldOrFollow store={store} word={word} /> : <Play store={store} word={word} />;
}

function HoldOrFollow({ store, word }: Of & { word: boolean }) {
  const following = store.timeline.held.value === null;
  const name = following ? "Hold" : "Follow";
  return (
    <button
      type="button"
      class="nni-button nni-time-main"
      aria-label={name}
      aria-pressed={!following}
      data-testid={ids.pause}
      title={following ? "Hold this pass on screen; the run goes on" : "Show the newest pass again"}
      onClick={() => store.setPaused(following)}
    >
      {following ? "❚❚" : "▶"}
      {word && ` ${name}`}
    </button>
  );
}

function Play({ store: { timeline }, word }: Of & { word: boolean }) {
  const playing = timeline.playing.value;
  const name = playing ? "Stop" : "Play";
  return (
    <button
      type="button"
      class="nni-button nni-time-main"
      aria-label={name}
      aria-pressed={playing}
      title={playing ? "Stop playing" : "Play the recorded passes"}
      data-testid={ids.play}
      disabled={timeline.passes.value.count < 2}
      onClick={() => (playing ? timeline.stop() : timeline.play())}
    >
      {playing ? "■" : "▷"}
      {word && ` ${name}`}
    </button>
  );
}

export function BackAndForward({ store: { timeline, frame } }: Of) {
  const last = timeline.passes.value.count - 1;
  const button = (name: string, testid: string, sign: string, by: number, end: number) => (
    <button type="button" class="nni-icon" title={name} aria-label={name} data-testid={testid} disabled={last < 1 || !frame.value || timeline.index() === end} onClick={() => timeline.stepBy(by)}>
      {sign}
    </button>
  );
  return (
    <>
      {button("One pass back", ids.stepBack, "◂", -1, 0)}
      {button("One pass forward", ids.stepForward, "▸", 1, last)}
    </>
  );
}

export function Pin({ store }: Of) {
  const pinned = store.timeline.pinned.value;
  return (
    <button
      type="button"
      class="nni-button nni-time-pin"
      aria-pressed={pinned !== null}
      disabled={!store.frame.value && !pinned}
      data-testid={ids.pin}
      title={pinned ? "Compare with no pass" : "Keep this pass to compare others with it"}
      onClick={() => (pinned ? store.timeline.unpin() : store.timeline.pin())}
    >
      {pinned ? "Unpin" : "Pin"}
    </button>
  );
}

interface MenuProps extends Of {
  /** Whether it has the steps back and forward. */
  steps?: boolean;
  /** The metric whose axis it changes. */
  curve?: CurveData | undefined;
  log?: boolean;
  toggle?: (curve: CurveData) => void;
}

/** What is not needed at every look. */
export function TimeMenu({ store, steps = false, curve, log = false, toggle }: MenuProps) {
  const { timeline } = store;
  const other = isLive(store) && !timeline.playing.value;
  return (
    <More label="More about time" testid={ids.timeMenu}>
      <span class="nni-more-line">
        {other ? <Play store={store} word /> : <HoldOrFollow store={store} word />}
        {steps && (
          <span>
            <BackAndForward store={store} />
          </span>
        )}
      </span>
      <label>
        Speed, in passes per second
        <select value={timeline.speed.value} data-testid={ids.speed} onChange={(event) => (timeline.speed.value = Number(event.currentTarget.value))}>
          {SPEEDS.map((speed) => (
            <option key={speed} value={speed}>
              {speed}
            </option>
          ))}
        </select>
      </label>
      {curve && toggle && canBeLog(curve.points) && (
        <label>
          Logarithmic axis of {curve.name}
          <input type="checkbox" checked={log} data-testid={ids.metricLog(curve.name)} onChange={() => toggle(curve)} />
        </label>
      )}
      <p class="nni-faint">{whole(timeline.passes.value)}</p>
    </More>
  );
}

function whole(passes: PassList): string {
  if (passes.count === 0) return "No pass is recorded yet.";
  const gone = passes.thinned > 0 ? `; ${count(passes.thinned)} older ones were thinned out` : "";
  return `${count(passes.count)} passes are recorded, steps ${passes.step(0)} to ${passes.step(passes.count - 1)}${gone}.`;
}
