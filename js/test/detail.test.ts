// What is asked of a site on demand, the strip of units and its mask, the sweep, the lines of Python.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Ask } from "../src/bridge";
import { histogramsOf, unitsOf } from "../src/inside/decode";
import { Inside } from "../src/inside/inside";
import { UNIT_FIGURES, VERSION, type Code, type Perturbation, type Sweep, type UnitFigures } from "../src/protocol";
import { ids } from "../src/testids";
import { cellAt, gridOf, isDead, paintStrip, rangeOf } from "../src/units/cells";
import { colours, css } from "../src/values/colour";
import { Masks, editable, fromHex, toHex } from "../src/units/mask";
import { type MockModel, perturbation, settle, state } from "./helpers";
import { started, type Mounted } from "./mounted";

const EVIL = `<img src=x onerror="window.hacked=true"><script>window.hacked=true</script>`;

function units(count: number, site = "blocks/0", more: Partial<UnitFigures> = {}): [UnitFigures, DataView] {
  const header: UnitFigures = {
    type: "units", version: VERSION, id: 1, site, each: 2, source: "the example", units: count, more: 0, why: "", ...more,
  }; // prettier-ignore
  const figures = Float64Array.from({ length: UNIT_FIGURES.length * count }, (_, i) => i / 8);
  figures.fill(0, UNIT_FIGURES.indexOf("zero_fraction") * count); // and nonfinite after it
  figures[UNIT_FIGURES.indexOf("zero_fraction") * count + 1] = 1; // unit 1 is dead
  return [header, new DataView(figures.buffer)];
}

class Kernel {
  readonly asked: Ask[] = [];
  readonly settles: ((error: string | null) => void)[] = [];
  ask = (request: Ask, settle: (error: string | null) => void = () => undefined): void => {
    this.asked.push(request);
    this.settles.push(settle);
  };
}

describe("bits", () => {
  it("go to hexadecimal and back, unit 0 the highest bit", () => {
    const mask = Uint8Array.from([1, 0, 1, 1, 1, 1, 1, 1, 1, 0]);
    expect(toHex(mask)).toBe("bf80");
    expect(fromHex("bf80", 10)).toEqual(mask);
    for (const length of [1, 7, 8, 9, 64, 1000]) {
      const any = Uint8Array.from({ length }, (_, i) => (i * 7 + length) % 3 === 0 ? 1 : 0);
      expect(fromHex(toHex(any), length)).toEqual(any);
    }
  });
});

describe("cells", () => {
  it.each([1, 5, 40, 96, 512, 513, 4096, 4097, 16384])("of %i units: the cell of a place is the unit that lies there", (count) => {
    for (const width of [0, 200, 641]) {
      const grid = gridOf(count, width);
      expect(grid.columns * grid.rows).toBeGreaterThanOrEqual(count);
      expect(grid.columns * grid.width).toBeLessThanOrEqual(Math.max(width, 40) + 1e-9);
      for (const unit of [0, 1, count >> 1, count - 1].filter((u) => u < count)) {
        const x = (unit % grid.columns) * grid.width + grid.width / 2;
        const y = Math.floor(unit / grid.columns) * grid.height + grid.height / 2;
        expect(cellAt(grid, count, x, y)).toBe(unit);
      }
      expect(cellAt(grid, count, -1, 1)).toBeNull();
      expect(cellAt(grid, count, 1, grid.rows * grid.height + 1)).toBeNull();
    }
  });

  it("have colours up to the largest figure, and a share by itself", () => {
    expect(rangeOf(Float64Array.from([1, -4, NaN, 2]), "mean")).toEqual({ low: -4, high: 4, signed: true });
    expect(rangeOf(Float64Array.from([1, Infinity, 2]), "mean")).toEqual({ low: 0, high: 2, signed: false });
    expect(rangeOf(Float64Array.from([0, 0.5]), "zero_fraction")).toEqual({ low: 0, high: 1, signed: false });
    expect(rangeOf(Float64Array.from([0, 0, NaN]), "std")).toEqual({ low: 0, high: 0, signed: false });
    const data = unitsOf(...units(3));
    expect([0, 1, 2].map((unit) => isDead(data, unit))).toEqual([false, true, false]);
  });

  it.each([false, true])("have the colours of the panel Values: blue below 0, orange above (dark: %s)", (dark) => {
    const data = unitsOf(...units(3));
    data.figures.mean.set([-1, 1, 0]);
    const painted: string[] = [];
    const ignore = (): void => undefined;
    const context = {
      fillStyle: "", fillRect: () => painted.push(context.fillStyle), beginPath: ignore, moveTo: ignore, lineTo: ignore, stroke: ignore,
    }; // prettier-ignore
    const palette = { text: "text", faint: "", line: "line", background: "", output: "", gradient: "", metric: "" };
    const area = { context: context as unknown as CanvasRenderingContext2D, width: 100, height: 30, palette };
    paintStrip(area, { data, figure: "mean", grid: gridOf(3, 100), mask: Uint8Array.from([1, 1, 1]), active: null, dark, bad: "", off: "" });
    const table = colours({ low: -1, high: 1, signed: true }, dark);
    const [below, above, zero] = painted.filter((colour) => colour !== "line");
    expect([below, above, zero]).toEqual([css(table, 0), css(table, 255 * 3), css(table, 128 * 3)]);
    const rgb = (colour: string): number[] => colour.match(/\d+/g)!.map(Number);
    expect(rgb(below)[2]).toBeGreaterThan(rgb(below)[0]);
    expect(rgb(above)[0]).toBeGreaterThan(rgb(above)[2]);
  });
});

