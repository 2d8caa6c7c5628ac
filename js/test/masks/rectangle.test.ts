// A mask that is drawn on a picture: where it may lie, and its rectangles.
import { afterEach, beforeEach, expect, it } from "vitest";
import type { Arrays } from "../../src/kernel/protocol";
import { VERSION } from "../../src/kernel/protocol";
import { fillRectangle, maskedAxes } from "../../src/masks/rectangle";
import { toHex } from "../../src/masks/requests";
import { settle } from "../helpers/kernel";
import { perturbation, state } from "../helpers/messages";
import { press, startView, type TestView, openTab } from "../helpers/view";

it("lies over two axes that follow each other and hold no examples", () => {
  const [axes, shape] = [["batch", "height", "width", "channel"], [2, 4, 6, 3]];
  expect(maskedAxes(axes, shape, 1, 2)).toEqual({ units: 24, axis: -3, columns: 6 });
  expect(maskedAxes(axes, shape, 2, 3)).toEqual({ units: 18, axis: -2, columns: 3 });
  for (const [rows, columns] of [[0, 1], [2, 1], [1, 3], [-1, 0]] as const) expect(maskedAxes(axes, shape, rows, columns)).toBeNull();
  expect(maskedAxes(axes, [2, 129, 128, 3], 1, 2), "more than the kernel takes").toBeNull();
});

it("is switched in rectangles, whichever corner they begin at", () => {
  const off = fillRectangle(new Uint8Array(12).fill(1), 4, [2, 3], [1, 2], 0);
  expect([...off]).toEqual([1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0]);
  expect([...fillRectangle(off, 4, [1, 0], [1, 3], 1)]).toEqual([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
});

let { control, stream, find, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, find, end } = await startView()));
afterEach(() => end());

const maps: Arrays = {
  type: "arrays", version: VERSION, request: 1, site: "blocks/0", part: "output", clean: false, parts: ["output", "input"], perturbed: false,
  source: "The example.", notes: [],
  arrays: [{ number: 1, call: 0, name: "", shape: [2, 2, 4, 3], dtype: "float32", axes: ["batch", "height", "width", "channel"], bytes: 192 }],
}; // prettier-ignore

it("switches the place under the crosshair, and only once that was asked for", async () => {
  await openTab(find, "values");
  await settle();
  stream.emit(maps);
  await settle();
  const type = async (key: string): Promise<void> => {
    press(find("nni-picture")!, key);
    await settle();
  };
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", " "]) await type(key);
  expect(control.of("set_mask"), "it does not edit yet").toEqual([]);
  find("nni-more")!.click();
  await settle();
  find("nni-edit-mask")!.click();
  await settle();
  await type(" ");
  const mask = toHex(Uint8Array.from([1, 1, 1, 1, 1, 0, 1, 1]));
  expect(control.of("set_mask")).toMatchObject([{ perturbation: null, site: "blocks/0", units: 8, axis: -3, columns: 4, mask }]);
  expect(find("nni-units-off")?.dataset["value"]).toBe("1");
  control.emit({ type: "reply", id: control.of("set_mask")[0]["id"], ok: true, error: "" });
  const one = perturbation(3, "blocks/0", { kind: "Mask", units: 8, units_off: 1, axis: -3, columns: 4, mask });
  stream.emit(state({ perturbations: [one] }));
  await settle();
  await type(" ");
  expect(control.of("set_mask")[1]).toMatchObject({ perturbation: 3, mask: "ff" });
  await openTab(find, "overview");
  await settle();
  find("nni-units")!.querySelector("button")!.click();
  await settle();
  expect(find("nni-picture"), "its row leads to the picture").not.toBeNull();
});
