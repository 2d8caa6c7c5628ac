// Two passes compared: what is asked when, and the ranking.
import { afterEach, beforeEach, expect, it } from "vitest";
import { OTHER, VERSION, type Compared, type ComparedRow } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { frame, passes } from "../helpers/messages";
import { enterValue, startView, type TestView, openTab } from "../helpers/view";

const EVIL = `<img src=x onerror="window.hacked=true">.nni`;
let view: TestView;
const asked = (): unknown[] => view.control.of("compare").map(({ id, number, pinned }) => ({ id, number, pinned }));
const rows = (): (string | undefined)[] => view.all("nni-compare-row").map((row) => row.dataset["site"]);
const click = async (id: string): Promise<void> => {
  view.find(id)!.click();
  await settle();
};

function row(site: string, total_variation: number | null, more: Partial<ComparedRow> = {}): ComparedRow {
  return {
    site, quantity: "output", where: "both", total_variation, quantile_distance: total_variation, constant: false,
    mean_difference: 0.5, std_difference: -0.5, rms_difference: 0, nan: 0, nan_pinned: 0, shapes: "", ...more,
  }; // prettier-ignore
}

/** The kernel's answer to the last request. */
async function answer(list: readonly ComparedRow[], error = ""): Promise<void> {
  const { id, number, pinned } = view.control.of("compare").at(-1)! as unknown as Compared;
  const message: Compared = { type: "compared", version: VERSION, id, number, pinned, rows: list, total: list.length };
  if (!error) view.stream.emit(message);
  view.control.emit({ type: "reply", id, ok: !error, error });
  await settle();
}

async function bring(name: string, number: number): Promise<void> {
  view.stream.emit({ type: "other", version: VERSION, name, step: 40, number });
  await settle();
  const request = view.control.of("show_pass").at(-1)!;
  if (name) view.stream.emit(...frame(90 + number, { number: OTHER, step: 40, held: true }));
  view.control.emit({ type: "reply", id: request["id"], ok: true, error: "" });
  await settle();
}

beforeEach(async () => {
  view = await startView();
  view.stream.emit(...passes([[0, 0, 0, 0], [1, 1, 0, 0], [2, 5, 1, 1]])); // prettier-ignore
  await settle();
});
afterEach(() => view.end());

it("says how, and asks for nothing, while nothing is pinned", async () => {
  await openTab(view.find, "compare");
  expect(view.find("nni-detail")!.textContent).toContain("insp.compare(nni.load");
  expect(asked()).toEqual([]);
});

it("compares with a pinned pass of the same run once there is another one", async () => {
  await openTab(view.find, "compare");
  await click("nni-pin");
  expect(asked()).toEqual([]); // one pass with itself
  view.stream.emit(...frame(2, { number: 2, step: 5 }));
  await settle();
  expect(asked()).toMatchObject([{ number: 2, pinned: 1 }]);
  await answer([row("head", 0.5)]);
  expect(view.find("nni-compare-state")!.textContent).toBe("step 5, on screen, perturbed◇ step 1, pinned");
});

it("pins another run when it comes, shows the panel, and ranks", async () => {
  await bring("run.nni", 1);
  expect(view.find("nni-pinned")!.textContent).toBe("◇ run.nni, step 40");
  expect(asked()).toMatchObject([{ number: 1, pinned: OTHER }]);
  await answer([
    row("blocks/0", 0.75, { quantile_distance: 0.25 }),
    row("head", 0.5, { quantile_distance: null, constant: true }),
    row("blocks/1", 0.125, { quantile_distance: 0.5 }),
    row("", null),
    row("blocks/9", null, { where: "pinned" }),
    row("head", 0.25, { quantity: "gradient" }),
  ]);
  expect(view.find("nni-compare-state")!.dataset["state"]).toBe("now");
  expect(rows()).toEqual(["blocks/0", "head", "blocks/1", "", "blocks/9"]);
  expect(view.all("nni-compare-row").map((one) => one.textContent)).toEqual([
    "blocks/075\u202f%0.2500 σ", "head50\u202f%∞", "blocks/112.5\u202f%0.5000 σ",
    "(model)its counts are unknown", "blocks/9only in run.nni, step 40",
  ]); // prettier-ignore
  await click("nni-compare-by-quantile_distance");
  expect(rows()).toEqual(["head", "blocks/1", "blocks/0", "", "blocks/9"]);
  enterValue(view.find("nni-compare-quantity"), "gradient");
  await settle();
  expect(rows()).toEqual(["head"]);
  view.find("nni-compare-row")!.querySelector("button")!.click();
  await settle();
  expect(view.find("nni-selected")!.dataset["value"]).toBe("head");
});

