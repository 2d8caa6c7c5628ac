// Whole views through anywidget's two entry points, in happy-dom.
import { ABSENT_MS, ALONE_MS } from "../src/bridge";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import widget from "../src/widget";
import { QUANTITIES, STATISTICS, type Statistic } from "../src/protocol";
import { ids } from "../src/testids";
import { MockModel, SITES, effect, frame, layout, perturbation, progress, scale, settle, site, state } from "./helpers";

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
    await vi.waitFor(() => expect(control.of("ack")).toEqual([{ type: "ack", seq: 1 }]));
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
    vi.advanceTimersByTime(ALONE_MS + ABSENT_MS);
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
        perturbations: [scale(1, EVIL, 1, { kind: EVIL, strength_name: EVIL, expression: EVIL, pending: true })],
        effect: effect({ source: EVIL, clean: { [EVIL]: 1 }, perturbed: { [EVIL]: 2 }, sites: [{ site: EVIL, change: 1 }] }),
      }),
    );
    stream.emit(...frame(1, { sites: 2 }));
    await settle();
    expect(find(ids.selected)?.textContent).toBe(EVIL);
    expect(find(ids.notice)?.textContent).toContain(EVIL);
    expect(find(ids.effect)?.textContent).toContain(EVIL);
    expect(find(ids.downstream)?.textContent).toContain(EVIL);
    expect(find(ids.expression)?.textContent).toBe(EVIL);
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
    for (const element of [find(ids.tree)!, find(ids.perturbAdd)!, find(ids.perturbKind)!, find(ids.pause)!, find(ids.search)!, svg]) {
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
    expect(find(ids.timeStep)?.textContent).toBe("at step 1");
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
  const give = (id: string, value: string, event: string): void => {
    const input = find(id) as HTMLInputElement;
    input.value = value;
    input.dispatchEvent(new Event(event, { bubbles: true }));
  };

  it("by switch, slider and cross", async () => {
    await start({ perturbations: [scale(4, "head", 0.5)], training_perturbed: true });
    expect(find(ids.trainingPerturbed)?.textContent).toBe("training is perturbed");
    expect(find(ids.switch)?.getAttribute("aria-checked")).toBe("true");
    find(ids.switch)!.click();
    expect(control.of("adjust")).toMatchObject([{ perturbation: 4, enabled: false, strength: null }]);
    await settle();
    expect(find(ids.switch)?.getAttribute("aria-checked")).toBe("false");
    give(ids.strength, "1.5", "input");
    await settle();
    expect(control.of("adjust").at(-1)).toMatchObject({ perturbation: 4, enabled: false, strength: 1.5 });
    find(ids.remove)!.click();
    expect(control.of("remove")).toMatchObject([{ perturbation: 4 }]);
  });

  it("adds what is chosen, where and as strong as chosen, and only by the button", async () => {
    await start();
    const groups = [...find(ids.perturbKind)!.querySelectorAll("optgroup")];
    expect(groups.map((g) => [g.label, g.children.length])).toEqual([["Values", 7], ["Gradients", 4]]); // prettier-ignore
    expect(find(ids.addStrength)).toBeNull(); // Zero has none
    give(ids.perturbKind, "Shift", "change");
    await settle();
    expect(find(ids.detail)?.textContent).toContain("Will add the strength to every number.");
    const slider = find(ids.addStrength) as HTMLInputElement;
    expect([slider.min, slider.max, slider.value]).toEqual(["-2", "2", "1"]);
    give(ids.addStrengthNumber, "-7.5", "input"); // beyond the slider
    await settle();
    expect([slider.min, slider.max, slider.value]).toEqual(["-8", "2", "-7.5"]);
    find(ids.perturbAt)!.querySelectorAll("button")[1].click();
    expect(control.of("perturb")).toEqual([]);
    await settle();
    find(ids.perturbAdd)!.click();
    expect(control.of("perturb")).toMatchObject([{ site: "blocks/0", kind: "Shift", strength: -7.5, at: "input" }]);
    give(ids.perturbKind, "StopGradient", "change");
    await settle();
    find(ids.perturbAdd)!.click();
    expect(control.of("perturb")[1]).toMatchObject({ kind: "StopGradient", strength: null, at: "input" });
  });

  it("does not add what it is told cannot be, and says why", async () => {
    await start({ perturbations: [perturbation(1, "blocks/0")] });
    const add = find(ids.perturbAdd) as HTMLButtonElement;
    expect(add.disabled).toBe(true);
    expect(find(ids.detail)?.textContent).toContain("It is in the list already.");
    find(ids.perturbAt)!.querySelectorAll("button")[1].click(); // at the input it is not
    await settle();
    expect(add.disabled).toBe(false);
    give(ids.perturbKind, "Noise", "change");
    await settle();
    give(ids.addStrengthNumber, "-1", "input");
    await settle();
    expect(add.disabled).toBe(true);
    expect(find(ids.detail)?.textContent).toContain("Its std is at least 0.");
    expect(control.of("perturb")).toEqual([]);
  });

  it("switches all", async () => {
    await start({ perturbations: [perturbation(1, "head"), scale(2, "blocks/0", 1, { enabled: false })] });
    expect(find(ids.switchAll)?.textContent).toBe("All off");
    find(ids.switchAll)!.click();
    await settle();
    expect(control.of("switch_all")).toMatchObject([{ enabled: false }]);
    expect(all(ids.switch).map((s) => s.getAttribute("aria-checked"))).toEqual(["false", "false"]);
    expect(find(ids.switchAll)?.textContent).toBe("All on");
  });

  it("says on a perturbation's row why it does nothing, while it is on and until it acts", async () => {
    const why = "the loop does not call it";
    const row = (more: object) => state({ perturbations: [scale(1, "blocks/0", 0.5, more)] });
    await start({ perturbations: [scale(1, "blocks/0", 0.5, { not_acting: why })] });
    expect(find(ids.notActing)?.dataset["value"]).toBe(why);
    expect(find(ids.notActing)?.textContent).toBe(`not acting here: ${why}`);
    expect(find(ids.notActing)?.title).toBe(`Not acting here: ${why}.`);
    for (const more of [{ not_acting: why, enabled: false }, { not_acting: why, pending: true }, { not_acting: "" }]) {
      stream.emit(row(more));
      await settle();
      expect(find(ids.perturbation)).not.toBeNull();
      expect(find(ids.notActing)).toBeNull();
      stream.emit(row({ not_acting: why }));
      await settle();
      expect(find(ids.notActing)).not.toBeNull();
    }
  });

  it("says what each is, where it acts, and what it waits for", async () => {
    await start({
      compiling: 1,
      perturbations: [
        scale(1, "blocks/*", 0.5, { sites: ["blocks/0", "blocks/1"], reach: 2, at: "input", pending: true }),
        perturbation(2, "nowhere", { kind: "ParameterNoise", at: "parameter", acts_on: "parameter", sites: [], reach: 0, compiling: true }),
        perturbation(3, "head", { kind: "Mask", units: 64, units_off: 12 }),
      ],
    });
    const rows = all(ids.perturbation);
    const part = (row: number, id: string): HTMLElement | null => rows[row].querySelector(`[data-testid="${id}"]`);
    expect(rows.map((row) => row.querySelector(".nni-where")?.textContent)).toEqual(["blocks/*input, 2 sites", "nowhereparameter", "head"]);
    expect(part(0, ids.pending)?.textContent).toBe("next step");
    expect(part(1, ids.rowCompiling)?.textContent).toBe("compiling");
    expect(part(1, ids.pending)).toBeNull();
    expect(part(2, ids.units)?.textContent).toBe("mask: 12 of 64 off");
    expect(part(2, ids.strength)).toBeNull();
    expect(find(ids.compiling)?.textContent).toBe("compiling");
    expect(rows[1].querySelector(".nni-link")).toBeNull(); // there is no such row
    rows[0].querySelector<HTMLElement>(".nni-link")!.click();
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("blocks/0");
    stream.emit(state({ perturbations: [scale(1, "blocks/*", 0.5)] }));
    await settle();
    expect(find(ids.compiling)?.textContent).toBe("");
    expect(find(ids.pending)).toBeNull();
  });

  it("gives the Python text to hover and to copy", async () => {
    const copied: string[] = [];
    vi.spyOn(navigator.clipboard, "writeText").mockImplementation((text) => (copied.push(text), Promise.resolve()));
    await start({ perturbations: [scale(1, "head", 0.5)] });
    const kind = find(ids.expression)!;
    expect([kind.textContent, kind.dataset["value"]]).toEqual(["Scale", "nni.Scale(factor=0.5)"]);
    expect(kind.title).toContain("nni.Scale(factor=0.5)");
    kind.click();
    await settle();
    expect(copied).toEqual(["nni.Scale(factor=0.5)"]);
    expect(find(ids.perturbation)?.textContent).toContain("copied");
  });

  it.each([
    ["during", "Changes act at the next step, also while a cell runs."],
    ["thread", "Changes act at the next step: the loop runs in a thread of its own."],
    ["after", "This kernel handles changes when the cell has finished; run the loop with insp.background(train) to change things meanwhile."],
  ] as const)("says how changes reach the loop: %s", async (listening, words) => {
    vi.useFakeTimers();
    const [model, data] = ["control", "stream"].map((role) => new MockModel({ role, inspector: listening, version: 1 }));
    for (const one of [model, data]) widget.initialize({ model: one, signal: life.signal });
    widget.render({ model, el, signal: life.signal });
    data.emit(layout());
    vi.advanceTimersByTime(1100);
    model.emit({ type: "reply", id: 0, ok: true, error: "" });
    data.emit(state({ listening }));
    vi.useRealTimers();
    await settle();
    expect(find(ids.listening)?.textContent).toBe(words);
    expect(find(ids.listening)?.dataset["value"]).toBe(listening);
  });

  it("says what a column shows beside a pinned pass, and blanks nothing that exists", async () => {
    const at = (site: number, q: number, name: Statistic): number => (site * QUANTITIES.length + q) * STATISTICS.length + STATISTICS.indexOf(name);
    const blank = (table: Float64Array, sites: readonly number[]): void => {
      for (const i of sites) for (const name of STATISTICS) table[at(i, 1, name)] = NaN;
    };
    const head = (): string | null | undefined => find(ids.sort("gradient"))?.textContent;
    const cells = (): (string | null)[] => all(ids.cell("gradient")).map((cell) => cell.textContent);
    await start();
    stream.emit(...frame(2, { edit: (table) => blank(table, [0, 1, 2, 3, 4]) }));
    await settle();
    find(ids.pin)!.click();
    stream.emit(...frame(3, { value: 2 }));
    await settle();
    expect([head(), ...cells()]).toEqual(["‖gradient‖", ...SITES.map(() => "2")]);
    expect(find(ids.sort("gradient"))?.title).toBe("Sort by: Gradient norm, in this pass (step 2, pinned, has none)");
    find(ids.pin)!.click();
    stream.emit(...frame(4, { value: 2, edit: (table) => blank(table, [1]) }));
    await settle();
    find(ids.pin)!.click();
    stream.emit(...frame(5, { value: 3, edit: (table) => blank(table, [2]) }));
    await settle();
    expect([head(), ...cells()]).toEqual(["× ‖gradient‖", "×1.50", "3", "–", "×1.50", "×1.50"]);
    expect(find(ids.sort("gradient"))?.title).toBe("Sort by: Gradient norm, as a multiple of that in step 4 (pinned)");
    expect(all(ids.cell("gradient")).map((cell) => cell.title)).toEqual([
      "3 now, 2 in step 4 (pinned)", "3 now, – in step 4 (pinned): the figure by itself", "",
      ...Array.from({ length: 2 }, () => "3 now, 2 in step 4 (pinned)"),
    ]); // prettier-ignore
    find(ids.pin)!.click();
    await settle();
    expect([head(), cells()[0]]).toEqual(["‖gradient‖", "3"]);
    expect(find(ids.detail)?.textContent).toContain("Distribution now");
    find(ids.pause)!.click();
    await settle();
    expect(find(ids.detail)?.textContent).toContain("Distribution at step 5");
  });

  it("names the effect by the State that it came with, not by a wish", async () => {
    const perturbations = [scale(1, "head", 0.5), perturbation(2, "blocks/0", { enabled: false })];
    await start({ perturbations, effect: effect({ source: "the last step, at step 3", output_change: 0.5 }) });
    const caption = (): string | null | undefined => find(ids.effect)?.querySelector("caption")?.textContent;
    expect(caption()).toBe("Effect of Scale (factor 0.5) at head on the last step, at step 3");
    all(ids.switch)[0].click();
    all(ids.switch)[1].click(); // Zero is asked for instead: these are Scale's figures still
    await settle();
    expect(caption()).toBe("Effect of Scale (factor 0.5) at head on the last step, at step 3, before this change");
    for (const { id } of control.of("adjust") as unknown as { id: number }[]) control.emit({ type: "reply", id, ok: true, error: "" });
    stream.emit(state({ perturbations: perturbations.map((p) => ({ ...p, enabled: !p.enabled })), no_effect: "Waits." }));
    await settle();
    expect(find(ids.effect)).toBeNull();
    expect(find(ids.noEffect)?.textContent).toBe("Waits.");
  });

  it("shows the effect, with what is unknown as a dash", async () => {
    const figures = { clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.75, accuracy: null }, output_change: 0.5 };
    await start({ perturbations: [perturbation(1, "head")], effect: effect(figures) });
    expect(find(ids.effectValue("loss", "perturbed"))?.dataset["value"]).toBe("0.75");
    expect(find(ids.effect)?.textContent).toContain("+0.5000");
    expect(find(ids.effectValue("accuracy", "perturbed"))?.textContent).toBe("–");
    expect(find(ids.outputChange)?.textContent).toContain("50");
    expect([find(ids.kl), find(ids.top1), find(ids.downstream)]).toEqual([null, null, null]);
  });

  it("shows what each does by itself, unless it is off or waits", async () => {
    const one = { loss_change: 0.25, output_change: 0.5, kl: null, top1_changed: 0 };
    const alone = [1, 2, 3, 4].map((id) => ({ ...one, perturbation: id, loss_change: id === 4 ? null : 0.25 }));
    const more = [{}, { enabled: false }, { pending: true }, {}];
    await start({ perturbations: more.map((m, i) => scale(i + 1, "head", 1, m)), effect: effect({ alone }) });
    const rows = all(ids.perturbation).map((row) => row.querySelector<HTMLElement>(`[data-testid="${ids.alone}"]`));
    expect(rows.map((row) => row?.textContent)).toEqual(["loss alone +0.2500", undefined, undefined, "output alone 50\u202f%"]);
    expect(rows.map((row) => row?.dataset["value"])).toEqual(["0.25", undefined, undefined, "0.5"]);
    expect(rows[0]!.title).toContain("KL divergence –");
  });

  it("shows the effect on predictions, and on the sites downstream as links", async () => {
    const sites = [
      { site: "head", change: 1.25 },
      { site: "blocks/1", change: 0.001 },
      { site: "", change: null },
      { site: "gone", change: 0 },
    ];
    await start({ perturbations: [perturbation(1, "blocks/0")], effect: effect({ kl: 0.5, top1_changed: 0.125, sites }) });
    expect([find(ids.kl)?.textContent, find(ids.kl)?.dataset["value"]]).toEqual(["0.5000", "0.5"]);
    expect([find(ids.top1)?.textContent, find(ids.top1)?.dataset["value"]]).toEqual(["12.5\u202f%", "0.125"]);
    expect(all(ids.downstream).map((s) => s.textContent)).toEqual([
      "head125\u202f%", "blocks/10.1\u202f%", "(model)not finite", "gone0\u202f%",
    ]); // prettier-ignore
    expect(all(ids.downstream).map((s) => s.querySelector("button") !== null)).toEqual([true, true, true, false]);
    all(ids.downstream)[1].querySelector("button")!.click();
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("blocks/1");
  });

  it("tells no change from a change, and what the effect was measured on", async () => {
    const figures = { clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.125, accuracy: 1 }, output_change: 0, kl: 0, top1_changed: 0 };
    await start({ perturbations: [perturbation(1, "head")], effect: effect(figures) });
    const words = (selector: string): (string | null)[] => [...find(ids.effect)!.querySelectorAll(selector)].map((e) => e.textContent);
    expect(words(".nni-change")).toEqual(["−0.1250"]);
    expect(words(".nni-no-change")).toEqual(["no change", "no change", "no change", "no change"]);
    expect(words("caption")[0]).toBe("Effect of Zero on the example");
  });

  it("marks its row with a word that a narrow tree keeps as a name", async () => {
    await start({ perturbations: [perturbation(1, "head")] });
    const badge = find(ids.badgePerturbed)!;
    expect([badge.textContent, badge.title, badge.dataset["sign"]]).toEqual(["perturbed", "A perturbation is on", "◆"]);
  });

  it("shows why a request failed", async () => {
    await start();
    find(ids.perturbAdd)!.click();
    control.emit({ type: "reply", id: control.of("perturb")[0]["id"], ok: false, error: "its output is an integer" });
    await settle();
    expect(find(ids.notice)?.textContent).toContain("its output is an integer");
  });
});

it("a message that does not fit is refused in words and leaves the screen alone", async () => {
  await start();
  stream.emit(state({ effect: effect({ clean: null as never }) }));
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
