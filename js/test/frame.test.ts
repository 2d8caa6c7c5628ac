// The frame of a view: its width classes, the bars between its parts, and the groups of its panels.
import { afterEach, beforeEach, describe, expect, it } from "vitest";
import { isStacked, layoutOf } from "../src/frame/layout";
import { settle } from "./helpers/kernel";
import { state } from "./helpers/messages";
import { openTab, press, startView, type TestView } from "./helpers/view";

let { stream, el, find, end } = {} as TestView;
beforeEach(async () => void ({ stream, el, find, end } = await startView()));
afterEach(() => end());

it("has a layout for each width of its container", () => {
  expect([300, 559, 560, 799, 800, 1199, 1200, 3000].map(layoutOf)).toEqual(["narrow", "narrow", "medium", "medium", "side", "side", "wide", "wide"]);
  expect((["narrow", "medium", "side", "wide"] as const).map(isStacked)).toEqual([true, true, false, false]);
});

describe("a split", () => {
  const size = (): string => el.querySelector<HTMLElement>(".nni-body")!.style.getPropertyValue("--nni-tree-size");
  /** The body is 600 pixels high, the tree the first 200 of them, the bar the next 8. */
  const measured = (): HTMLElement => {
    const place = (selector: string, top: number, bottom: number): void => {
      el.querySelector<HTMLElement>(selector)!.getBoundingClientRect = () => ({ top, bottom, height: bottom - top, left: 0, right: 400, width: 400 }) as DOMRect;
    };
    place(".nni-body", 0, 600);
    place(".nni-tree", 0, 200);
    place(".nni-split", 200, 208);
    const bar = find("nni-split")!;
    bar.setPointerCapture = () => undefined;
    return bar;
  };

  it("moves by 24 pixels with the arrow keys, and back by Enter or a double click", async () => {
    const bar = measured();
    press(bar, "ArrowDown");
    await settle();
    expect([size(), bar.getAttribute("aria-valuenow")]).toEqual(["224px", "224"]);
    press(bar, "ArrowUp");
    await settle();
    expect(size(), "from what is measured").toBe("176px");
    press(bar, "Enter");
    await settle();
    expect(size()).toBe("");
    press(bar, "ArrowDown");
    await settle();
    bar.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
    await settle();
    expect(size()).toBe("");
  });

  it("is dragged, and leaves three rows and 240 pixels of the detail", async () => {
    const bar = measured();
    const drag = async (to: number): Promise<string> => {
      bar.dispatchEvent(new PointerEvent("pointerdown", { clientY: 204, bubbles: true }));
      bar.dispatchEvent(new PointerEvent("pointermove", { clientY: to, bubbles: true }));
      bar.dispatchEvent(new PointerEvent("pointerup", { bubbles: true }));
      bar.dispatchEvent(new PointerEvent("pointermove", { clientY: to + 50, bubbles: true })); // it was let go
      await settle();
      return size();
    };
    expect(await drag(244)).toBe("240px");
    expect(await drag(10)).toBe("104px");
    expect(await drag(900)).toBe("352px"); // 600 − 8 − 240
  });
});

describe("the groups of panels", () => {
  const chosen = (): (string | undefined)[] => [...el.querySelectorAll<HTMLElement>("[role=tab][aria-selected=true]")].map((tab) => tab.dataset["testid"]);

  it("are five, each with the panel that it showed last", async () => {
    expect([...el.querySelectorAll(".nni-groups [role=tab]")].map((tab) => tab.textContent)).toEqual(["Look", "Units", "Test", "Explain", "Structure"]);
    expect(chosen()).toEqual(["nni-group-Look", "nni-tab-overview"]);
    await openTab(find, "code");
    find("nni-group-Look")!.click();
    await settle();
    find("nni-group-Structure")!.click();
    await settle();
    expect(chosen()).toEqual(["nni-group-Structure", "nni-tab-code"]);
  });

  it("are chosen by 1 to 5, but not where one types", async () => {
    press(find("nni-tree")!, "5");
    await settle();
    expect(chosen()).toEqual(["nni-group-Structure", "nni-tab-flow"]);
    press(find("nni-search")!, "3");
    await settle();
    expect(chosen()[0]).toBe("nni-group-Structure");
    press(find("nni-scrub")!, "3");
    await settle();
    expect(chosen()).toEqual(["nni-group-Test", "nni-tab-sweep"]);
    press(find("nni-tree")!, "6");
    await settle();
    expect(chosen()[0]).toBe("nni-group-Test");
  });

  it("are moved along by the arrows, as the panels of one are", async () => {
    press(find("nni-group-Look")!, "ArrowLeft");
    await settle();
    expect(chosen()[0]).toBe("nni-group-Structure");
    press(find("nni-tab-flow")!, "End");
    await settle();
    expect(chosen()[1]).toBe("nni-tab-nnx");
    expect(document.activeElement?.getAttribute("role")).toBe("tab");
  });

  it("stay within the view: a panel that another part opens shows its group", async () => {
    stream.emit(state({ selected: "head" }));
    await settle();
    await openTab(find, "compare");
    expect(chosen()).toEqual(["nni-group-Test", "nni-tab-compare"]);
  });
});
