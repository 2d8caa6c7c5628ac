// The panel "Units": masks are edited only once that was asked for.
import { afterEach, beforeEach, expect, it } from "vitest";
import { settle } from "../helpers/kernel";
import { perturbation, state, units } from "../helpers/messages";
import { press, startView, type TestView, openTab } from "../helpers/view";

let { control, stream, find, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, find, end } = await startView()));
afterEach(() => end());

it("edits a mask by the keyboard, only once that was asked for", async () => {
  await openTab(find, "units");
  await settle();
  expect(control.of("look").at(-1)).toMatchObject({ what: "units", site: "blocks/0" });
  stream.emit(...units(10));
  await settle();
  expect([find("nni-strip")?.dataset["value"], find("nni-dead-units")?.dataset["value"]]).toEqual(["10", "1"]);
  const strip = find("nni-strip")!;
  const type = async (key: string, more = {}): Promise<void> => {
    press(strip, key, more);
    await settle();
  };
  strip.focus();
  await settle();
  for (const key of ["ArrowRight", "ArrowRight", " "]) await type(key);
  expect(find("nni-unit-pointed")?.dataset["value"]).toBe("2");
  expect(control.of("set_mask"), "it does not edit yet").toHaveLength(0);
  find("nni-edit-mask")!.click();
  await settle();
  strip.focus();
  await type("Home");
  await type(" ");
  expect(control.of("set_mask")).toMatchObject([{ perturbation: null, site: "blocks/0", units: 10, mask: "7fc0" }]);
  expect(find("nni-units-off")?.dataset["value"]).toBe("1");
  control.emit({ type: "reply", id: control.of("set_mask")[0]["id"], ok: true, error: "" });
  stream.emit(state({ perturbations: [perturbation(7, "blocks/0", { kind: "Mask", units: 10, units_off: 1, mask: "7fc0" })] }));
  await settle();
  await type("ArrowRight", { shiftKey: true });
  await type("ArrowRight");
  expect(control.of("set_mask")[1], "shift takes the next one along").toMatchObject({ perturbation: 7, mask: "3fc0" });
});

it("opens the strip from the row of a mask", async () => {
  stream.emit(state({ perturbations: [perturbation(7, "head", { kind: "Mask", units: 10, units_off: 1, mask: "7fc0" })] }));
  await settle();
  find("nni-units")!.querySelector("button")!.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("head");
  expect(find("nni-edit-mask")?.getAttribute("aria-pressed") ?? "waits").toBe("waits");
  stream.emit(...units(10, "head"));
  await settle();
  expect(find("nni-edit-mask")?.getAttribute("aria-pressed")).toBe("true");
});
