// What a person does about perturbations, and what the screen says of them and of their effect.
import { afterEach, expect, it, vi } from "vitest";
import type { State } from "../../src/kernel/protocol";
import { UNANSWERED_MS } from "../../src/kernel/bridge";
import { settle } from "../helpers/kernel";
import { effect, layout, passes, perturbation, scale, state } from "../helpers/messages";
import { enterValue, mountView, openMenu, press, startView, type TestView } from "../helpers/view";

let { control, stream, el, find, all, end } = {} as TestView;
const start = async (more: Partial<State> = {}): Promise<void> => void ({ control, stream, el, find, all, end } = await startView(more));
afterEach(() => {
  end();
  vi.restoreAllMocks();
});

const give = (id: string, value: string): void => enterValue(find(id), value, "input");

it("is switched, set and removed by switch, slider and cross", async () => {
  await start({ perturbations: [scale(4, "head", 0.5)], training_perturbed: true });
  expect(find("nni-training-perturbed")?.textContent).toBe("training is perturbed");
  expect(find("nni-switch")?.getAttribute("aria-checked")).toBe("true");
  // a row and the header say it with one badge, and the slider says it of the pass
  stream.emit(...passes([[1, 1, 1, 1]]));
  await settle();
  const badges = [all("nni-row").at(-1), el.querySelector("header")].map((place) => place!.querySelector(".nni-badge-on"));
  expect(badges.map((badge) => [badge?.className, badge?.getAttribute("data-sign")])).toEqual(Array(2).fill(["nni-badge nni-badge-on", "◆"]));
  stream.emit(...passes([[0, 0, 0, 0], [1, 1, 1, 1]])); // prettier-ignore
  await settle();
  expect(find("nni-scrub")?.getAttribute("aria-valuetext")).toBe("step 1, watch, perturbed: pass 2 of 2; the perturbations changed here");
  find("nni-switch")!.click();
  expect(control.of("adjust")).toMatchObject([{ perturbation: 4, enabled: false, strength: null }]);
  await settle();
  expect(find("nni-switch")?.getAttribute("aria-checked")).toBe("false");
  expect(find("nni-strength"), "the amount is opened by a click").toBeNull();
  expect(find("nni-amount")?.textContent).toBe("× 0.5");
  await openMenu(find, "nni-amount");
  expect(document.activeElement).toBe(find("nni-strength-number"));
  give("nni-strength", "1.5");
  await settle();
  expect(control.of("adjust").at(-1)).toMatchObject({ perturbation: 4, enabled: false, strength: 1.5 });
  find("nni-remove")!.click();
  expect(control.of("remove")).toMatchObject([{ perturbation: 4 }]);
});

it("adds what is chosen, where and as strong as chosen, and only by its kind", async () => {
  await start();
  await openMenu(find, "nni-perturb");
  const groups = [...el.querySelectorAll(".nni-perturb-menu [role=group][aria-label]")].filter((g) => g.querySelector(".nni-perturb-kind"));
  expect(groups.map((g) => [g.getAttribute("aria-label"), g.querySelectorAll(".nni-perturb-kind").length])).toEqual([["Values", 7], ["Gradients", 4]]); // prettier-ignore
  expect(document.activeElement).toBe(find("nni-perturb-Zero"));
  expect(find("nni-add-strength-Zero")).toBeNull(); // Zero has none
  expect(find("nni-perturb-Shift")?.title).toBe("Will add the strength to every number.");
  expect((find("nni-add-strength-Shift") as HTMLInputElement).value).toBe("1");
  give("nni-add-strength-Shift", "-7.5");
  find("nni-perturb-at")!.querySelectorAll("button")[1].click();
  expect(control.of("perturb")).toEqual([]);
  await settle();
  find("nni-perturb-Shift")!.click();
  expect(control.of("perturb")).toMatchObject([{ site: "blocks/0", kind: "Shift", strength: -7.5, at: "input" }]);
  await settle();
  expect(find("nni-perturb-Shift"), "the menu closes").toBeNull();
  expect(document.activeElement).toBe(find("nni-perturb"));
  await openMenu(find, "nni-perturb");
  find("nni-perturb-StopGradient")!.click();
  expect(control.of("perturb")[1]).toMatchObject({ kind: "StopGradient", strength: null, at: "input" });
});

