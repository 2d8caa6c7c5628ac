// Time: what is said of a metric at the cursor, and what the pointer and the keys do.
import { afterEach, describe, expect, it, vi } from "vitest";
import { VERSION } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { frame, passes, progress, state } from "../helpers/messages";
import { openMenu, press, startView, type TestView } from "../helpers/view";

let { control, stream, el, find, end } = {} as TestView;
afterEach(() => {
  end();
  vi.restoreAllMocks();
});

/** Shows one metric, and returns what stands at it. */
async function shown(name: string, values: number[], recorded = values.length): Promise<HTMLElement> {
  ({ control, stream, el, find, end } = await startView());
  const notFinite = values.filter((value) => !Number.isFinite(value)).length;
  const points = new Float64Array(values.flatMap((value, i) => [i, value]));
  stream.emit({ type: "curves", version: VERSION, names: [name], points: [values.length], recorded: [recorded], not_finite: [notFinite] }, new DataView(points.buffer));
  await settle();
  return find(`nni-metric-${name}`)!;
}

it("says how many values are not finite, also where the last one is", async () => {
  const found = await shown("loss", [NaN, 1, NaN, NaN, 2.5], 1205);
  expect(found.querySelector("b")!.textContent).toBe("2.5");
  expect(find("nni-metric-gaps-loss")!.textContent).toBe("3 of 1\u202f205 not finite");
});

it("says so where no value is finite", async () => {
  const found = await shown("loss", [NaN, NaN]);
  expect([found.querySelector("b"), find("nni-metric-gaps-loss")].map((part) => part!.textContent)).toEqual(["not finite", "2 of 2 not finite"]);
});

it("says nothing of a metric that is finite throughout", async () => {
  const found = await shown("loss", [3, 2, 1]);
  expect(find("nni-metric-gaps-loss")).toBeNull();
  expect(found.textContent).not.toContain("finite");
});

it("has the whole of a name that may be cut off as its title", async () => {
  const name = "validation/".repeat(20);
  const found = await shown(name, [1]);
  expect(found.title).toContain(name);
});

describe("the cursor", () => {
  const run = async (): Promise<HTMLElement> => {
    const found = await shown("loss", [4, 3, NaN, 1]);
    stream.emit(...passes([[10, 0, 0, 0], [11, 1, 0, 0], [12, 2, 1, 1], [13, 3, 0, 2]])); // prettier-ignore
    stream.emit(...frame(2, { step: 3, number: 13 }));
    await settle();
    const surface = el.querySelector<HTMLElement>(".nni-time-plot")!;
    surface.getBoundingClientRect = () => ({ left: 100, width: 312 }) as DOMRect; // 6 pixels at either end: 100 for each step
    surface.setPointerCapture = surface.hasPointerCapture = () => true;
    return found;
  };
  const point = async (type: string, x: number): Promise<void> => {
    el.querySelector(".nni-time-plot")!.dispatchEvent(new PointerEvent(type, { clientX: x, bubbles: true, button: 0 }));
    await settle();
  };
  const value = (found: HTMLElement): string | undefined => found.dataset["value"];
  const asked = (): unknown[] => control.of("show_pass").map((message) => message["number"]);

  it("reads the values out where the pointer is, and then the newest again", async () => {
    const found = await run();
    expect(value(found)).toBe("1");
    el.querySelector<HTMLElement>(".nni-time-plot")!.hasPointerCapture = () => false;
    await point("pointermove", 106 + 110);
    expect([value(found), found.querySelector("b")!.textContent]).toEqual(["3", "3"]);
    await point("pointermove", 106 + 205);
    expect(found.querySelector("b")!.textContent).toBe("not finite");
    await point("pointerleave", 0);
    expect([value(found), asked()]).toEqual(["1", []]);
  });

  it("holds the nearest pass at a click and while it is dragged, and follows by Escape", async () => {
    await run();
    await point("pointerdown", 106 + 90);
    expect(asked()).toEqual([11]);
    expect(find("nni-time")?.dataset["state"]).toBe("held");
    control.emit({ type: "reply", id: control.of("show_pass")[0]!["id"], ok: true, error: "" });
    await point("pointermove", 106 + 190);
    expect(asked()).toEqual([11, 12]);
    expect(document.activeElement).toBe(find("nni-scrub"));
    press(find("nni-scrub")!, "Escape");
    await settle();
    expect(find("nni-time")?.dataset["state"]).toBe("follow");
  });

  it("has the rest in a menu: play, one pass back and forward, the speed and the axis", async () => {
    await run();
    await openMenu(find, "nni-time-menu");
    expect(["nni-pause", "nni-play", "nni-step-back", "nni-step-forward", "nni-speed", "nni-metric-log-loss"].map((id) => find(id) !== null)).toEqual(Array(6).fill(true));
    find("nni-step-back")!.click();
    await settle();
    expect(asked()).toEqual([12]);
    expect(find("nni-pause")?.getAttribute("aria-label")).toBe("Follow");
  });

  it("plays where nothing is live, and names the pinned pass by its step", async () => {
    await run();
    expect(find("nni-pause")?.getAttribute("aria-label")).toBe("Hold");
    stream.emit(state({ progress: { ...progress, running: false } }));
    await settle();
    expect([find("nni-pause"), find("nni-play")?.getAttribute("aria-label")]).toEqual([null, "Play"]);
    find("nni-pin")!.click();
    await settle();
    expect([find("nni-pin")?.textContent, find("nni-pinned")?.textContent]).toEqual(["Unpin", "◇ step 3"]);
  });
});
