// The rows of the arrays that a call returns, and what is shown of one of them, over a mock comm.
import { afterEach, expect, it } from "vitest";
import { settle } from "../helpers/kernel";
import { SITES, layout, site } from "../helpers/messages";
import { openMenu, startView, type TestView } from "../helpers/view";

let view: TestView;
afterEach(() => view?.end());

it("shows statistics of one array alone, and acts on the whole call only", async () => {
  view = await startView({ selected: "head" });
  await openMenu(view.find, "nni-tree-menu");
  view.find("nni-column-shape")!.click();
  const at = SITES.findIndex((s) => s.key === "head");
  const whole = { ...SITES[at]!, array: "0", output: "(float32[2], int32[2])" };
  const one = site("head(1)", at, { name: "(1)", kind: "array", array: "1", single: true, output: "int32[2]", perturbable: false });
  view.stream.emit(layout([...SITES.slice(0, at), whole, one], 2));
  await settle();
  const row = (key: string) => view.all("nni-row").find((found) => found.dataset["site"] === key)!;
  row("head").dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  await settle();
  expect(row("head(1)").textContent).toContain("(1)");
  expect(row("head(1)").textContent).toContain("i32[2]");
  const detail = () => view.find("nni-detail")!.textContent!;
  row("head").click();
  await settle();
  await openMenu(view.find, "nni-site-menu");
  expect(detail()).toContain("statistics of(0)");
  expect(view.find("nni-tab-values")).not.toBeNull();
  row("head(1)").click();
  await settle();
  expect(view.find("nni-selected")!.dataset["value"]).toBe("head(1)");
  await openMenu(view.find, "nni-site-menu");
  expect(detail()).toContain("array(1)");
  expect(detail()).toContain("typeint32[2]");
  expect(view.find("nni-perturb")?.title).toContain("A perturbation acts on every array of the call");
  expect(view.find("nni-tab-values")).toBeNull();
  expect(view.find("nni-operations")).toBeNull();
});

it("says which positions the figures of a site count", async () => {
  view = await startView({ selected: "head" });
  const sites = SITES.map((s) => ({ ...s, counted: s.key === "head" }));
  view.stream.emit({ ...layout(sites, 2), where: "tokens != 0" });
  await settle();
  await openMenu(view.find, "nni-site-menu");
  const said = "counts only positions where tokens != 0";
  expect(view.find("nni-detail")!.textContent!.split(said).length).toBe(3); // in its line, and in the menu
  expect(view.find("nni-detail")!.textContent).toContain(" of the example" + said); // not of how many were counted
  view.stream.emit({ ...layout(SITES, 3), where: "tokens != 0" });
  await settle();
  expect(view.find("nni-detail")!.textContent).not.toContain("counts only");
});