it("keeps a ranking while the run goes on, says of which step, and renews it when asked", async () => {
  await bring("run.nni", 1);
  await answer([row("head", 0.5)]);
  view.stream.emit(...frame(2, { number: 2, step: 7 }));
  await settle();
  expect(asked()).toHaveLength(1);
  expect(view.find("nni-compare-state")!.textContent).toBe("step 1◇ run.nni, step 40, pinnedCompare the pass on screen");
  await click("nni-compare-again");
  expect(asked().at(-1)).toMatchObject({ number: 2, pinned: OTHER });
});

it("never names a ranking by a pass that was pinned later", async () => {
  await bring("run.nni", 1);
  await answer([row("head", 0.5)]);
  view.stream.emit(...frame(2, { number: 2, step: 5 }));
  await settle();
  await click("nni-pin"); // Unpin
  await click("nni-pin");
  view.stream.emit(...frame(3, { number: 3, step: 7 }));
  await settle();
  expect(asked().at(-1)).toMatchObject({ number: 3, pinned: 2 });
  expect(view.find("nni-compare-state")!.textContent).toBe("comparing …");
  expect(rows()).toEqual([]);
  await answer([], "Pass 2 is gone.");
  await click("nni-pin");
  expect(view.find("nni-detail")!.textContent).not.toContain("is gone");
});

it("asks once for two passes that cannot be compared", async () => {
  await bring("run.nni", 1);
  await answer([], "Pass 1 is not in the recording (any more).");
  await settle();
  expect(asked()).toHaveLength(1);
  expect(view.find("nni-detail")!.textContent).toContain("Pass 1 is not in the recording");
  expect(rows()).toEqual([]);
});

it("tells NaN that only one of the passes has", async () => {
  await bring("run.nni", 1);
  await answer([row("head", 0.5, { nan: 3 })]);
  expect(view.find("nni-compare-row")!.querySelector(".nni-bad")!.getAttribute("title")).toBe("3 NaN here, 0 there");
});

it("is told again after a reload and does not pin again; takes the run away", async () => {
  await bring("run.nni", 1);
  await click("nni-pin"); // Unpin
  await bring("run.nni", 1);
  expect(view.find("nni-pinned")!.textContent).toBe("");
  await click("nni-compare-other");
  view.stream.emit(...frame(99, { number: OTHER, step: 40, held: true }));
  await settle();
  expect(view.find("nni-pinned")!.textContent).toBe("◇ run.nni, step 40");
  await bring("", 2);
  expect(view.find("nni-pinned")!.textContent).toBe("");
  expect(view.find("nni-compare-other")).toBeNull();
});

it("shows a hostile name as text", async () => {
  await bring(EVIL, 1);
  expect(view.find("nni-pinned")!.textContent).toContain(EVIL);
  expect(view.el.querySelector("img")).toBeNull();
});

it("ranks weights, each with its module, its figures and the histogram of its change", async () => {
  const more = { array: "float32[4,3]", total_variation: 0.5, change: "00ff".repeat(16) };
  const list = [
    { parameter: "blocks/0/kernel", where: "both" as const, distance: 2, relative_change: 0.25, ...more },
    { parameter: EVIL, where: "pinned" as const, distance: null, relative_change: null, ...more, change: "" },
  ];
  const message = { type: "weights" as const, version: VERSION, name: "before", rows: list, total: 2 };
  view.stream.emit(message);
  await settle();
  const shown = view.all("nni-weight-row");
  expect(shown.map((one) => [one.dataset["site"], one.dataset["value"], one.dataset["distance"]])).toEqual([["blocks/0/kernel", "0.25", "2"], [EVIL, "", ""]]); // prettier-ignore
  expect(shown[0]!.querySelectorAll("path").length).toBe(1);
  expect(shown[1]!.textContent).toContain("only in before");
  expect(shown[1]!.querySelector("img")).toBeNull();
  await openTab(view.find, "code");
  const chosen = (): string => view.find("nni-tab-code")?.getAttribute("aria-selected") ?? "false";
  view.stream.emit(structuredClone(message)); // sent again, as to a page that was reloaded
  await settle();
  expect(chosen()).toBe("true");
  view.stream.emit({ ...message, name: "after" });
  await settle();
  expect(chosen()).toBe("false");
  expect(view.all("nni-weight-row")).toHaveLength(2);
  view.stream.emit({ type: "weights", version: VERSION, name: "", rows: [], total: 0 });
  await settle();
  expect(view.all("nni-weight-row")).toEqual([]);
});
