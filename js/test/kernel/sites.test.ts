// The keys of sites: layers, operations, and the row that shows a site.
import { expect, it } from "vitest";
import { rowKey, withoutArray, withoutLayers, type Sites } from "../../src/kernel/sites";

it.each([
  ["blocks", "blocks"],
  ["blocks[3]", "blocks"],
  ["blocks[3][1]/up[2]", "blocks/up"],
  ["blocks[3]@softmax", "blocks@softmax"],
  ["blocks[3]@mul[1]", "blocks@mul[1]"],
  ["blocks[-1]:encode@mul[1]", "blocks:encode@mul[1]"],
  ["odd\\[3]/a\\@b[1]", "odd\\[3]/a\\@b"],
])("takes the layers off %s", (key, wanted) => {
  expect(withoutLayers(key)).toBe(wanted);
});

it.each([
  ["head(aux)", "head"],
  ["(0.1)", ""],
  ["blocks[3]@sort(1)", "blocks[3]@sort"],
  ["a\\(b\\)(c\\)d)", "a\\(b\\)"],
  ["a\\(b\\)", "a\\(b\\)"],
  ["head", "head"],
])("takes the name of an array off %s", (key, wanted) => {
  expect(withoutArray(key)).toBe(wanted);
});

it("finds the row of an array, of its own or of the whole", () => {
  const sites = { byKey: new Map([["", 0], ["blocks", 1], ["blocks(1)", 2]]) } as unknown as Sites;
  expect(["blocks(1)", "blocks[4](1)", "blocks(2)", "(x)", "other(1)"].map((key) => rowKey(sites, key))).toEqual(["blocks(1)", "blocks(1)", "blocks", "", undefined]);
});

it("finds the row of a layer, of its own or of its stack", () => {
  const sites = { byKey: new Map([["blocks", 0], ["blocks[1]", 1], ["blocks@softmax", 2]]) } as unknown as Sites;
  expect(["blocks[1]", "blocks[2]", "blocks[2]@softmax", "other[1]"].map((key) => rowKey(sites, key))).toEqual(["blocks[1]", "blocks", "blocks@softmax", undefined]);
});
