// Which pass is drawn: following, held, scrubbed, played, and one to compare with.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { KernelRequest } from "../../src/kernel/bridge";
import { Store } from "../../src/store";
import { compareValues, differenceText } from "../../src/time/comparison";
import { decodePasses } from "../../src/time/passes";
import { SITES, frame, layout, passes, site, state } from "../helpers/messages";

let store: Store;
let asked: { request: KernelRequest; settle: (error: string | null) => void }[];

const draw = (): void => void vi.advanceTimersByTime(40);
const shown = (): number | undefined => store.frame.value?.header.number;
const wanted = (): { request: KernelRequest; settle: (error: string | null) => void }[] => asked.filter((a) => a.request.type === "show_pass");

/** The kernel answers the oldest request for a pass that has no answer yet. */
function answer(seq: number, error: string | null = null): void {
  const one = wanted()[0];
  asked.splice(asked.indexOf(one), 1);
  if (!error && one.request.type === "show_pass") store.receive(...frame(seq, { number: one.request.number, step: one.request.number * 10, held: true }));
  one.settle(error);
  draw();
}

beforeEach(() => {
  vi.useFakeTimers();
  asked = [];
  store = new Store({ ack: () => undefined, ask: (request, settle = () => undefined) => asked.push({ request, settle }) });
  store.receive(layout(), undefined);
  store.receive(state(), undefined);
  store.receive(...passes([[0, 0, 0, 0], [1, 10, 0, 0], [4, 40, 1, 1], [5, 50, 1, 2]], 2)); // prettier-ignore
  store.receive(...frame(1, { number: 5, step: 50 }));
  draw();
  vi.advanceTimersByTime(200);
});
afterEach(() => {
  store.close();
  vi.useRealTimers();
});

describe("the passes", () => {
  it("are read with what changed between them", () => {
    const list = decodePasses(...passes([[3, 7, 0, 0], [4, 8, 1, 2], [9, 8, 1, 2]], 5)); // prettier-ignore
    expect([0, 1, 2].map((i) => [list.number(i), list.step(i), list.perturbed(i), list.changed(i)])).toEqual([
      [3, 7, false, false],
      [4, 8, true, true],
      [9, 8, true, false],
    ]);
    expect([2, 3, 5, 100].map((n) => list.indexOf(n))).toEqual([-1, 0, 1, 2]);
    expect([list.count, list.thinned, list.kind(1)]).toEqual([3, 5, "watch"]);
  });

  it("of another length than announced are refused", () => {
    const [header, buffer] = passes([[3, 7, 0, 0]]);
    expect(() => decodePasses({ ...header, passes: 2 }, buffer)).toThrow(/bytes/);
  });
});

describe("holding", () => {
  it("keeps live frames away until they are followed again", () => {
    store.timeline.hold();
    store.receive(...frame(2, { number: 6 }));
    draw();
    expect(shown()).toBe(5);
    store.timeline.follow();
    draw();
    expect(shown()).toBe(6);
  });

  it("ends with the newest pass, also where no other follows", () => {
    store.timeline.goTo(0);
    answer(2);
    expect(shown()).toBe(0);
    store.timeline.follow();
    draw();
    expect(shown()).toBe(5);
  });

  it("asks again for the histograms of another selection", () => {
    store.timeline.hold();
    store.select("head");
    vi.advanceTimersByTime(200);
    expect(wanted().map((a) => a.request)).toEqual([{ type: "show_pass", number: 5, site: "head" }]);
    answer(3);
    expect(store.frame.value?.header.seq).toBe(3);
  });

  it("asks again when the rows change", () => {
    store.timeline.hold();
    store.receive(layout([...SITES, site("tail", 0)], 2), undefined);
    expect(wanted().map((a) => a.request)).toEqual([{ type: "show_pass", number: 5, site: "blocks/0" }]);
  });
});

