// The operations within a call, shown and hidden by a button of the detail, over a mock comm.
import { afterEach, expect, it } from "vitest";
import { isOperation } from "../../src/kernel/sites";
import { settle } from "../helpers/kernel";
import { SITES, layout, site } from "../helpers/messages";
import { openMenu, startView, type TestView } from "../helpers/view";

let view: TestView;
afterEach(() => view?.end());

it("tells an operation by an @ that is not escaped", () => {
  expect(["attn@softmax", "@mul[1]", "a\\\\@b"].map(isOperation)).toEqual([true, true, true]);
  expect(["attn", "", "a\\@b"].map(isOperation)).toEqual([false, false, false]);
});

it("shows operations below their call, and hides them, as the kernel says", async () => {
  view = await startView({ selected: "blocks/0" });
  await openMenu(view.find, "nni-site-menu");
  const button = (): HTMLButtonElement => view.find("nni-operations") as HTMLButtonElement;
  const asked = () => view.control.of("show_operations").map(({ site, shown }) => ({ site, shown }));
  const last = () => view.control.of("show_operations").at(-1)!.id as number;
  expect(button().getAttribute("aria-pressed")).toBe("false");
  button().click();
  await settle();
  expect(asked()).toEqual([{ site: "blocks/0", shown: true }]);
  expect(button().disabled).toBe(true);

  const at = SITES.findIndex((s) => s.key === "blocks/0");
  const inside = site("blocks/0@mul", at);
  view.stream.emit(layout([...SITES, inside], 2));
  view.control.emit({ type: "reply", id: last(), ok: true, error: "" });
  await settle();
  expect(view.all("nni-row").map((row) => row.dataset.site)).toContain("blocks/0@mul");
  expect(button().getAttribute("aria-pressed")).toBe("true");
  button().click();
  await settle();
  expect(asked().at(-1)).toEqual({ site: "blocks/0", shown: false });
  view.control.emit({ type: "reply", id: last(), ok: false, error: "It is perturbed." });
  await settle();
  expect(view.el.textContent).toContain("Could not hide the operations of blocks/0: It is perturbed.");
});
