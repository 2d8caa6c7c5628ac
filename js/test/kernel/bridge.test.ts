// Hello, replies, silence: what is said and when, with a mock comm and a mock clock.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { ACK_MS, RETRY_MS, Bridge, LATE_MS, POLLED_ACK_MS, UNANSWERED_MS, UNREACHABLE, type UpdateMessage } from "../../src/kernel/bridge";
import { VERSION } from "../../src/kernel/protocol";
import { MockModel } from "../helpers/kernel";
import { layout, state } from "../helpers/messages";

let received: UpdateMessage[];
let refused: string[];
let control: MockModel;
let stream: MockModel;
let bridge: Bridge;

beforeEach(() => {
  vi.useFakeTimers();
  received = [];
  refused = [];
  control = new MockModel();
  stream = new MockModel();
  bridge = new Bridge();
  bridge.receiver = { receive: (m) => received.push(m), refuse: (text) => refused.push(text) };
});
afterEach(() => {
  bridge.close();
  vi.useRealTimers();
});

function attach(): void {
  bridge.attach("control", control);
  bridge.attach("stream", stream);
}

describe("hello", () => {
  it("waits for both models, then is said at 0, 300 and 1000 ms, and twice later while nothing comes", () => {
    bridge.attach("control", control);
    vi.advanceTimersByTime(500);
    expect(control.sent).toEqual([]);
    bridge.attach("stream", stream);
    for (const [ms, times] of [[0, 1], [299, 1], [1, 2], [699, 2], [1, 3], [2999, 3], [1, 4], [10_999, 4], [1, 5], [60_000, 5]] as const) {
      vi.advanceTimersByTime(ms);
      expect(control.of("hello")).toHaveLength(times);
    }
    expect(stream.sent).toEqual([]);
  });

  it("is not repeated once anything arrives, but for the last, which settles the route", () => {
    attach();
    vi.advanceTimersByTime(0);
    stream.emit(layout());
    vi.advanceTimersByTime(999);
    expect(control.of("hello")).toHaveLength(1);
    vi.advanceTimersByTime(60_000);
    expect(control.of("hello")).toHaveLength(2);
    expect(bridge.connection.value).toBe("connected");
    expect(received).toHaveLength(1);
  });

  it("settles with the state that follows the answer to the last one, or when none comes", () => {
    attach();
    vi.advanceTimersByTime(0);
    control.emit({ type: "reply", id: 0, ok: true, error: "" });
    stream.emit(state());
    vi.advanceTimersByTime(1000);
    stream.emit(state()); // of a loop that runs: the last hello is still to be answered
    expect(bridge.settled.value).toBe(false);
    control.emit({ type: "reply", id: 0, ok: true, error: "" });
    expect(bridge.settled.value).toBe(false);
    stream.emit(state());
    expect(bridge.settled.value).toBe(true);
    control.trigger("comm_live_update");
    expect(bridge.settled.value).toBe(false);
    vi.advanceTimersByTime(3000);
    expect(bridge.settled.value).toBe(true);
  });

  it("not answered means absent, until something arrives after all", () => {
    attach();
    vi.advanceTimersByTime(2999);
    expect(bridge.connection.value).toBe("waiting");
    vi.advanceTimersByTime(1);
    expect(bridge.connection.value).toBe("absent");
    stream.emit(state());
    expect(bridge.connection.value).toBe("connected");
  });

  it("says that there is no other model where none comes, and that it has come later", () => {
    bridge.attach("control", control);
    vi.advanceTimersByTime(999);
    expect(control.sent).toEqual([]);
    vi.advanceTimersByTime(2);
    expect(control.of("hello").map((m) => m["streams"])).toEqual([false]);
    control.emit(layout());
    expect(bridge.connection.value).toBe("connected");
    bridge.attach("stream", stream);
    vi.advanceTimersByTime(0);
    expect(control.of("hello").map((m) => m["streams"])).toEqual([false, true]);
  });

  it("is said again later where changes are heard after a cell only, each under its number", () => {
    attach();
    vi.advanceTimersByTime(1000);
    stream.emit(state({ listening: "after" }));
    vi.advanceTimersByTime(RETRY_MS[0] - 1000);
    expect(control.of("hello").map((m) => m["said"])).toEqual([1, 2, 3, 4]);
    stream.emit(state({ listening: "during" }));
    vi.advanceTimersByTime(60_000);
    expect(control.of("hello")).toHaveLength(4);
    control.trigger("comm_live_update");
    vi.advanceTimersByTime(0);
    expect(control.of("hello").at(-1)!["said"]).toBe(5);
  });

  it("without either model means absent too", () => {
    vi.advanceTimersByTime(3000);
    expect(bridge.connection.value).toBe("absent");
  });

  it("is said again when the comm closes, and then nobody answers", () => {
    attach();
    stream.emit(layout());
    control.trigger("comm_live_update");
    vi.advanceTimersByTime(3000);
    expect(control.of("hello")).toHaveLength(3);
    expect(bridge.connection.value).toBe("absent");
  });
});