it("offers no perturbation that would change nothing", async () => {
  await start();
  await openMenu(find, "nni-perturb");
  const offered = [...el.querySelectorAll<HTMLInputElement>(".nni-perturb-menu input[type=number]")].map((one) => [one.dataset["testid"], one.value]);
  expect(Object.fromEntries(offered as [string, string][])).toMatchObject({ ["nni-add-strength-Scale"]: "0.5", ["nni-add-strength-ScaleGradient"]: "0.5" });
});

it("moves in the menu by the arrows, and closes it by Escape", async () => {
  await start();
  await openMenu(find, "nni-perturb");
  press(find("nni-perturb-Zero")!, "ArrowDown");
  expect(document.activeElement).toBe(find("nni-perturb-Mean"));
  press(find("nni-perturb-Mean")!, "ArrowUp");
  press(find("nni-perturb-Zero")!, "ArrowUp");
  expect(document.activeElement).toBe(find("nni-perturb-ClipGradient"));
  press(document.activeElement!, "Escape");
  await settle();
  expect([find("nni-perturb-Zero"), document.activeElement]).toEqual([null, find("nni-perturb")]);
});

it("names the units to which one is confined, and can be added to all of them beside it", async () => {
  await start({ perturbations: [perturbation(1, "blocks/0", { expression: "nni.Zero().only(units=[3], axis=-2)" })] });
  expect(find("nni-perturbation")?.querySelector(".nni-confinement")?.textContent).toBe("units [3], axis -2");
  await openMenu(find, "nni-perturb");
  expect((find("nni-perturb-Zero") as HTMLButtonElement).disabled).toBe(false);
});

it("names many units by their runs, and all of them in the tip", async () => {
  await start({ perturbations: [perturbation(1, "blocks/0", { expression: "nni.Zero().only(units=[1, 2, 8, 9, 10, 11, 30])" })] });
  expect(find("nni-perturbation")?.querySelector(".nni-confinement")?.textContent).toBe("units [1, 2, 8–11, 30]");
  expect(find("nni-perturbation")?.querySelector<HTMLElement>(".nni-perturbed-site")?.title).toBe("blocks/0\nunits [1, 2, 8–11, 30]");
});

it("does not add what it is told cannot be, and says why", async () => {
  await start({ perturbations: [perturbation(1, "blocks/0")] });
  await openMenu(find, "nni-perturb");
  const kind = (name: string): HTMLButtonElement => find(`nni-perturb-${name}`) as HTMLButtonElement;
  expect(kind("Zero").disabled).toBe(true);
  expect(kind("Zero").textContent).toContain("It is already in the list.");
  find("nni-perturb-at")!.querySelectorAll("button")[1].click(); // at the input it is not
  await settle();
  expect(kind("Zero").disabled).toBe(false);
  give("nni-add-strength-Noise", "-1");
  await settle();
  expect(kind("Noise").disabled).toBe(true);
  expect(kind("Noise").textContent).toContain("Its std is at least 0.");
  press(find("nni-add-strength-Noise")!, "Enter");
  expect(control.of("perturb")).toEqual([]);
  give("nni-add-strength-Noise", "0.25");
  await settle();
  press(find("nni-add-strength-Noise")!, "Enter");
  expect(control.of("perturb")).toMatchObject([{ kind: "Noise", strength: 0.25, at: "input" }]);
});

it("switches all", async () => {
  await start({ perturbations: [perturbation(1, "head"), scale(2, "blocks/0", 1, { enabled: false })] });
  await openMenu(find, "nni-effect-more");
  expect(find("nni-switch-all")?.textContent).toBe("All off");
  find("nni-switch-all")!.click();
  await settle();
  expect(control.of("switch_all")).toMatchObject([{ enabled: false }]);
  expect(all("nni-switch").map((s) => s.getAttribute("aria-checked"))).toEqual(["false", "false"]);
  expect(find("nni-switch-all")?.textContent).toBe("All on");
});

