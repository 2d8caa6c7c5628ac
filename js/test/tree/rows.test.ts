// Rows, search and keys of the tree, without a page.
import { describe, expect, it } from "vitest";
import type { Site } from "../../src/kernel/protocol";
import { ancestors, indexSites, type Sites } from "../../src/kernel/sites";
import { keyAction } from "../../src/tree/keyboard";
import { parseQuery } from "../../src/tree/search";
import { ROW_HEIGHT } from "../../src/frame/layout";
import { initiallyOpen, scrollTo, visibleRows, rowsInView } from "../../src/tree/visible";
import { SITES, layout, site } from "../helpers/messages";

const sites = indexSites(layout());
const matching = (of: Sites, query: string): Set<number> =>
  new Set(of.list.flatMap((site, i) => (parseQuery(query)!(site) ? [i] : [])));
const all = new Set(SITES.map((s) => s.key));

describe("rows", () => {
  it("are the tree from the top, closed parts left out", () => {
    expect(visibleRows(sites, all, null)).toEqual([0, 1, 2, 3, 4]);
    expect(visibleRows(sites, new Set([""]), null)).toEqual([0, 1, 4]);
    expect(visibleRows(sites, new Set(), null)).toEqual([0]);
  });

  it("of a search are the matches and what leads to them, open or not", () => {
    expect(visibleRows(sites, new Set(), matching(sites, "dropout"))).toEqual([0, 1, 3]);
    expect(visibleRows(sites, new Set(), matching(sites, "BLOCKS/0"))).toEqual([0, 1, 2]);
    expect(visibleRows(sites, new Set(), matching(sites, "blocks linear"))).toEqual([0, 1, 2]);
    expect(visibleRows(sites, new Set(), matching(sites, "nothing"))).toEqual([]);
  });

  it("know what is above them", () => {
    expect(ancestors(sites, 3)).toEqual(["blocks", ""]);
  });

  it("of optimizers are closed at first", () => {
    const of = indexSites(layout([site("", -1), site("head", 0), { ...site("optimizer", 0), kind: "optimizer" }, site("optimizer/mu", 2)]));
    expect(visibleRows(of, initiallyOpen(of), null)).toEqual([0, 1, 2]);
  });

  it("of a big model open as far as stays readable", () => {
    const many: Site[] = [site("", -1)];
    for (let i = 0; i < 1000; i++) {
      const at = many.push(site(`b/${i}`, 0)) - 1;
      for (let k = 0; k < 9; k++) many.push(site(`b/${i}/${k}`, at));
    }
    const big = indexSites(layout(many));
    const open = initiallyOpen(big);
    expect(visibleRows(big, open, null)).toHaveLength(1001);
    expect(visibleRows(big, new Set(many.map((s) => s.key)), null)).toHaveLength(10_001);
    expect(visibleRows(big, open, matching(big, "b/999/8"))).toHaveLength(3);
  });

  it("in view are few", () => {
    const [first, end] = rowsInView(5000 * ROW_HEIGHT, 400, 10_000);
    expect(first).toBeLessThanOrEqual(5000);
    expect(end).toBeGreaterThan(5016);
    expect(end - first).toBeLessThan(40);
    expect(rowsInView(1e6, 400, 3)).toEqual([3, 3]);
    expect(scrollTo(0, 100, 400)).toBe(0);
    expect(scrollTo(10, 0, 400)).toBe(0);
    expect(scrollTo(20, 0, 400)).toBe(21 * ROW_HEIGHT - 400);
  });
});

describe("keys", () => {
  const rows = visibleRows(sites, all, null);
  const act = (key: string, at: number, open: ReadonlySet<string> = all) => keyAction(key, sites, visibleRows(sites, open, null), open, at);
  it.each([
    ["ArrowDown", 1, { do: "go", index: 2 }],
    ["ArrowDown", 4, { do: "go", index: 4 }],
    ["ArrowUp", 2, { do: "go", index: 1 }],
    ["ArrowUp", 0, { do: "go", index: 0 }],
    ["Home", 3, { do: "go", index: 0 }],
    ["End", 0, { do: "go", index: 4 }],
    ["ArrowRight", 1, { do: "go", index: 2 }],
    ["ArrowLeft", 1, { do: "close", index: 1 }],
    ["ArrowLeft", 2, { do: "go", index: 1 }],
    ["Enter", 1, { do: "close", index: 1 }],
    [" ", 2, { do: "toggle", index: 2 }],
    ["*", 2, { do: "openAll" }],
    ["ArrowRight", 2, null],
    ["x", 2, null],
  ])("%s on row %i", (key, at, action) => expect(act(key, at)).toEqual(action));

  it("open what is closed", () => {
    expect(act("ArrowRight", 1, new Set([""]))).toEqual({ do: "open", index: 1 });
    expect(act("Enter", 1, new Set([""]))).toEqual({ do: "open", index: 1 });
  });

  it("start at the top when nothing is selected", () => {
    expect(keyAction("ArrowDown", sites, rows, all, -1)).toEqual({ do: "go", index: 0 });
    expect(keyAction(" ", sites, rows, all, -1)).toBeNull();
  });
});
