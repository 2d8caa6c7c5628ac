// Whole views through anywidget's two entry points, in happy-dom.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import widget from "../src/widget";
import { ids } from "../src/testids";
import { MockModel, SITES, frame, layout, perturbation, progress, settle, site, state } from "./helpers";

const EVIL = `<img src=x onerror="window.hacked=true"><script>window.hacked=true</script>`;
let control: MockModel;
let stream: MockModel;
let el: HTMLElement;
let life: AbortController;
let count = 0;

const find = (id: string): HTMLElement | null => el.querySelector<HTMLElement>(`[data-testid="${id}"]`);
const all = (id: string): HTMLElement[] => [...el.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)];

beforeEach(() => {
  const inspector = `test-${++count}`;
  life = new AbortController();
  control = new MockModel({ role: "control", inspector, version: 1 });
  stream = new MockModel({ role: "stream", inspector, version: 1 });
  for (const model of [stream, control]) widget.initialize({ model, signal: life.signal });
  el = document.createElement("div");
  document.body.append(el);
});
afterEach(() => {
  life.abort();
  el.remove();
  vi.restoreAllMocks();
});

function show(): () => void {
  return widget.render({ model: control, el, signal: life.signal })!;
}

async function start(more = {}): Promise<void> {
  show();
  stream.emit(layout());
  stream.emit(state(more));
  stream.emit(...frame(1));
  await settle();
}

describe("a view", () => {
  it("shows something before any data, and all of it after", async () => {
    show();
    expect(find(ids.root)?.dataset["lmSuppressShortcuts"]).toBe("true");
    expect(find(ids.banner)?.textContent).toContain("Connecting");
    stream.emit(layout());
    stream.emit(state());
    stream.emit(...frame(1));
    await settle();
    expect(find(ids.banner)).toBeNull();
    expect(all(ids.row).map((row) => row.dataset["site"])).toEqual(SITES.map((s) => s.key));
    expect(find(ids.selected)?.dataset["value"]).toBe("blocks/0");
    expect(find(ids.stat("output", "mean"))?.dataset["value"]).toBe("1");
    expect(find(ids.histCount("output"))?.dataset["value"]).toBe("8");
    expect(find(ids.step)?.dataset["value"]).toBe("1");
    expect(control.of("ack")).toEqual([{ type: "ack", seq: 1 }]);
  });

  it("may be one of several, and goes away alone", async () => {
    const other = document.createElement("div");
    await start();
    const gone = widget.render({ model: control, el: other, signal: life.signal })!;
    expect(other.querySelector(`[data-testid="${ids.selected}"]`)?.textContent).toBe("blocks/0");
    gone();
    expect(other.childNodes).toHaveLength(0);
    expect(all(ids.row)).toHaveLength(5);
  });

  it("of the stream model is empty and hidden", () => {
    widget.render({ model: stream, el, signal: life.signal });
    expect(el.style.display).toBe("none");
    expect(el.childNodes).toHaveLength(0);
  });

  it("says so when nobody answers", async () => {
    vi.useFakeTimers();
    const model = new MockModel({ role: "control", inspector: "alone", version: 1 });
    widget.initialize({ model, signal: life.signal });
    widget.render({ model, el, signal: life.signal });
    vi.advanceTimersByTime(3000);
    vi.useRealTimers();
    await settle();
    expect(find(ids.banner)?.textContent).toContain("Not connected: run the cell again.");
  });

  it("forgets the session when its models are gone", () => {
    const map = (globalThis as never)[Symbol.for("nnx_inspector.sessions") as never] as Map<string, unknown>;
    expect(map.has(`test-${count}`)).toBe(true);
    life.abort();
    expect(map.has(`test-${count}`)).toBe(false);
  });
});

