// The rules by which messages and clicks change the screen.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { KernelRequest } from "../src/kernel/bridge";
import { statistic } from "../src/kernel/decode";
import { Store } from "../src/store";
import { SITES, cell, frame, layout, perturbation, scale, site, state } from "./helpers/messages";

let store: Store;
let acked: number[];
let asked: { request: KernelRequest; settle: (error: string | null) => void }[];

beforeEach(() => {
  vi.useFakeTimers();
  acked = [];
  asked = [];
  store = new Store({
    ack: (seq) => acked.push(seq),
    ask: (request, settle = () => undefined) => asked.push({ request, settle }),
  });
});
afterEach(() => vi.useRealTimers());

const draw = (): void => void vi.advanceTimersByTime(40);
const shown = (): number | undefined => store.frame.value?.header.seq;

describe("frames", () => {
  beforeEach(() => store.receive(layout(), undefined));

  it("of several, only the newest is drawn, then acknowledged", () => {
    for (const seq of [1, 2, 3]) store.receive(...frame(seq));
    expect(shown()).toBeUndefined();
    expect(acked).toEqual([]);
    draw();
    expect(shown()).toBe(3);
    expect(acked).toEqual([3]);
  });

  it("of another layout are ignored", () => {
    store.receive(...frame(1, { layout: 2 }));
    draw();
    expect(shown()).toBeUndefined();
    expect(acked).toEqual([]);
  });

  it("are dropped when the layout changes, drawn or not", () => {
    store.receive(...frame(1));
    draw();
    store.receive(...frame(2));
    store.receive(layout([...SITES, site("tail", 0)], 2), undefined);
    draw();
    expect(store.frame.value).toBeNull();
    store.receive(...frame(3, { layout: 2, sites: 6 }));
    draw();
    expect(shown()).toBe(3);
  });

  it("with another number of sites than the layout are refused in words", () => {
    store.receive(...frame(1, { sites: 2 }));
    draw();
    expect(shown()).toBeUndefined();
    expect(store.notices.value[0].text).toBe("Frame 1 has 2 sites, its layout 5.");
  });

  it("wait while the step is held, but for those of the same step", () => {
    store.receive(...frame(1, { step: 5 }));
    draw();
    store.timeline.hold();
    store.receive(...frame(2, { step: 5 }));
    draw();
    expect(shown()).toBe(2);
    store.receive(...frame(3, { step: 6 }));
    store.receive(...frame(4, { step: 7 }));
    draw();
    expect(shown()).toBe(2);
    expect(acked).toEqual([1, 2]);
    store.timeline.follow();
    draw();
    expect(shown()).toBe(4);
    expect(acked).toEqual([1, 2, 4]);
  });

  it("never turn the progress back: what came last counts, not what is drawn last", () => {
    const at = (step: number): { kind: string; running: boolean; step: number; total: number; rate: number } => ({ kind: "watch", running: true, step, total: 100, rate: 2 });
    const seen: (number | undefined)[] = [];
    const stop = store.progress.subscribe((progress) => seen.push(progress?.step));
    for (const step of [80, 82]) {
      const [header, buffer] = frame(step, { step });
      store.receive({ ...header, progress: at(step + 1) }, buffer);
      store.receive(state({ progress: at(step + 2) }), undefined); // a tick, before the frame is drawn
      draw();
    }
    const [header, buffer] = frame(84, { step: 84 });
    store.receive({ ...header, progress: at(85) }, buffer); // with no State after it
    draw();
    stop();
    expect(seen).toEqual([undefined, 82, 84, 85]);
  });

  it("with NaN mark their site and what is above it", () => {
    store.receive(...frame(1, { value: 0, edit: (t) => (t[cell(2, 0, "nan")] = 3) }));
    draw();
    expect(statistic(store.frame.value!, 2, 0, "nan")).toBe(3);
    expect([...store.notFinite.value]).toEqual([2, 2, 5, 0, 0]);
  });
});

describe("selection", () => {
  beforeEach(() => {
    store.receive(layout(), undefined);
    store.receive(state(), undefined);
  });

  it("follows the kernel, and a click at once", () => {
    expect(store.selected.value).toBe("blocks/0");
    store.receive(state({ selected: "head" }), undefined);
    expect(store.selected.value).toBe("head");
    store.select("blocks/1");
    expect(store.selected.value).toBe("blocks/1");
    store.receive(state({ selected: "head" }), undefined); // sent before the kernel knew
    expect(store.selected.value).toBe("blocks/1");
  });

  it("asks for the last of many rows passed in a hurry", () => {
    for (const key of ["blocks/1", "head", "blocks"]) store.select(key);
    vi.advanceTimersByTime(100);
    expect(asked.map((a) => a.request)).toEqual([{ type: "select", site: "blocks" }]);
  });

  it("does not jump back while a request is on its way", () => {
    store.select("head");
    vi.advanceTimersByTime(100);
    store.receive(state({ selected: "blocks/1" }), undefined);
    expect(store.selected.value).toBe("head");
    asked[0].settle(null);
    store.receive(state({ selected: "head" }), undefined);
    store.receive(state({ selected: "blocks" }), undefined);
    expect(store.selected.value).toBe("blocks");
  });

  it("shows the kernel's error", () => {
    store.select("head");
    vi.advanceTimersByTime(100);
    asked[0].settle("no site named 'head'");
    expect(store.notices.value[0]).toMatchObject({ level: "error", site: "head" });
    expect(store.notices.value[0].text).toContain("no site named 'head'");
  });
});