it("a buffer of another length is refused", () => {
  const [header, buffer] = units(4);
  expect(() => unitsOf({ ...header, units: 5 }, buffer)).toThrow("The buffer of units has 224 bytes, 280 were expected.");
  expect(() => histogramsOf({ type: "parameters", version: VERSION, id: 1, site: "", parameters: [{ path: "a", array: "", bins: 2 }], more: 0, why: "" }, undefined)).toThrow(
    "0 bytes, 112 were expected",
  );
});

describe("Inside", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  it("has one request under way, and the newest wish follows it", () => {
    const kernel = new Kernel();
    const inside = new Inside(kernel);
    inside.look("units", "a");
    inside.look("units", "b");
    inside.look("units", "c");
    inside.look("code", "c");
    expect(kernel.asked).toEqual([{ type: "look", what: "units", site: "a" }, { type: "look", what: "code", site: "c" }]);
    inside.receive(...units(4, "a"));
    expect(inside.units.value, "nobody wants it any more").toBeNull();
    kernel.settles[0](null);
    expect(kernel.asked[2]).toEqual({ type: "look", what: "units", site: "c" });
    inside.receive(...units(4, "c"));
    expect(inside.units.value?.site).toBe("c");
  });

  it("looks again at the same site only a while after the answer, longer after a long one", () => {
    const kernel = new Kernel();
    const inside = new Inside(kernel);
    inside.look("units", "a");
    inside.look("units", "a");
    vi.advanceTimersByTime(1000);
    kernel.settles[0](null);
    vi.advanceTimersByTime(3999);
    expect(kernel.asked).toHaveLength(1);
    vi.advanceTimersByTime(2);
    expect(kernel.asked).toHaveLength(2);
    kernel.settles[1](null);
    inside.look("units", "b");
    expect(kernel.asked, "another site at once").toHaveLength(3);
    kernel.settles[2](null);
    inside.look("units", "b");
    inside.forget("units");
    vi.advanceTimersByTime(60_000);
    expect(kernel.asked, "not for a panel that is gone").toHaveLength(3);
  });

  it("keeps what was seen beside the text of what is wrong now", () => {
    const kernel = new Kernel();
    const inside = new Inside(kernel);
    inside.look("units", "a");
    inside.receive(...units(4, "a"));
    kernel.settles[0](null);
    inside.look("units", "a");
    vi.advanceTimersByTime(500);
    kernel.settles[1]("a step has the arrays");
    expect(inside.units.value).toMatchObject({ site: "a", error: "a step has the arrays" });
    expect(inside.units.value?.data?.header.units).toBe(4);
  });
});

