// Whole views through anywidget's two entry points, in happy-dom.
import { afterEach, describe, expect, it, vi } from "vitest";
import { ABSENT_MS, STREAM_WAIT_MS } from "../src/kernel/bridge";
import { HISTORY_BINS, HISTORY_QUANTILES, VERSION } from "../src/kernel/protocol";
import widget from "../src/widget";
import { MockModel, settle } from "./helpers/kernel";
import { SITES, cell, frame, layout, state } from "./helpers/messages";
import { enterValue, mountView, press, sendStart, type TestView } from "./helpers/view";

let { control, stream, el, life, find, all, end } = {} as TestView;
let view: TestView;
const show = (): void => void ({ control, stream, el, life, find, all, end } = view = mountView());
const start = (): Promise<void> => (show(), sendStart(view));
afterEach(() => end());

describe("a view", () => {
  it("shows something before any data, and all of it after", async () => {
    show();
    expect(find("nni-root")?.dataset["lmSuppressShortcuts"]).toBe("true");
    expect(find("nni-banner")?.textContent).toContain("Connecting");
    await sendStart(view);
    expect(find("nni-banner")).toBeNull();
    expect(all("nni-row").map((row) => row.dataset["site"])).toEqual(SITES.map((s) => s.key));
    expect(find("nni-selected")?.dataset["value"]).toBe("blocks/0");
    expect(find("nni-stat-output-mean")?.dataset["value"]).toBe("1");
    expect(find("nni-hist-count-output")?.dataset["value"]).toBe("8");
    expect(find("nni-step")?.dataset["value"]).toBe("1");
    await vi.waitFor(() => expect(control.of("ack")).toEqual([{ type: "ack", seq: 1 }]));
  });

  it("may be one of several, and goes away alone", async () => {
    const other = document.createElement("div");
    await start();
    const gone = widget.render({ model: control, el: other, signal: life.signal })!;
    expect(other.querySelector(`[data-testid="nni-selected"]`)?.textContent).toBe("blocks/0");
    gone();
    expect(other.childNodes).toHaveLength(0);
    expect(all("nni-row")).toHaveLength(5);
  });

  it("of the stream model is empty and hidden", () => {
    show();
    const empty = document.createElement("div");
    widget.render({ model: stream, el: empty, signal: life.signal });
    expect(empty.style.display).toBe("none");
    expect(empty.childNodes).toHaveLength(0);
  });

  it("says so when nobody answers", async () => {
    vi.useFakeTimers();
    const model = new MockModel({ role: "control", inspector: "alone", version: 1 });
    const alone = document.createElement("div");
    const own = new AbortController();
    widget.initialize({ model, signal: own.signal });
    widget.render({ model, el: alone, signal: own.signal });
    vi.advanceTimersByTime(STREAM_WAIT_MS + ABSENT_MS);
    vi.useRealTimers();
    await settle();
    expect(alone.textContent).toContain("Not connected: run the cell again.");
    expect(alone.querySelector(`[data-testid="nni-tree"]`)).toBeNull(); // one line, not an empty screen
    own.abort();
  });

  it("forgets the session when its models are gone", () => {
    show();
    const map = (globalThis as never)[Symbol.for("nnx_inspector.sessions") as never] as Map<string, unknown>;
    expect(map.has(view.inspector)).toBe(true);
    life.abort();
    expect(map.has(view.inspector)).toBe(false);
  });
});

describe("what was not measured", () => {
  it("is a dash and a sentence, never NaN", async () => {
    show();
    stream.emit(layout());
    stream.emit(state());
    stream.emit(...frame(1, { edit: (t) => t.fill(NaN, cell(2, 1, "size"), cell(3, 0, "size")) }));
    await settle();
    const mean = find("nni-stat-gradient-mean")!;
    expect(mean.textContent).toBe("–");
    expect(mean.dataset["value"]).toBe("NaN");
    expect(find("nni-detail")?.textContent).toContain("No gradient was measured here in this pass.");
    expect(find("nni-hist-gradient")?.textContent).toContain("No gradient was measured here.");
    const index = SITES.findIndex(({ key }) => key === find("nni-selected")!.dataset["value"]);
    const history = { type: "history", version: VERSION, layout: 1, site: index, quantity: 0, steps: 2, parameter: "" };
    stream.emit(history, new DataView(new Float64Array(2 * (1 + HISTORY_QUANTILES.length + HISTORY_BINS) + HISTORY_BINS + 1).fill(NaN).buffer));
    await settle();
    expect(find("nni-over-output")?.textContent).toBe("No finite value in any step.");
  });
});

describe("keys", () => {
  it("move, and space perturbs where that is possible", async () => {
    await start();
    const tree = find("nni-tree")!;
    press(tree, "ArrowDown");
    await settle();
    expect(find("nni-selected")?.dataset["value"]).toBe("blocks/1");
    press(tree, " ");
    expect(control.of("perturb")).toMatchObject([{ site: "blocks/1", kind: "Zero", strength: null }]);
    press(tree, "Home");
    press(tree, "ArrowDown"); // blocks, which is not perturbable
    press(tree, " ");
    expect(control.of("perturb")).toHaveLength(1);
    expect(tree.getAttribute("aria-activedescendant")).toBeTruthy();
  });

  it("slash goes to the search, which filters", async () => {
    await start();
    press(find("nni-tree")!, "/");
    const search = find("nni-search") as HTMLInputElement;
    expect(document.activeElement).toBe(search);
    enterValue(search, "dropout", "input");
    await settle();
    expect(all("nni-row").map((row) => row.dataset["site"])).toEqual(["", "blocks", "blocks/1"]);
  });
});

describe("the host's shortcuts", () => {
  it("do not fire where the focus is in the view", async () => {
    await start();
    const svg = find("nni-hist-output")!.querySelector("svg")!;
    for (const element of [find("nni-tree")!, find("nni-perturb")!, find("nni-menu")!, find("nni-pause")!, find("nni-search")!, svg]) {
      element.focus();
      if (document.activeElement !== element) element.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
      expect(element.getAttribute("data-lm-suppress-shortcuts")).toBe("true");
    }
  });

  it("do not see the keys that are used here", async () => {
    await start();
    const seen: string[] = [];
    el.addEventListener("keydown", (event) => seen.push(event.key));
    press(find("nni-tree")!, "ArrowDown");
    press(find("nni-tree")!, "/");
    press(find("nni-search")!, "Escape");
    press(find("nni-hist-output")!.querySelector("svg")! as never, "ArrowRight");
    expect(seen).toEqual([]);
    press(find("nni-tree")!, "q");
    expect(seen).toEqual(["q"]);
  });
});

it("a message with a buffer that does not fit is refused in words and leaves the screen alone", async () => {
  await start();
  stream.emit({ ...frame(1)[0] }, new DataView(new ArrayBuffer(7)));
  await settle();
  expect(find("nni-notice")?.textContent).toContain("Frame 1 has 0 sites, its layout 5.");
  expect(all("nni-row")).toHaveLength(5);
});

it("asks for nothing of a panel that is not shown", async () => {
  await start();
  expect(control.of("look")).toEqual([]);
});
