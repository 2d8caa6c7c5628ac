// The buttons of time. The first one is what is wanted most: to hold a run, to follow it again, or to
// play what was recorded; the menu has the rest.
import type { CurveData } from "../kernel/decode";
import type { Store } from "../store";
import { count } from "../ui/format";
import { Menu } from "../ui/Menu";
import { canBeLog } from "./curve";
import type { PassTable } from "./passes";
import { SPEEDS } from "./timeline";

type StoreProps = { readonly store: Store };

/** Whether new passes arrive. */
const isLive = (store: Store): boolean => store.progress.value?.running === true;

export function MainButton({ store, word = false }: StoreProps & { word?: boolean }) {
  return isLive(store) && !store.timeline.playing.value ? <HoldButton store={store} word={word} /> : <PlayButton store={store} word={word} />;
}

function HoldButton({ store, word }: StoreProps & { word: boolean }) {
  const following = store.timeline.held.value === null;
  const name = following ? "Hold" : "Follow";
  return (
    <button
      type="button"
      class="nni-button nni-time-main"
      aria-label={name}
      aria-pressed={!following}
      data-testid="nni-pause"
      title={following ? "Hold this pass on screen; the run goes on" : "Show the newest pass again"}
      onClick={() => (following ? store.timeline.hold() : store.timeline.follow())}
    >
      {following ? "❚❚" : "▶"}
      {word && ` ${name}`}
    </button>
  );
}

function PlayButton({ store: { timeline }, word }: StoreProps & { word: boolean }) {
  const playing = timeline.playing.value;
  const name = playing ? "Stop" : "Play";
  return (
    <button
      type="button"
      class="nni-button nni-time-main"
      aria-label={name}
      aria-pressed={playing}
      title={playing ? "Stop playing" : "Play the recorded passes"}
      data-testid="nni-play"
      disabled={timeline.passes.value.count < 2}
      onClick={() => (playing ? timeline.stop() : timeline.play())}
    >
      {playing ? "■" : "▷"}
      {word && ` ${name}`}
    </button>
  );
}

export function StepButtons({ store: { timeline, frame } }: StoreProps) {
  const last = timeline.passes.value.count - 1;
  const button = (name: string, testid: string, sign: string, by: number, end: number) => (
    <button type="button" class="nni-icon" title={name} aria-label={name} data-testid={testid} disabled={last < 1 || !frame.value || timeline.index() === end} onClick={() => timeline.stepBy(by)}>
      {sign}
    </button>
  );
  return (
    <>
      {button("One pass back", "nni-step-back", "◂", -1, 0)}
      {button("One pass forward", "nni-step-forward", "▸", 1, last)}
    </>
  );
}

export function PinButton({ store }: StoreProps) {
  const pinned = store.timeline.pinned.value;
  return (
    <button
      type="button"
      class="nni-button nni-time-pin"
      aria-pressed={pinned !== null}
      disabled={!store.frame.value && !pinned}
      data-testid="nni-pin"
      title={pinned ? "Compare with no pass" : "Keep this pass to compare others with it"}
      onClick={() => (pinned ? store.timeline.unpin() : store.timeline.pin())}
    >
      {pinned ? "Unpin" : "Pin"}
    </button>
  );
}

interface MenuProps extends StoreProps {
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
    <Menu label="More about time" testid="nni-time-menu">
      <span class="nni-menu-line">
        {other ? <PlayButton store={store} word /> : <HoldButton store={store} word />}
        {steps && (
          <span>
            <StepButtons store={store} />
          </span>
        )}
      </span>
      <label>
        Speed, in passes per second
        <select value={timeline.speed.value} data-testid="nni-speed" onChange={(event) => (timeline.speed.value = Number(event.currentTarget.value))}>
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
          <input type="checkbox" checked={log} data-testid={`nni-metric-log-${curve.name}`} onChange={() => toggle(curve)} />
        </label>
      )}
      <p class="nni-faint">{recordedText(timeline.passes.value)}</p>
    </Menu>
  );
}

function recordedText(passes: PassTable): string {
  if (passes.count === 0) return "No pass is recorded yet.";
  const gone = passes.thinned > 0 ? `; ${count(passes.thinned)} older ones were thinned out` : "";
  return `${count(passes.count)} passes are recorded, steps ${passes.step(0)} to ${passes.step(passes.count - 1)}${gone}.`;
}