it("says on a perturbation's row why it does nothing, while it is on and until it acts", async () => {
  const why = "the loop does not call it";
  const row = (more: object) => state({ perturbations: [scale(1, "blocks/0", 0.5, more)] });
  await start({ perturbations: [scale(1, "blocks/0", 0.5, { not_acting: why })] });
  expect(find("nni-not-acting")?.dataset["value"]).toBe(why);
  expect(find("nni-not-acting")?.textContent).toBe(`not acting here: ${why}`);
  expect(find("nni-not-acting")?.parentElement?.title).toBe(`not acting here: ${why}`);
  for (const more of [{ not_acting: why, enabled: false }, { not_acting: why, pending: true }, { not_acting: "" }]) {
    stream.emit(row(more));
    await settle();
    expect(find("nni-perturbation")).not.toBeNull();
    expect(find("nni-not-acting")).toBeNull();
    stream.emit(row({ not_acting: why }));
    await settle();
    expect(find("nni-not-acting")).not.toBeNull();
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
  const rows = all("nni-perturbation");
  const part = (row: number, id: string): HTMLElement | null => rows[row].querySelector(`[data-testid="${id}"]`);
  expect(rows.map((row) => row.querySelector(".nni-perturbed-site")?.textContent)).toEqual(["blocks/*input, 2 sites", "nowhereparameter", "head"]);
  expect(part(0, "nni-pending")?.textContent).toBe("next step: the loop takes it over at its next step");
  expect(part(1, "nni-row-compiling")?.textContent).toMatch(/^compiling: /);
  expect(part(1, "nni-pending")).toBeNull();
  expect(part(2, "nni-units")?.textContent).toBe("mask: 12 of 64 off");
  expect(part(2, "nni-strength")).toBeNull();
  expect(find("nni-compiling")?.textContent).toBe("compiling");
  expect(rows[1].querySelector(".nni-link")).toBeNull(); // there is no such row
  rows[0].querySelector<HTMLElement>(".nni-link")!.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("blocks/0");
  stream.emit(state({ perturbations: [scale(1, "blocks/*", 0.5)] }));
  await settle();
  expect(find("nni-compiling")?.textContent).toBe("");
  expect(find("nni-pending")).toBeNull();
});

it("gives the Python text to hover and to copy", async () => {
  const copied: string[] = [];
  vi.spyOn(navigator.clipboard, "writeText").mockImplementation((text) => (copied.push(text), Promise.resolve()));
  await start({ perturbations: [scale(1, "head", 0.5)] });
  const kind = find("nni-expression")!;
  expect([kind.textContent, kind.dataset["value"]]).toEqual(["Scale", "nni.Scale(factor=0.5)"]);
  expect(kind.title).toContain("nni.Scale(factor=0.5)");
  kind.click();
  await settle();
  expect(copied).toEqual(["nni.Scale(factor=0.5)"]);
  expect(find("nni-perturbation")?.textContent).toContain("copied");
});

it.each([
  ["during", "Changes act at the next step, even while a cell runs."],
  ["thread", "Changes act at the next step: the loop runs in a thread of its own."],
  ["after", "This kernel handles changes when the cell has finished; run the loop with insp.background(train) to change things meanwhile."],
] as const)("says how changes reach the loop: %s", async (listening, words) => {
  vi.useFakeTimers();
  ({ control, stream, el, find, all, end } = mountView());
  stream.emit(layout());
  vi.advanceTimersByTime(1100);
  control.emit({ type: "reply", id: 0, ok: true, error: "" });
  stream.emit(state({ listening }));
  vi.useRealTimers();
  await settle();
  await openMenu(find, "nni-menu");
  expect(find("nni-listening")?.textContent).toBe(words);
  expect(find("nni-listening")?.dataset["value"]).toBe(listening);
});

it("names the effect by the State that it came with, not by a wish", async () => {
  const perturbations = [scale(1, "head", 0.5), perturbation(2, "blocks/0", { enabled: false })];
  await start({ perturbations, effect: effect({ source: "the last step, at step 3", output_change: 0.5 }) });
  const caption = (): string | null | undefined => find("nni-effect")?.lastElementChild?.textContent;
  expect(caption()).toBe("Effect of Scale (factor 0.5) at head on the last step, at step 3");
  all("nni-switch")[0].click();
  all("nni-switch")[1].click(); // Zero is asked for instead: these are Scale's figures still
  await settle();
  expect(caption()).toBe("Effect of Scale (factor 0.5) at head on the last step, at step 3, before this change");
  for (const { id } of control.of("adjust") as unknown as { id: number }[]) control.emit({ type: "reply", id, ok: true, error: "" });
  stream.emit(state({ perturbations: perturbations.map((p) => ({ ...p, enabled: !p.enabled })), no_effect: "Waits." }));
  await settle();
  expect(find("nni-effect")).toBeNull();
  expect(find("nni-no-effect")?.textContent).toBe("Waits.");
});

it("shows the effect, with what is unknown as a dash", async () => {
  const figures = { clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.75, accuracy: null }, output_change: 0.5 };
  await start({ perturbations: [perturbation(1, "head")], effect: effect(figures) });
  expect(find("nni-effect-loss-perturbed")?.dataset["value"]).toBe("0.75");
  expect(find("nni-effect")?.textContent).toContain("loss 0.25 → 0.75");
  await openMenu(find, "nni-effect-more");
  expect(find("nni-effect-full")?.textContent).toContain("+0.5000");
  expect(find("nni-effect-accuracy-perturbed")?.textContent).toBe("–");
  expect(find("nni-output-change")?.textContent).toContain("50");
  expect([find("nni-kl"), find("nni-top1"), find("nni-downstream")]).toEqual([null, null, null]);
});