describe("perturbations", () => {
  const on = perturbation(1, "head");
  beforeEach(() => store.receive(layout(), undefined));

  it("space adds Zero where there is none, else switches", () => {
    store.receive(state(), undefined);
    store.togglePerturbation("head");
    expect(asked[0].request).toEqual({ type: "perturb", site: "head", kind: "Zero", strength: null, units: [], axis: -1, at: "output" });
    store.receive(state({ perturbations: [on] }), undefined);
    store.togglePerturbation("head");
    expect(asked[1].request).toEqual({ type: "adjust", perturbation: 1, enabled: false, strength: null });
  });

  it("follow the finger, and then the kernel", () => {
    store.receive(state({ perturbations: [on] }), undefined);
    store.adjust(1, false, null);
    expect(store.perturbations.value[0].enabled).toBe(false);
    store.receive(state({ perturbations: [on] }), undefined); // an old one
    expect(store.perturbations.value[0].enabled).toBe(false);
    asked[0].settle(null);
    store.receive(state({ perturbations: [on] }), undefined); // somebody switched it on again
    expect(store.perturbations.value[0].enabled).toBe(true);
  });

  it("go back when refused, and say why", () => {
    store.receive(state({ perturbations: [on] }), undefined);
    store.adjust(1, false, null);
    asked[0].settle("the inspector is closed");
    expect(store.perturbations.value[0].enabled).toBe(true);
    expect(store.notices.value[0].text).toContain("the inspector is closed");
  });

  it("dragging sends the first and the last strength, and few between", () => {
    store.receive(state({ perturbations: [scale(1, "head", 1)] }), undefined);
    for (let i = 0; i <= 20; i++) store.adjust(1, true, i / 20);
    vi.advanceTimersByTime(200);
    const sent = asked.map((a) => (a.request as { strength: number }).strength);
    expect(sent[0]).toBe(0);
    expect(sent.at(-1)).toBe(1);
    expect(sent.length).toBeLessThan(4);
  });

  it("a drag of a second sends at most 20 strengths, the last one among them", () => {
    store.receive(state({ perturbations: [scale(1, "head", 1)] }), undefined);
    for (let ms = 0; ms < 1000; ms += 5) {
      store.adjust(1, true, ms / 1000);
      vi.advanceTimersByTime(5);
    }
    vi.advanceTimersByTime(200);
    const sent = asked.map((a) => (a.request as { strength: number }).strength);
    expect(sent.length).toBeLessThanOrEqual(21); // the first at once, then one every 50 ms
    expect(sent.at(-1)).toBe(0.995);
  });

  it("all are switched by one request, and follow the finger", () => {
    const two = [perturbation(1, "head"), scale(2, "blocks/0", 0.5)];
    store.receive(state({ perturbations: two }), undefined);
    store.switchAll(false);
    expect(asked.map((a) => a.request)).toEqual([{ type: "switch_all", enabled: false }]);
    expect(store.perturbations.value.map((p) => p.enabled)).toEqual([false, false]);
    store.receive(state({ perturbations: two }), undefined); // an old one
    expect(store.perturbations.value.map((p) => p.enabled)).toEqual([false, false]);
    asked[0].settle(null);
    store.receive(state({ perturbations: two }), undefined); // somebody switched them on again
    expect(store.perturbations.value.map((p) => p.enabled)).toEqual([true, true]);
  });

  it("switching all off is not undone by a drag that was still to be sent", () => {
    store.receive(state({ perturbations: [scale(1, "head", 1)] }), undefined);
    store.adjust(1, true, 0.5);
    store.adjust(1, true, 0.25);
    store.switchAll(false);
    vi.advanceTimersByTime(200);
    expect(asked.at(-1)!.request).toEqual({ type: "adjust", perturbation: 1, enabled: false, strength: 0.25 });
  });

  it("that could not all be switched go back, and say why", () => {
    store.receive(state({ perturbations: [perturbation(1, "head")] }), undefined);
    store.switchAll(false);
    asked[0].settle("the inspector is closed");
    expect(store.perturbations.value[0].enabled).toBe(true);
    expect(store.notices.value[0].text).toBe("Could not switch off the perturbations: the inspector is closed");
  });

  it("mark the rows of all their sites, and a layer its stack", () => {
    const several = perturbation(1, "blocks/*", { sites: ["blocks/0", "blocks/1"], reach: 2, enabled: false });
    store.receive(state({ perturbations: [several, perturbation(2, "head[3]"), perturbation(3, "gone")] }), undefined);
    expect([...store.perturbed.value]).toEqual([["blocks/0", false], ["blocks/1", false], ["head", true]]); // prettier-ignore
  });
});

it("notices can be dismissed, and a new one shows", () => {
  const notice = { level: "warning", text: "NaN at step 3", site: "head" };
  store.receive(state({ notices: [notice] }), undefined);
  store.dismiss(store.notices.value[0].id);
  store.receive(state({ notices: [notice] }), undefined);
  expect(store.notices.value).toEqual([]);
  store.receive(state({ notices: [notice, { ...notice, text: "NaN at step 4" }] }), undefined);
  expect(store.notices.value.map((n) => n.text)).toEqual(["NaN at step 4"]);
});
