// Search, filters, sorting and columns of the tree, on messages as they arrive.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { STATISTICS } from "../../src/kernel/protocol";
import { indexSites } from "../../src/kernel/sites";
import { Store } from "../../src/store";
import { COLUMNS, columnGrid } from "../../src/tree/columns";
import { parseQuery } from "../../src/tree/search";
import type { Layout } from "../../src/frame/layout";
import { cell, effect, frame, layout, perturbation, site, state } from "../helpers/messages";

const LIST = [
  site("", -1, { name: "Net", kind: "Net" }),
  site("blocks", 0, { kind: "Block", output: "float32[8,64]", stacked: 2 }),
  site("blocks/conv", 1, { kind: "Conv", output: "float32[8,4,4,64]" }),
  site("head", 0, { kind: "Linear", output: "bfloat16[8,10]", aliases: ["tail"] }),
  site("blocks[0]", 1, { name: "[0]", kind: "Block", layer: 0 }),
  site("blocks[1]", 1, { name: "[1]", kind: "Block", layer: 1, output: "float32[]" }),
];
const keys = (query: string): string[] => LIST.filter(parseQuery(query)!).map((s) => s.key);

describe("a search", () => {
  it.each([
    ["conv", ["blocks/conv"]],
    ["BLOCK", ["blocks", "blocks/conv", "blocks[0]", "blocks[1]"]],
    ["block conv", ["blocks/conv"]],
    ["tail", ["head"]],
    ["blocks[1]", ["blocks[1]"]],
    ["float32[*,64]", ["blocks"]],
    ["f32[**,64]", ["blocks", "blocks/conv"]],
    ["f32[...,64]", ["blocks", "blocks/conv"]],
    ["[8,10]", ["head"]],
    ["bf16[*,*]", ["head"]],
    ["float32[]", ["blocks[1]"]],
    ["blocks/*", ["blocks/conv"]],
    ["**/conv", ["blocks/conv"]],
    ["**", LIST.map((s) => s.key)],
    ["*", ["blocks", "head", "blocks[0]", "blocks[1]"]],
    ["blocks[*]", ["blocks[0]", "blocks[1]"]],
    ["(.+)*", []],
  ])("for %s", (query, found) => expect(keys(query)).toEqual(found));

  it("for nothing is none", () => expect(parseQuery("  ")).toBeNull());
});

let store: Store;

function show(seq: number, edit: (table: Float64Array) => unknown): void {
  store.receive(...frame(seq, { sites: LIST.length, edit }));
  vi.advanceTimersByTime(1100); // drawn, and the rows in order again
}
const rows = (): string[] => store.tree.rows.value.map((i) => LIST[i].key);

beforeEach(() => {
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "requestAnimationFrame", "performance"] });
  store = new Store({ ack: () => undefined, ask: () => 0 });
  store.receive(layout(LIST), undefined);
  store.receive(state({ perturbations: [perturbation(1, "head")] }), undefined);
  show(1, (table) => {
    LIST.forEach((_, i) => (table[cell(i, 1, "norm")] = 10 ** -i));
    table[cell(3, 1, "norm")] = NaN;
    table[cell(2, 0, "nan")] = 5;
    for (const name of ["nan", "posinf", "neginf"] as const) for (const i of [0, 1, 3, 4, 5]) for (const q of [0, 1]) table[cell(i, q, name)] = 0;
    table[cell(5, 0, "zeros")] = 99;
    table[cell(5, 0, "size")] = 100;
    for (const i of [0, 1, 2, 4]) table[cell(i, 0, "zeros")] = 0;
    for (const name of STATISTICS) table[cell(3, 0, name)] = NaN;
  });
});
afterEach(() => {
  store.close();
  vi.useRealTimers();
});