it("shows what each does by itself, unless it is off or waits", async () => {
  const one = { loss_change: 0.25, output_change: 0.5, kl: null, top1_changed: 0 };
  const alone = [1, 2, 3, 4].map((id) => ({ ...one, perturbation: id, loss_change: id === 4 ? null : 0.25 }));
  const more = [{}, { enabled: false }, { pending: true }, {}];
  await start({ perturbations: more.map((m, i) => scale(i + 1, "head", 1, m)), effect: effect({ alone }) });
  await openMenu(find, "nni-effect-more");
  const rows = all("nni-alone");
  const shown = ["Scale on head alone: loss+0.2500", "Scale on head alone: loss+0.2500", "Scale on head alone: output50\u202f%"];
  expect(rows.map((row) => row.textContent)).toEqual(shown);
  expect(rows.map((row) => row.dataset["value"])).toEqual(["0.25", "0.25", "0.5"]);
  expect(rows[0]!.title).toContain("KL divergence –");
  find("nni-switch")!.click(); // all of them are older than this
  await settle();
  expect(all("nni-alone")).toEqual([]);
});

it("shows the effect on predictions, and on the sites downstream as links", async () => {
  const sites = [
    { site: "head", change: 1.25 },
    { site: "blocks/1", change: 0.001 },
    { site: "", change: null },
    { site: "gone", change: 0 },
  ];
  await start({ perturbations: [perturbation(1, "blocks/0")], effect: effect({ kl: 0.5, top1_changed: 0.125, sites }) });
  expect([find("nni-kl")?.textContent, find("nni-kl")?.dataset["value"]]).toEqual(["0.5000", "0.5"]);
  expect([find("nni-top1")?.textContent, find("nni-top1")?.dataset["value"]]).toEqual(["12.5\u202f%", "0.125"]);
  await openMenu(find, "nni-effect-more");
  expect(all("nni-downstream").map((s) => s.textContent)).toEqual([
    "head125\u202f%", "blocks/10.1\u202f%", "(model)not finite", "gone0\u202f%",
  ]); // prettier-ignore
  expect(all("nni-downstream").map((s) => s.querySelector("button") !== null)).toEqual([true, true, true, false]);
  all("nni-downstream")[1].querySelector("button")!.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("blocks/1");
});

it("tells no change from a change, and what the effect was measured on", async () => {
  const figures = { clean: { loss: 0.25, accuracy: 1 }, perturbed: { loss: 0.125, accuracy: 1 }, output_change: 0, kl: 0, top1_changed: 0 };
  await start({ perturbations: [perturbation(1, "head")], effect: effect(figures) });
  await openMenu(find, "nni-effect-more");
  const words = (selector: string): (string | null)[] => [...find("nni-effect-full")!.querySelectorAll(selector)].map((e) => e.textContent);
  expect(words(".nni-change")).toEqual(["−0.1250"]);
  expect(words(".nni-no-change")).toEqual(["no change", "no change", "no change", "no change"]);
  expect(words("caption")[0]).toBe("Effect of Zero on the example");
});