describe("scrubbing", () => {
  it("asks for one pass at a time, and always for the last wish", () => {
    for (const index of [2, 1, 0]) store.timeline.goTo(index);
    expect(wanted().map((a) => a.request)).toEqual([{ type: "show_pass", number: 4, site: "blocks/0" }]);
    answer(2);
    expect(shown()).toBe(5);
    expect(wanted().map((a) => a.request)).toEqual([{ type: "show_pass", number: 0, site: "blocks/0" }]);
    answer(3);
    expect(shown()).toBe(0);
    expect(wanted()).toEqual([]);
  });

  it("goes by the passes that exist", () => {
    store.timeline.stepBy(-1);
    answer(2);
    store.timeline.stepBy(-1);
    answer(3);
    expect([shown(), store.frame.value?.header.step]).toEqual([1, 10]);
    store.timeline.stepBy(-5);
    answer(4);
    expect(shown()).toBe(0);
  });

  it("goes to the last clean pass of a step, or of the one before it", () => {
    const list = decodePasses(...passes([[0, 0, 0, 0], [1, 5, 0, 0], [2, 5, 0, 0], [3, 5, 1, 1], [4, 9, 0, 0]])); // prettier-ignore
    store.timeline.passes.value = list;
    store.timeline.goToStep(9); // the newest, which is followed
    expect([store.timeline.held.value, wanted()]).toEqual([null, []]);
    store.timeline.goToStep(5);
    expect(store.timeline.held.value).toBe(2);
    store.timeline.goToStep(4);
    expect(store.timeline.held.value).toBe(0);
    store.timeline.goToStep(-1); // before the first
    expect(store.timeline.held.value).toBe(0);
    store.timeline.goToStep(9);
    expect(store.timeline.held.value).toBe(4);
  });

  it("does not draw an answer that came after following again", () => {
    store.timeline.goTo(0);
    store.timeline.follow();
    answer(2);
    expect(shown()).toBe(5);
  });

  it("stays where it is, in words, when the pass is gone", () => {
    store.timeline.goTo(1);
    answer(2, "Pass 1 is not in the recording (any more).");
    expect([shown(), store.timeline.held.value]).toEqual([5, 5]);
    expect(store.notices.value[0].text).toContain("Pass 1 is not");
  });
});

describe("playing", () => {
  it("shows one pass after another, waits for the kernel, and follows at the end", () => {
    store.timeline.goTo(0);
    answer(2);
    store.timeline.speed.value = 10;
    store.timeline.play();
    vi.advanceTimersByTime(100);
    expect(wanted()).toHaveLength(1);
    vi.advanceTimersByTime(1000);
    expect(wanted()).toHaveLength(1);
    const seen: (number | undefined)[] = [];
    for (let seq = 3; wanted().length > 0 && seq < 20; seq++) {
      answer(seq);
      seen.push(shown());
      vi.advanceTimersByTime(100);
    }
    expect(seen).toEqual([1, 4, 5]);
    vi.advanceTimersByTime(200);
    expect([store.timeline.held.value, store.timeline.playing.value]).toEqual([null, false]);
  });
});

describe("a pinned pass", () => {
  it("stays while others are shown, and gets the histograms of a new selection", () => {
    store.timeline.pin();
    store.receive(...frame(2, { number: 6 }));
    draw();
    expect([shown(), store.timeline.pinned.value?.header.number]).toEqual([6, 5]);
    store.select("head");
    vi.advanceTimersByTime(200);
    expect(wanted().map((a) => a.request)).toEqual([{ type: "show_pass", number: 5, site: "head" }]);
    answer(3);
    expect([shown(), store.timeline.pinned.value?.header.seq]).toEqual([6, 3]);
    store.timeline.unpin();
    expect(store.timeline.pinned.value).toBeNull();
  });

  it("compares sizes by ratio, and signed figures and counts by difference", () => {
    expect(compareValues("ratio", 3, 2)).toBe(1.5);
    expect(compareValues("difference", -3, 2)).toBe(-5);
    expect(compareValues("ratio", 0, 0)).toBe(1);
    expect(compareValues("ratio", NaN, 2)).toBeNaN();
    expect([differenceText("ratio", 1.5), differenceText("ratio", Infinity), differenceText("difference", -5), differenceText("ratio", NaN)]).toEqual([
      "×1.50", "from 0", "−5", "–",
    ]); // prettier-ignore
    expect(differenceText("points", 0.25)).toMatch(/^\+25\s?%$/);
  });
});