describe("text from a model", () => {
  it("stays text, wherever it goes", async () => {
    show();
    const evil = site(EVIL, 0, {
      kind: EVIL, name: EVIL, inputs: EVIL, output: EVIL, source: EVIL, unseen: EVIL, aliases: [EVIL], calls: 3,
    }); // prettier-ignore
    stream.emit(layout([site("", -1), evil]));
    stream.emit(
      state({
        selected: EVIL,
        notices: [{ level: "error", text: EVIL, site: EVIL }],
        perturbations: [perturbation(1, EVIL, { kind: EVIL, strength: 1, pending: true })],
        effect: { source: EVIL, clean: { [EVIL]: 1 }, perturbed: { [EVIL]: 2 }, output_change: 0.5 },
      }),
    );
    stream.emit(...frame(1, { sites: 2 }));
    await settle();
    expect(find(ids.selected)?.textContent).toBe(EVIL);
    expect(find(ids.notice)?.textContent).toContain(EVIL);
    expect(find(ids.effect)?.textContent).toContain(EVIL);
    expect(el.querySelectorAll("img, script")).toHaveLength(0);
    expect("hacked" in window).toBe(false);
  });
});

describe("what was not measured", () => {
  it("is a dash and a sentence, never NaN", async () => {
    show();
    stream.emit(layout());
    stream.emit(state());
    stream.emit(...frame(1, { edit: (t) => t.fill(NaN, 2 * 20 + 10, 2 * 20 + 20) }));
    await settle();
    const mean = find(ids.stat("gradient", "mean"))!;
    expect(mean.textContent).toBe("–");
    expect(mean.dataset["value"]).toBe("NaN");
    expect(find(ids.detail)?.textContent).toContain("No gradient was measured here in this pass.");
    expect(find(ids.hist("gradient"))?.textContent).toContain("No gradient was measured here.");
  });
});

const press = (target: HTMLElement, key: string): void => {
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
};

describe("keys", () => {
  it("move, and space perturbs where that is possible", async () => {
    await start();
    const tree = find(ids.tree)!;
    press(tree, "ArrowDown");
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("blocks/1");
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
    press(find(ids.tree)!, "/");
    const search = find(ids.search) as HTMLInputElement;
    expect(document.activeElement).toBe(search);
    search.value = "dropout";
    search.dispatchEvent(new Event("input", { bubbles: true }));
    await settle();
    expect(all(ids.row).map((row) => row.dataset["site"])).toEqual(["", "blocks", "blocks/1"]);
  });
});

describe("the host's shortcuts", () => {
  it("do not fire where the focus is in the view", async () => {
    await start();
    const svg = find(ids.hist("output"))!.querySelector("svg")!;
    for (const element of [find(ids.tree)!, find(ids.perturbZero)!, find(ids.pause)!, find(ids.search)!, svg]) {
      element.focus();
      if (document.activeElement !== element) element.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
      expect(element.getAttribute("data-lm-suppress-shortcuts")).toBe("true");
    }
  });

  it("do not see the keys that are used here", async () => {
    await start();
    const seen: string[] = [];
    el.addEventListener("keydown", (event) => seen.push(event.key));
    press(find(ids.tree)!, "ArrowDown");
    press(find(ids.tree)!, "/");
    press(find(ids.search)!, "Escape");
    press(find(ids.hist("output"))!.querySelector("svg")! as never, "ArrowRight");
    expect(seen).toEqual([]);
    press(find(ids.tree)!, "q");
    expect(seen).toEqual(["q"]);
  });
});

describe("the header", () => {
  const text = (): string => el.querySelector(".nni-run")!.textContent!;

  it("says where a loop is once", async () => {
    await start();
    expect(find(ids.step)?.textContent).toBe("1 of 10");
    expect(text()).not.toContain("step 1");
    expect(text()).toContain("running2 steps/s");
    expect(el.querySelector("[role=progressbar]")?.getAttribute("aria-valuetext")).toBe("1 of 10");
    stream.emit(state({ progress: { ...progress, running: false, step: 10 } }));
    await settle();
    expect(text()).toContain("10 of 10finished");
    stream.emit(state({ progress: { ...progress, running: false, step: 4, total: null } }));
    await settle();
    expect(text()).toContain("4 stepsfinished");
    find(ids.pause)!.click();
    await settle();
    expect(text()).toContain("step 1 held");
  });

  it("says the step of a single pass, and idle", async () => {
    await start();
    stream.emit(state({ progress: { kind: "step", running: false, step: 1, total: null, rate: null } }));
    await settle();
    expect(text()).toContain("step 1idle");
    expect(text()).not.toContain("steps");
    expect(el.querySelector("[role=progressbar]")).toBeNull();
    expect(find(ids.progress)?.dataset).toMatchObject({ value: "1", state: "idle" });
  });
});

