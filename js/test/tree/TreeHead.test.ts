// What the heads and cells of the tree show beside a pinned pass.
import { afterEach, beforeEach, expect, it } from "vitest";
import { STATISTICS } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { SITES, cell, frame } from "../helpers/messages";
import { startView, type TestView } from "../helpers/view";

let { stream, find, all, end } = {} as TestView;
beforeEach(async () => void ({ stream, find, all, end } = await startView()));
afterEach(() => end());

it("says what a column shows beside a pinned pass, and blanks nothing that exists", async () => {
  const finite = (table: Float64Array): void => {
    for (let i = 0; i < SITES.length; i++) for (const name of ["nan", "posinf", "neginf"] as const) table[cell(i, 1, name)] = 0;
  };
  const blank = (table: Float64Array, sites: readonly number[]): void => {
    finite(table);
    for (const i of sites) for (const name of STATISTICS) table[cell(i, 1, name)] = NaN;
  };
  const head = (): string | null | undefined => find("nni-sort-gradient")?.textContent;
  const cells = (): (string | null)[] => all("nni-cell-gradient").map((cell) => cell.textContent);
  stream.emit(...frame(2, { edit: (table) => blank(table, [0, 1, 2, 3, 4]) }));
  await settle();
  find("nni-pin")!.click();
  stream.emit(...frame(3, { value: 2, edit: finite }));
  await settle();
  expect([head(), ...cells()]).toEqual(["‖gradient‖", ...SITES.map(() => "2")]);
  expect(find("nni-sort-gradient")?.title).toBe("Sort by: Gradient norm, in this pass (step 2, pinned, has none)");
  find("nni-pin")!.click();
  stream.emit(...frame(4, { value: 2, edit: (table) => blank(table, [1]) }));
  await settle();
  find("nni-pin")!.click();
  stream.emit(...frame(5, { value: 3, edit: (table) => blank(table, [2]) }));
  await settle();
  expect([head(), ...cells()]).toEqual(["× ‖gradient‖", "×1.50", "3", "–", "×1.50", "×1.50"]);
  expect(find("nni-sort-gradient")?.title).toBe("Sort by: Gradient norm, as a multiple of that in step 4 (pinned)");
  expect(all("nni-cell-gradient").map((cell) => cell.title)).toEqual([
    "3 now, 2 in step 4 (pinned)", "3 now, – in step 4 (pinned): the figure by itself", "",
    ...Array.from({ length: 2 }, () => "3 now, 2 in step 4 (pinned)"),
  ]); // prettier-ignore
  find("nni-pin")!.click();
  await settle();
  expect([head(), cells()[0]]).toEqual(["‖gradient‖", "3"]);
  expect(find("nni-figures")?.textContent).toContain("step 5");
});

it("keeps the element of a row while rows above it come and go, so that no click on it is lost", async () => {
  const element = (): HTMLElement => all("nni-row").find((row) => row.dataset["site"] === "head")!;
  const [pressed, place] = [element(), element().style.top];
  find("nni-tree")!.querySelector<HTMLElement>("[data-site=blocks] .nni-twist")!.click(); // closes it
  await settle();
  expect([element(), element().style.top === place]).toEqual([pressed, false]);
  pressed.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("head");
});

it("says NaN in place of a gradient's norm where values are not finite, and shows the search in the head", async () => {
  stream.emit(...frame(2, { value: 2 }));
  await settle();
  expect(all("nni-cell-gradient").map((cell) => [cell.textContent, cell.dataset["value"]])).toEqual(SITES.map(() => ["NaN", "2"]));
  expect(all("nni-cell-gradient")[0]!.className).toContain("nni-bad");
  expect(find("nni-search")!.closest("[role=columnheader]")).not.toBeNull();
});

it("says the figures of the row under the pointer in the foot, in place of the line of Python", async () => {
  const row = all("nni-row")[4]!;
  row.dispatchEvent(new PointerEvent("pointerenter"));
  await settle();
  expect(find("nni-tip")?.dataset["site"]).toBe("head");
  expect(find("nni-tip")?.textContent).toContain("activation");
  find("nni-tree")!.dispatchEvent(new PointerEvent("pointerleave"));
  await settle();
  expect(find("nni-tip")).toBeNull();
});
