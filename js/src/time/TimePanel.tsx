// Time: the metrics over the steps, with one cursor for all. Below 800 pixels the chosen metric is the
// track; beside the detail every metric has a curve. Hovering reads out, a click or a drag holds, Escape
// follows. Invariants: every stop of the slider is a pass that exists; nothing moves as steps arrive.
import { useCallback, useMemo, useRef, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import type { CurveData } from "../kernel/decode";
import type { Store } from "../store";
import { count, exact, decimal } from "../ui/format";
import { isStacked, type Layout } from "../frame/layout";
import { StepButtons, MainButton, PinButton, TimeMenu } from "./Buttons";
import { Curves } from "./Curves";
import { notFiniteSteps, canBeLog, paintCurve, paintTrack, stepOfX, suitsLog, valueAt, type CurveMarks } from "./curve";
import { pinnedName } from "./passNames";
import { perturbedSteps, type PassTable } from "./passes";

/** The heights of the track with its curve above it, and alone. */
const [PLOT, TRACK] = [40, 12];

export function TimePanel({ store, layout }: { store: Store; layout: Layout }) {
  const curves = store.curves.value.filter((curve) => curve.points.length > 0);
  const [name, choose] = useState("");
  const chosen = curves.find((curve) => curve.name === name) ?? curves[0];
  const [logs, setLog] = useState<Readonly<Record<string, boolean>>>({});
  const isLog = ({ name, points }: CurveData): boolean => canBeLog(points) && (logs[name] ?? suitsLog(points));
  const toggle = (curve: CurveData): void => setLog({ ...logs, [curve.name]: !isLog(curve) });
  const marks = useMarks(store);
  const shown = { curves, chosen, isLog, toggle, marks };
  const { timeline } = store;
  return (
    <section
      class={isStacked(layout) ? "nni-time" : "nni-time nni-time-side"}
      role="group"
      aria-label="Time"
      data-testid="nni-time"
      data-state={timeline.held.value === null ? "follow" : "held"}
      onKeyDown={(event) => {
        if (event.key !== "Escape" || timeline.held.value === null) return;
        event.stopPropagation();
        timeline.follow();
      }}
    >
      {isStacked(layout) ? <NarrowTime store={store} {...shown} choose={choose} /> : <SideTime store={store} {...shown} />}
    </section>
  );
}

interface TimeProps {
  readonly store: Store;
  readonly curves: readonly CurveData[];
  readonly chosen: CurveData | undefined;
  readonly isLog: (curve: CurveData) => boolean;
  readonly toggle: (curve: CurveData) => void;
  readonly marks: CurveMarks;
}

function NarrowTime({ store, curves, chosen, isLog, toggle, marks, choose }: TimeProps & { choose: (name: string) => void }) {
  const log = chosen !== undefined && isLog(chosen);
  const points = chosen?.points;
  const paint = useCallback(
    (area: Area) => {
      if (points) paintCurve(area, points, marks, log, TRACK);
      paintTrack(area, marks, points ? notFiniteSteps(points) : [], TRACK);
    },
    [points, marks, log],
  );
  return (
    <>
      <MainButton store={store} />
      <CursorArea store={store}>
        <Canvas height={PLOT} label="" paint={paint} />
        <Slider store={store} />
      </CursorArea>
      <PinButton store={store} />
      <div class="nni-time-legend">
        {curves.length === 0 && <span class="nni-faint" title={noMetricText(store)}>{noMetricText(store)}</span>}
        {curves.map((curve) => (
          <button
            key={curve.name}
            type="button"
            aria-pressed={curve === chosen}
            title={`Show ${curve.name} over the steps`}
            data-testid={`nni-metric-${curve.name}`}
            data-value={exact(metricValue(store, curve))}
            onClick={() => choose(curve.name)}
          >
            <span>{curve.name}</span> <MetricValue store={store} curve={curve} /> <NotFiniteNote curve={curve} />
          </button>
        ))}
      </div>
      <PinnedPass store={store} />
      <TimeMenu store={store} steps curve={chosen} log={log} toggle={toggle} />
    </>
  );
}

function SideTime({ store, curves, isLog, toggle, marks }: TimeProps) {
  const rows = curves.map((curve) => ({
    curve,
    log: isLog(curve),
    possible: canBeLog(curve.points),
    value: <MetricValue store={store} curve={curve} />,
    exactly: exact(metricValue(store, curve)),
    gaps: <NotFiniteNote curve={curve} />,
  }));
  const bad = useMemo(() => curves.flatMap(({ points }) => notFiniteSteps(points)), [store.curves.value]);
  const paint = useCallback((area: Area) => paintTrack(area, marks, bad, TRACK), [marks, bad]);
  return (
    <>
      <div class="nni-time-bar">
        <MainButton store={store} word />
        <StepButtons store={store} />
        <span class="nni-grow" />
        <PinnedPass store={store} />
        <PinButton store={store} />
        <TimeMenu store={store} />
      </div>
      <CursorArea store={store}>
        <Curves rows={rows} marks={marks} toggle={toggle} />
        {curves.length === 0 && <p class="nni-faint nni-small nni-time-none">{noMetricText(store)}</p>}
        <div class="nni-time-rail" data-track>
          <Canvas height={TRACK} label="" paint={paint} />
          <Slider store={store} />
          <span class="nni-time-ends nni-faint nni-small" aria-hidden="true">
            <span>0</span>
            <span>step</span>
            <span>{count(marks.last)}</span>
          </span>
        </div>
      </CursorArea>
    </>
  );
}

/** What has one cursor: the pointer reads out where it hovers, and holds where it presses. */
function CursorArea({ store, children }: { store: Store; children: preact.ComponentChildren }) {
  const { timeline } = store;
  const place = useRef<HTMLDivElement>(null);
  const step = ({ clientX }: PointerEvent): number => {
    const track = place.current!.querySelector("[data-track]") ?? place.current!;
    const { left, width } = track.getBoundingClientRect();
    return stepOfX(clientX - left, store.lastStep.value, width);
  };
  const isControl = ({ target }: Event): boolean => target instanceof Element && target.closest("button") !== null;
  return (
    <div
      ref={place}
      class="nni-time-plot"
      onPointerDown={(event) => {
        if (isControl(event) || event.button !== 0) return;
        event.preventDefault();
        event.currentTarget.setPointerCapture(event.pointerId);
        event.currentTarget.querySelector<HTMLElement>("input[type=range]")?.focus({ preventScroll: true });
        timeline.goNear(step(event));
      }}
      onPointerMove={(event) => {
        timeline.pointed.value = step(event);
        if (event.currentTarget.hasPointerCapture(event.pointerId)) timeline.goNear(step(event));
      }}
      onPointerLeave={() => (timeline.pointed.value = null)}
    >
      {children}
    </div>
  );
}

/** The slider for the keyboard and for screen readers: each stop is a pass. */
function Slider({ store }: { store: Store }) {
  const { timeline } = store;
  const passes = timeline.passes.value;
  const frame = store.frame.value;
  const index = frame || timeline.held.value !== null ? timeline.index() : 0;
  const none = passes.count < 2;
  return (
    <input
      type="range"
      class="nni-time-slider"
      min={0}
      max={Math.max(passes.count - 1, 1)}
      step={1}
      value={none ? 1 : index}
      disabled={none}
      aria-label="Recorded pass on screen"
      aria-valuetext={none || index >= passes.count ? "no other pass" : passText(passes, index)}
      data-testid="nni-scrub"
      data-value={exact(frame?.header.number)}
      onInput={(event) => {
        timeline.stop();
        timeline.goTo(Number(event.currentTarget.value));
      }}
    />
  );
}

/** The step whose values are read out: under the pointer, else on screen; Infinity for the newest. */
function readStep(store: Store): number {
  const { pointed, held } = store.timeline;
  return pointed.value ?? (held.value === null ? Infinity : (store.frame.value?.header.step ?? Infinity));
}

const metricValue = (store: Store, { points }: CurveData): number | undefined => valueAt(points, readStep(store));

function MetricValue({ store, curve }: { store: Store; curve: CurveData }) {
  const value = metricValue(store, curve);
  if (value === undefined) return <b>–</b>;
  if (Number.isFinite(value)) return <b>{decimal(value, 4)}</b>;
  return <b class="nni-bad">not finite</b>;
}

function NotFiniteNote({ curve: { name, recorded, notFinite } }: { curve: CurveData }) {
  if (notFinite === 0) return null;
  const text = `${count(notFinite)} of ${count(recorded)} not finite`;
  return (
    <span class="nni-bad nni-small" title={`${text}: the recorded values of ${name} that are NaN or Inf. Their steps are marked.`} data-testid={`nni-metric-gaps-${name}`}>
      {text}
    </span>
  );
}

/** The pinned pass by its step. */
function PinnedPass({ store }: { store: Store }) {
  const name = pinnedName(store);
  return (
    <span class="nni-time-pinned" title={name && `Compared with ${name}`} data-testid="nni-pinned" data-value={exact(store.timeline.pinned.value?.header.step)}>
      {name && `◇ ${name}`}
    </span>
  );
}

const noMetricText = (store: Store): string =>
  store.replayNote.value === "" ? "No metric yet: insp.metrics(loss=…) in the loop draws it here." : "No metric was recorded.";

function passText(passes: PassTable, index: number): string {
  const changed = passes.changed(index) ? "; the perturbations changed here" : "";
  const on = passes.perturbed(index) ? ", perturbed" : "";
  return `step ${passes.step(index)}, ${passes.kind(index)}${on}: pass ${index + 1} of ${passes.count}${changed}`;
}

function useMarks(store: Store): CurveMarks {
  const { timeline } = store;
  const passes = timeline.passes.value;
  const last = store.lastStep.value;
  const cursor = timeline.pointed.value ?? store.frame.value?.header.step ?? NaN;
  const pinned = timeline.pinned.value?.header;
  const spans = useMemo(() => perturbedSteps(passes), [passes]);
  const at = pinned && passes.indexOf(pinned.number) >= 0 ? pinned.step : NaN;
  return useMemo(() => ({ last, cursor, pinned: at, spans }), [last, cursor, at, spans]);
}