describe("perturbing", () => {
  it("by buttons, switch, slider and cross", async () => {
    await start({ perturbations: [perturbation(4, "head", { kind: "Scale", strength: 0.5 })], training_perturbed: true });
    expect(find(ids.trainingPerturbed)?.textContent).toBe("training is perturbed");
    find(ids.perturbScale)!.click();
    expect(control.of("perturb")).toMatchObject([{ site: "blocks/0", kind: "Scale", strength: 0.5 }]);
    expect(find(ids.switch)?.getAttribute("aria-checked")).toBe("true");
    find(ids.switch)!.click();
    expect(control.of("adjust")).toMatchObject([{ perturbation: 4, enabled: false, strength: null }]);
    await settle();
    expect(find(ids.switch)?.getAttribute("aria-checked")).toBe("false");
    const slider = find(ids.strength) as HTMLInputElement;
    slider.value = "1.5";
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await settle();
    expect(control.of("adjust").at(-1)).toMatchObject({ perturbation: 4, enabled: false, strength: 1.5 });
    find(ids.remove)!.click();
    expect(control.of("remove")).toMatchObject([{ perturbation: 4 }]);
  });

  it("shows the effect, with what is unknown as a dash", async () => {
    const effect = { source: "example", clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.75, accuracy: null }, output_change: 0.5 };
    await start({ perturbations: [perturbation(1, "head")], effect });
    expect(find(ids.effectValue("loss", "perturbed"))?.dataset["value"]).toBe("0.75");
    expect(find(ids.effect)?.textContent).toContain("+0.5000");
    expect(find(ids.effectValue("accuracy", "perturbed"))?.textContent).toBe("–");
    expect(find(ids.outputChange)?.textContent).toContain("50");
  });

  it("tells no change from a change, and what the effect was measured on", async () => {
    const effect = { source: "the example", clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.125, accuracy: 1 }, output_change: 0 };
    await start({ perturbations: [perturbation(1, "head")], effect });
    const words = (selector: string): (string | null)[] => [...find(ids.effect)!.querySelectorAll(selector)].map((e) => e.textContent);
    expect(words(".nni-change")).toEqual(["−0.1250"]);
    expect(words(".nni-no-change")).toEqual(["no change", "no change"]);
    expect(words("th")[0]).toBe("Effect on the example");
  });

  it("marks its row with a word that a narrow tree keeps as a name", async () => {
    await start({ perturbations: [perturbation(1, "head")] });
    const badge = find(ids.badgePerturbed)!;
    expect([badge.textContent, badge.title, badge.dataset["sign"]]).toEqual(["perturbed", "Perturbed", "◆"]);
  });

  it("shows why a request failed", async () => {
    await start();
    find(ids.perturbZero)!.click();
    control.emit({ type: "reply", id: control.of("perturb")[0]["id"], ok: false, error: "its output is an integer" });
    await settle();
    expect(find(ids.notice)?.textContent).toContain("its output is an integer");
  });
});

it("a message that does not fit is refused in words and leaves the screen alone", async () => {
  await start();
  stream.emit(state({ effect: { source: "x", clean: null as never, perturbed: {}, output_change: null } }));
  await settle();
  expect(find(ids.notice)?.textContent).toContain("state.effect.clean must be an object, got null.");
  expect(all(ids.row)).toHaveLength(5);
});

it("Boundary shows the text of what was thrown", async () => {
  vi.spyOn(console, "error").mockImplementation(() => undefined);
  const { h, render } = await import("preact");
  const { Boundary } = await import("../src/Boundary");
  const Broken = (): never => {
    throw new Error("no such thing");
  };
  render(h(Boundary, { name: "the tree", children: h(Broken, {}) }), el);
  await settle();
  expect(find(ids.error)?.textContent).toContain("Could not draw the tree: no such thing");
});