describe("Masks", () => {
  const mask = (id: number, hex: string): Perturbation => perturbation(id, "a", { kind: "Mask", units: 8, mask: hex });

  it("adds one, then sets it; one request at a time, and the newest wish follows", () => {
    const kernel = new Kernel();
    let all: Perturbation[] = [];
    const masks = new Masks(kernel, () => all, () => undefined);
    expect(toHex(masks.of("a", 8))).toBe("ff");
    masks.set("a", fromHex("7f", 8));
    masks.set("a", fromHex("3f", 8));
    masks.set("a", fromHex("1f", 8));
    expect(kernel.asked).toEqual([{ type: "set_mask", perturbation: null, site: "a", units: 8, mask: "7f" }]);
    expect(toHex(masks.of("a", 8)), "shown at once").toBe("1f");
    kernel.settles[0](null);
    expect(kernel.asked, "its number is not known yet").toHaveLength(1);
    all = [mask(5, "7f")];
    masks.settle();
    expect(kernel.asked[1]).toEqual({ type: "set_mask", perturbation: 5, site: "a", units: 8, mask: "1f" });
    kernel.settles[1](null);
    all = [mask(5, "1f")];
    masks.settle();
    expect(toHex(masks.of("a", 8))).toBe("1f");
    expect(masks.wish.value).toBeNull();
  });

  it("takes the wish back where it cannot be", () => {
    const kernel = new Kernel();
    const failed = vi.fn();
    const masks = new Masks(kernel, () => [], failed);
    masks.set("a", fromHex("00", 8));
    kernel.settles[0]("it does not fit");
    expect(failed).toHaveBeenCalledWith("it does not fit", "a");
    expect(toHex(masks.of("a", 8))).toBe("ff");
  });

  it("edits a mask of this site's output, of this length", () => {
    const all = [mask(1, ""), { ...mask(2, "ff"), at: "input" as const }, { ...mask(3, "ff"), units: 9 }, { ...mask(4, "ff"), site: "b" }, mask(5, "ff")];
    expect(editable(all, "a", 8)?.id).toBe(5);
  });
});