it("acknowledges every other frame, and a last one after a while", () => {
  attach();
  for (const seq of [1, 2, 3, 4, 5]) bridge.ack(seq);
  expect(control.of("ack").map((m) => m["seq"])).toEqual([2, 4]);
  vi.advanceTimersByTime(ACK_MS);
  expect(control.of("ack").map((m) => m["seq"])).toEqual([2, 4, 5]);
  vi.advanceTimersByTime(60_000);
  expect(control.of("ack")).toHaveLength(3);
});

it("acknowledges at most ten times a second where a loop reads between its steps", () => {
  attach();
  stream.emit(state({ listening: "steps" }));
  for (const seq of [1, 2, 3, 4, 5]) bridge.ack(seq);
  expect(control.of("ack")).toEqual([]);
  vi.advanceTimersByTime(POLLED_ACK_MS);
  expect(control.of("ack").map((m) => m["seq"])).toEqual([5]);
});

describe("requests", () => {
  it("without an answer are counted soon if a kernel answers them at once", () => {
    attach();
    bridge.ask({ type: "select", site: "a" });
    bridge.ask({ type: "compare", site: "a", number: 1, pinned: 0 } as never);
    vi.advanceTimersByTime(UNANSWERED_MS - 1);
    expect(bridge.unanswered.value).toBe(0);
    vi.advanceTimersByTime(1);
    expect(bridge.unanswered.value).toBe(1);
    control.emit({ type: "reply", id: control.of("select")[0]["id"], ok: true, error: "" });
    expect(bridge.unanswered.value).toBe(0);
  });

  it("that are late tell a kernel that sends from one that is silent", () => {
    attach();
    bridge.ask({ type: "select", site: "a" });
    vi.advanceTimersByTime(LATE_MS);
    expect([bridge.late.value, bridge.silent.value]).toEqual([1, true]);
    stream.emit(state());
    expect([bridge.late.value, bridge.silent.value]).toEqual([1, false]);
    bridge.ask({ type: "select", site: "b" });
    stream.emit(state());
    vi.advanceTimersByTime(LATE_MS);
    expect([bridge.late.value, bridge.silent.value]).toEqual([2, false]);
  });

  it("have ids of their own, and one outcome each", () => {
    attach();
    const outcomes: (string | null)[] = [];
    bridge.ask({ type: "select", site: "a" }, (e) => outcomes.push(e));
    bridge.ask({ type: "remove", perturbation: 7 }, (e) => outcomes.push(e));
    const [first, second] = [control.of("select")[0], control.of("remove")[0]];
    expect(first["id"]).not.toBe(second["id"]);
    control.emit({ type: "reply", id: second["id"], ok: false, error: "no perturbation 7" });
    control.emit({ type: "reply", id: second["id"], ok: true, error: "" });
    control.emit({ type: "reply", id: first["id"], ok: true, error: "" });
    control.emit({ type: "reply", id: 0, ok: true, error: "" });
    expect(outcomes).toEqual(["no perturbation 7", null]);
    expect(refused).toEqual([]);
  });

  it("are late after 10 s, which is not a failure, and settle when answered", () => {
    attach();
    const outcomes: (string | null)[] = [];
    bridge.ask({ type: "select", site: "a" }, (e) => outcomes.push(e));
    vi.advanceTimersByTime(9_999);
    expect(bridge.late.value).toBe(0);
    vi.advanceTimersByTime(1);
    expect(bridge.late.value).toBe(1);
    expect(outcomes).toEqual([]);
    control.emit({ type: "reply", id: control.of("select")[0]["id"], ok: true, error: "" });
    expect(bridge.late.value).toBe(0);
    expect(outcomes).toEqual([null]);
  });
});

it("refuses what it cannot read, in words, and goes on", () => {
  attach();
  stream.emit({ ...layout(), version: VERSION - 1 });
  stream.emit(layout());
  expect(refused).toEqual([expect.stringMatching(/^The kernel speaks version/)]);
  expect(received).toHaveLength(1);
});

it("a comm that throws is not connected: nothing escapes, and a request fails in words", () => {
  attach();
  stream.emit(layout());
  control.send = () => {
    throw new Error("Cannot send");
  };
  control.trigger("comm_live_update");
  expect(() => vi.advanceTimersByTime(0)).not.toThrow();
  expect(bridge.connection.value).toBe("absent");
  expect(() => vi.advanceTimersByTime(5000)).not.toThrow();
  const outcomes: (string | null)[] = [];
  bridge.ask({ type: "remove", perturbation: 7 }, (e) => outcomes.push(e));
  bridge.ack(1);
  expect(outcomes).toEqual([UNREACHABLE]);
  vi.advanceTimersByTime(60_000);
  expect(bridge.late.value).toBe(0);
  stream.emit(state());
  expect(bridge.connection.value).toBe("connected");
});
