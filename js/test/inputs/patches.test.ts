// Where a place of a map or a patch lies on its picture.
import { expect, it } from "vitest";
import { placeOnPicture } from "../../src/inputs/patches";
import type { Pictures } from "../../src/kernel/protocol";

const pictures: Pictures = { path: "x", count: 1, rows: 32, columns: 16, height: 2, width: 1, channels: 1, shown: "0 … 1", pixels: btoa("\x00\x10") };

it("marks a place of a feature map", () => {
  expect(placeOnPicture([1, 3], [2, 4], pictures)).toEqual([0.5, 1, 0.75, 1]);
});

it("marks the patch of a position, after the tokens that have none", () => {
  // 8 x 4 patches of 4 x 4 pixels behind a class token: patch 13 is in row 3, column 1
  expect(placeOnPicture([1 + 13], [33], pictures)).toEqual([3 / 8, 4 / 8, 1 / 4, 2 / 4]);
  expect(placeOnPicture([13], [32], pictures)).toEqual([3 / 8, 4 / 8, 1 / 4, 2 / 4]);
  expect(placeOnPicture([0], [33], pictures)).toBeNull();
});

it("marks nothing of a place that is none in the picture", () => {
  expect(placeOnPicture([3], [7], pictures)).toBeNull();
  expect(placeOnPicture([3], [32], null)).toBeNull();
  expect(placeOnPicture([], [], pictures)).toBeNull();
  expect(placeOnPicture([1, 2, 3], [4, 4, 4], pictures)).toBeNull();
});