it("marks its row with a word that a narrow tree keeps as a name", async () => {
  await start({ perturbations: [perturbation(1, "head")] });
  const badge = find("nni-badge-perturbed")!;
  expect([badge.textContent, badge.title, badge.dataset["sign"]]).toEqual(["perturbed", "A perturbation is on", "◆"]);
});

it("shows why a request failed", async () => {
  await start();
  await openMenu(find, "nni-perturb");
  find("nni-perturb-Zero")!.click();
  control.emit({ type: "reply", id: control.of("perturb")[0]["id"], ok: false, error: "its output is an integer" });
  await settle();
  expect(find("nni-notice")?.textContent).toContain("its output is an integer");
});

it("opens the menu from a row", async () => {
  await start();
  el.querySelector<HTMLElement>(`[data-testid="nni-row"][data-site="head"] [data-testid="nni-add-here"]`)!.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("head");
  await settle();
  expect(document.activeElement).toBe(find("nni-perturb-Zero"));
  expect(control.of("perturb"), "nothing acts before a kind is pressed").toHaveLength(0);
});

it("is absent while there is none, and switching one changes no part of its chip but its look", async () => {
  await start();
  expect([find("nni-perturb-bar"), el.textContent!.includes("Nothing is perturbed")]).toEqual([null, false]);
  stream.emit(state({ perturbations: [scale(1, "head", 0.5)], no_effect: "Nothing is perturbed." }));
  await settle();
  const parts = (): string[] => [...find("nni-perturbation")!.querySelectorAll("*")].map((e) => `${e.localName}.${e.className}`);
  const before = parts();
  find("nni-switch")!.click();
  await settle();
  expect(parts()).toEqual(before);
  expect(find("nni-no-effect")?.textContent).toBe("The effect of this change is not here yet.");
  await openMenu(find, "nni-effect-more");
  expect(el.textContent).not.toContain("Nothing is perturbed");
});

const soon = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, UNANSWERED_MS + 50));
const answer = (type: string): void => void control.emit({ type: "reply", id: control.of(type).at(-1)!["id"], ok: true, error: "" });

it.each([
  ["during", true, null],
  ["steps", true, "acts at the next step"],
  ["steps", false, "acts when the cell ends"],
  ["after", true, "acts when the cell ends"],
  ["thread", true, "acts when the cell ends"],
] as const)("a change without an answer says in its row when it acts: %s, running %s", async (listening, running, words) => {
  await start();
  const progress = { ...state().progress, running };
  stream.emit(state({ listening, perturbations: [{ ...scale(1, "head", 0.5), enabled: false }], progress, no_effect: "Nothing is perturbed." }));
  await settle();
  find("nni-switch")!.click();
  await settle();
  expect(find("nni-waits")).toBeNull();
  await soon();
  const row = find("nni-perturbation")!;
  expect(row.querySelector(`[data-testid="nni-waits"]`)?.textContent ?? null).toBe(words);
  expect(el.textContent).not.toContain("Nothing is perturbed");
  answer("adjust");
  await settle();
  expect(row.querySelector(`[data-testid="nni-waits"]`)).toBeNull();
});

it("a removal without an answer says so too", async () => {
  await start({ listening: "after", perturbations: [perturbation(1, "head")] });
  find("nni-remove")!.click();
  await soon();
  expect(find("nni-waits")?.textContent).toBe("acts when the cell ends");
  answer("remove");
  await settle();
  expect(find("nni-waits")).toBeNull();
});

it("one that was asked for and has had no answer has a row that says when it acts", async () => {
  await start({ listening: "after" });
  await openMenu(find, "nni-perturb");
  find("nni-perturb-Zero")!.click();
  await settle();
  expect(find("nni-adding")).toBeNull();
  await soon();
  expect(find("nni-adding")!.textContent).toContain("acts when the cell ends");
  answer("perturb");
  stream.emit(state({ listening: "after", perturbations: [perturbation(1, "head")] }));
  await settle();
  expect([find("nni-adding"), all("nni-perturbation").length]).toEqual([null, 1]);
});