describe("views", () => {
  let control: MockModel;
  let stream: MockModel;
  let el: HTMLElement;
  let find: Mounted["find"];
  let all: Mounted["all"];
  let end: Mounted["end"];

  beforeEach(async () => {
    ({ control, stream, el, find, all, end } = await started());
  });
  afterEach(() => {
    end();
  });

  const press = async (element: HTMLElement, ...keys: (string | KeyboardEventInit)[]): Promise<void> => {
    for (const key of keys) {
      element.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, ...(typeof key === "string" ? { key } : key) }));
      await settle();
    }
  };
  const open = async (panel: string): Promise<void> => {
    find(ids.tab(panel))!.click();
    await settle();
  };

  it("asks for nothing of a panel that is not shown", () => {
    expect(control.of("look").map((m) => m["what"])).toEqual(["parameters"]);
  });

  it("edits a mask by the keyboard, only once that was asked for", async () => {
    await open("units");
    expect(control.of("look").at(-1)).toMatchObject({ what: "units", site: "blocks/0" });
    stream.emit(...units(10));
    await settle();
    expect([find(ids.strip)?.dataset["value"], find(ids.deadUnits)?.dataset["value"]]).toEqual(["10", "1"]);
    const strip = find(ids.strip)!;
    strip.focus();
    await settle();
    await press(strip, "ArrowRight", "ArrowRight", " ");
    expect(find(ids.unitTold)?.dataset["value"]).toBe("2");
    expect(control.of("set_mask"), "it does not edit yet").toHaveLength(0);
    find(ids.editMask)!.click();
    await settle();
    strip.focus();
    await press(strip, "Home", " ");
    expect(control.of("set_mask")).toMatchObject([{ perturbation: null, site: "blocks/0", units: 10, mask: "7fc0" }]);
    expect(find(ids.unitsOff)?.dataset["value"]).toBe("1");
    control.emit({ type: "reply", id: control.of("set_mask")[0]["id"], ok: true, error: "" });
    stream.emit(state({ perturbations: [perturbation(7, "blocks/0", { kind: "Mask", units: 10, units_off: 1, mask: "7fc0" })] }));
    await settle();
    await press(strip, { key: "ArrowRight", shiftKey: true }, { key: "ArrowRight" });
    expect(control.of("set_mask")[1], "shift takes the next one along").toMatchObject({ perturbation: 7, mask: "3fc0" });
  });

  it("opens the strip from the row of a mask", async () => {
    stream.emit(state({ perturbations: [perturbation(7, "head", { kind: "Mask", units: 10, units_off: 1, mask: "7fc0" })] }));
    await settle();
    find(ids.units)!.querySelector("button")!.click();
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("head");
    expect(find(ids.editMask)?.getAttribute("aria-pressed") ?? "waits").toBe("waits");
    stream.emit(...units(10, "head"));
    await settle();
    expect(find(ids.editMask)?.getAttribute("aria-pressed")).toBe("true");
  });

  it("shows source and documentation as text", async () => {
    await open("code");
    const code: Code = {
      type: "code", version: VERSION, id: 2, site: "blocks/0", kind: EVIL, documentation: `  ${EVIL}\n    indented`,
      excerpts: [{ file: EVIL, function: EVIL, first: 3, line: 4, text: `# ${EVIL}\nx = block(x)` }], sown: ["head"], why: "",
    }; // prettier-ignore
    stream.emit(code);
    await settle();
    expect(find(ids.excerpt)?.dataset["value"]).toBe("4");
    expect(el.querySelector("[aria-current=true].nni-line")?.textContent).toBe("4x = block(x)\n");
    expect(find(ids.documentation)?.textContent).toBe(`  ${EVIL}\n    indented`);
    expect(all(ids.sown).map((row) => row.dataset["site"])).toEqual(["head"]);
    expect(el.querySelectorAll("img, script")).toHaveLength(0);
  });

  const swept = (more: Partial<Sweep>): Sweep => ({
    type: "sweep", version: VERSION, running: false, stopped: false, done: 3, total: 3, sites: "**", perturbation: "nni.Zero()",
    source: "the last step", measures: ["loss_change", "output_change"], loss: 0.5, measured: 3, error: "",
    rows: [
      { site: "head", loss_change: -2, output_change: 0.1, kl: null, top1_changed: null, why_not: "" },
      { site: "blocks/1", loss_change: 0, output_change: 0.4, kl: null, top1_changed: null, why_not: "" },
      { site: EVIL, loss_change: null, output_change: null, kl: null, top1_changed: null, why_not: EVIL },
    ], ...more,
  }); // prettier-ignore

  it("runs a sweep, stops it, and ranks what it found by what is chosen", async () => {
    await open("sweep");
    find(ids.sweepStart)!.click();
    expect(control.of("start_sweep")).toMatchObject([{ sites: "**", kind: "Zero", strength: null, at: "output" }]);
    stream.emit(swept({ running: true, rows: [], done: 0, total: 0 }));
    await settle();
    expect(find(ids.sweep)?.dataset["state"]).toBe("running");
    find(ids.sweepStop)!.click();
    expect(control.of("stop_sweep")).toHaveLength(1);
    stream.emit(swept({ stopped: true }));
    await settle();
    expect(find(ids.sweep)?.dataset["state"]).toBe("stopped");
    const ranked = (): unknown[] => all(ids.sweepRow).map((row) => [row.dataset["site"], row.dataset["value"]]);
    expect(ranked()).toEqual([["head", "-2"], ["blocks/1", "0"], [EVIL, ""]]);
    expect(all(ids.sweepRow).map((row) => row.lastElementChild!.textContent)).toEqual(["−2", "no change", EVIL]);
    [...find(ids.sweepMeasure)!.querySelectorAll("button")].find((b) => b.textContent === "output")!.click();
    await settle();
    expect(ranked()).toEqual([["blocks/1", "0.4"], ["head", "0.1"], [EVIL, ""]]);
    all(ids.sweepRow)[1].querySelector("button")!.click();
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("head");
    expect(el.querySelectorAll("img, script")).toHaveLength(0);
  });

  it("tells the Python of what was clicked last, and of a row", async () => {
    const write = vi.fn(() => Promise.resolve());
    vi.stubGlobal("navigator", { clipboard: { writeText: write } });
    const python = 'insp.perturb("head", nni.Zero())';
    stream.emit(state({ python: "insp.switch_all(True)", perturbations: [perturbation(1, "head", { python })] }));
    await settle();
    expect(find(ids.python)?.dataset["value"]).toBe("insp.switch_all(True)");
    el.querySelector<HTMLElement>(`.nni-footer [data-testid="${ids.copyPython}"]`)!.click();
    find(ids.expression)!.click();
    expect(write.mock.calls).toEqual([["insp.switch_all(True)"], [python]]);
    vi.unstubAllGlobals();
  });

  it("opens the form from a row", async () => {
    el.querySelector<HTMLElement>(`[data-testid="${ids.row}"][data-site="head"] [data-testid="${ids.addHere}"]`)!.click();
    await settle();
    expect(find(ids.selected)?.dataset["value"]).toBe("head");
    expect(document.activeElement).toBe(find(ids.perturbKind));
    expect(control.of("perturb"), "nothing acts before Add").toHaveLength(0);
  });
});
