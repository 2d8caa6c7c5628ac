// The keys of sites: layers, operations, and the row that shows a site.
import { expect, it } from "vitest";
import { rowOf, withoutLayers, type Sites } from "../../src/kernel/sites";

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

it("finds the row of a layer, of its own or of its stack", () => {
  const sites = { byKey: new Map([["blocks", 0], ["blocks[1]", 1], ["blocks@softmax", 2]]) } as unknown as Sites;
  expect(["blocks[1]", "blocks[2]", "blocks[2]@softmax", "other[1]"].map((key) => rowOf(sites, key))).toEqual(["blocks[1]", "blocks", "blocks@softmax", undefined]);
});