describe("sorting", () => {
  it("goes falling, rising, and back to the tree; what is not measured is last", () => {
    store.tree.sortBy("gradient");
    expect(rows()).toEqual(["", "blocks", "blocks/conv", "blocks[0]", "blocks[1]", "head"]);
    store.tree.sortBy("gradient");
    expect(rows()).toEqual(["blocks[1]", "blocks[0]", "blocks/conv", "blocks", "", "head"]);
    store.tree.sortBy("gradient");
    expect(rows()).toEqual(["", "blocks", "blocks/conv", "blocks[0]", "blocks[1]", "head"]);
    expect(store.tree.sort.value).toBeNull();
  });

  it("of texts begins with A, and of the path too", () => {
    store.tree.sortBy("type");
    expect(rows().at(0)).toBe("blocks");
    expect(rows().at(-1)).toBe("");
    store.tree.sortBy("name");
    store.tree.sortBy("name");
    expect(rows()[0]).toBe("head");
  });

  it("against a pinned pass goes by the ratio", () => {
    store.timeline.pin();
    show(2, (table) => LIST.forEach((_, i) => (table[cell(i, 1, "norm")] = 1)));
    store.tree.sortBy("gradient");
    expect(rows()).toEqual(["blocks[1]", "blocks[0]", "blocks/conv", "blocks", "", "head"]);
  });

  it("against a pinned pass without gradients goes by the gradients themselves", () => {
    const gradient = COLUMNS.find((column) => column.id === "gradient")!;
    show(2, (table) => LIST.forEach((_, i) => STATISTICS.forEach((name) => (table[cell(i, 1, name)] = NaN))));
    store.timeline.pin();
    show(3, (table) => LIST.forEach((_, i) => (table[cell(i, 1, "norm")] = i)));
    expect(store.tree.compares(gradient)).toBe(false);
    expect(store.tree.compares(COLUMNS.find((column) => column.id === "std")!)).toBe(true);
    store.tree.sortBy("gradient");
    expect(rows()[0]).toBe(LIST.at(-1)!.key);
    store.timeline.unpin();
    expect(store.tree.compares(gradient)).toBe(false);
  });

  it("of a running loop moves rows once a second", () => {
    store.tree.sortBy("gradient");
    const rising = (table: Float64Array): unknown => LIST.forEach((_, i) => (table[cell(i, 1, "norm")] = i));
    store.receive(...frame(2, { sites: LIST.length, edit: rising }));
    vi.advanceTimersByTime(40); // the last time is more than a second ago
    expect(rows()[0]).toBe("blocks[1]");
    store.receive(...frame(3, { sites: LIST.length, edit: (t) => LIST.forEach((_, i) => (t[cell(i, 1, "norm")] = -i)) }));
    vi.advanceTimersByTime(40);
    expect(store.frame.value?.header.seq).toBe(3);
    expect(rows()[0]).toBe("blocks[1]");
    vi.advanceTimersByTime(1100);
    expect(rows()[0]).toBe("");
  });
});

describe("a filter", () => {
  const matching = (): string[] => [...store.tree.matches.value!].map((i) => LIST[i].key);
  it.each([
    ["nonfinite", ["blocks/conv"]],
    ["perturbed", ["head"]],
    ["unmeasured", ["head"]],
    ["dead", ["blocks[1]"]],
  ] as const)("%s", (filter, found) => {
    store.tree.filter(filter, true);
    expect(matching()).toEqual(found);
    expect(store.tree.matched.value).toBe(found.length);
    store.tree.clear();
    expect(store.tree.matches.value).toBeNull();
    expect(store.tree.matched.value).toBe(LIST.length);
  });

  it("by gradient norm has a bound of its own, and leaves out what has none", () => {
    store.tree.filter("below", true);
    store.tree.below.value = 1e-3;
    expect(matching()).toEqual(["blocks[0]", "blocks[1]"]);
    store.tree.filter("below", false);
    store.tree.filter("above", true);
    store.tree.above.value = 0.05;
    expect(matching()).toEqual(["", "blocks"]);
  });

  it("in the tree shows what leads to its matches", () => {
    store.tree.filter("nonfinite", true);
    expect(rows()).toEqual(["", "blocks", "blocks/conv"]);
    store.tree.sortBy("gradient");
    expect(rows()).toEqual(["blocks/conv"]);
  });

  it("and a search hold together", () => {
    store.tree.filter("dead", true);
    store.tree.query.value = "conv";
    expect(matching()).toEqual([]);
  });
});

describe("the layers of a stack", () => {
  it("are open at first where they are few, and closed where they are many", () => {
    expect(store.tree.open.value.has("blocks")).toBe(true);
    const many = [site("", -1), site("a", 0, { stacked: 96 }), ...Array.from({ length: 96 }, (_, i) => site(`a[${i}]`, 1, { layer: i }))];
    const other = new Store({ ack: () => undefined, ask: () => 0 });
    other.receive(layout(many), undefined);
    expect([...other.tree.open.value]).toEqual([""]);
    expect(indexSites(layout(many)).children[1]).toHaveLength(96);
    other.close();
  });
});

it("columns of text are as wide as their longest text needs, within bounds", () => {
  const columns = COLUMNS.filter(({ id }) => id === "shape" || id === "spark");
  const widths = (output: string): unknown[] => {
    const { grid, least } = columnGrid(columns, [site("", -1, { output: "f32[2]" }), site("attention_norm", 0, { output })]);
    return [grid.replace(/.*1fr\) /, ""), least];
  };
  expect(widths("f32[2,2]")).toEqual(["minmax(54px, 54px) 72px", 274]);
  expect(widths("float32[64,8,8,24]")).toEqual(["minmax(94px, 94px) 72px", 314]);
  expect(widths("f32[2,2]".repeat(9))).toEqual(["minmax(94px, 160px) 72px", 314]);
});

it("the column of names leaves to the others what the longest name does not need", () => {
  const widths = (name: string): unknown[] => {
    const { grid, least } = columnGrid([], [site("", -1), site(name, 0)]);
    return [Number(/min\((\d+)px/.exec(grid)![1]), least];
  };
  expect(widths("conv")).toEqual([12 + 28 + 75, 132]);
  expect(widths("attention_norm")).toEqual([12 + 98 + 75, 132]);
});

it("columns that are hidden do not sort", () => {
  store.tree.sortBy("gradient");
  store.tree.choose("gradient", false);
  expect(store.tree.sort.value).toBeNull();
  const columns = (layout: Layout): string[] => store.tree.columnsFor(layout).map((c) => c.id);
  expect(columns("medium")).toEqual(["type", "shape", "spark", "moved"]);
  store.tree.choose("std", true);
  expect(columns("medium")).toEqual(["type", "shape", "spark", "std", "moved"]);
});

it("columns follow the width, what is perturbed, and what was chosen", () => {
  const columns = (layout: Layout): string => store.tree.columnsFor(layout).map((c) => c.id).join(" "); // prettier-ignore
  expect(columns("narrow")).toBe("spark gradient moved");
  store.receive(state(), undefined); // nothing is perturbed any more
  expect(columns("narrow"), "no update was seen yet").toBe("spark gradient");
  store.receive(...frame(2, { sites: LIST.length, update: 0.25 }));
  vi.advanceTimersByTime(1100);
  show(3, () => undefined); // one without: the columns stay
  expect((["narrow", "medium", "side", "wide"] as const).map(columns)).toEqual(["spark gradient update", "type shape spark gradient update", "spark gradient update", "shape spark gradient update"]);
  store.tree.choose("type", true);
  store.tree.choose("spark", false);
  expect((["narrow", "wide"] as const).map(columns)).toEqual(["type gradient update", "type shape gradient update"]);
});

it("the time of a step has a column once it was profiled; other costs are chosen, and sorted by", () => {
  const columns = (): string[] => store.tree.columnsFor("narrow").map((c) => c.id);
  expect(columns()).not.toContain("ms");
  const cost = (at: number, step_ms: number, kept_bytes: number | null): void => void (sites[at] = { ...sites[at], step_ms, kept_bytes, of_possible: 0.5 });
  const sites = [...LIST];
  cost(1, 1.25, 4096);
  cost(3, 2.5, null);
  store.receive(layout(sites, 2), undefined);
  expect(columns()).toContain("ms");
  store.tree.sortBy("ms");
  expect(rows().slice(0, 2)).toEqual(["head", "blocks"]);
  const shown = ["ms", "kept", "possible"].map((id) => {
    const column = COLUMNS.find((c) => c.id === id)!;
    return sites.slice(1, 4).map((one) => column.show!(column.value!(one, null, 0, new Map())));
  });
  expect(shown).toEqual([["1.250", "–", "2.500"], ["4.1\u202fk", "–", "–"], ["50\u202f%", "–", "50\u202f%"]]);
});

it("a site has moved as far as the effect says, and one that it does not name has no figure", () => {
  const moved = { blocks: 0.25, head: null };
  store.receive(state({ perturbations: [perturbation(1, "head")], effect: effect({ moved }) }), undefined);
  store.tree.sortBy("moved");
  expect(rows()).toEqual(["head", "blocks", "", "blocks/conv", "blocks[0]", "blocks[1]"]);
});
