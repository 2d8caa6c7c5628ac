// The panel of a module as NNX sees it: what it asks, when, and what of the answer is on screen.
import { afterEach, beforeEach, expect, it } from "vitest";
import { settle } from "../helpers/kernel";
import { startView, type TestView, openTab } from "../helpers/view";
import { mode, node, page, variable } from "../helpers/nnx";

let { control, stream, find, all, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, find, all, end } = await startView()));
afterEach(() => end());

async function open(answer = {}): Promise<void> {
  await openTab(find, "nnx");
  await settle();
  const { id, site } = control.of("show_nnx").at(-1) as unknown as { id: number; site: string };
  stream.emit(page(site, { id, ...answer }));
  control.emit({ type: "reply", id, ok: true, error: "" });
  await settle();
}

it("asks for nothing until it is shown", async () => {
  expect(control.of("show_nnx")).toEqual([]);
  await open();
  expect(control.of("show_nnx").map((m) => m["site"])).toEqual(["blocks/0"]);
  expect(find("nni-nnx")!.dataset["value"]).toBe("blocks/0");
});

it("shows structure, state, types and what moved, with every digit", async () => {
  await open({
    nodes: [node("blocks/0", { attributes: [{ name: "features", text: "8" }], attributes_total: 3 })],
    nodes_total: 9,
    variables: [
      variable("blocks/0/kernel", { change: { same: false, distance: 0.5, relative: 0.123456789, before: "", after: "" } }),
      variable("blocks/0/count", { type: "RngCount", value: "4", change: { same: false, distance: 1, relative: 1 / 3, before: "3", after: "4" } }),
      variable("blocks/0/mean", { type: "BatchStat", change: { same: true, distance: 0, relative: 0, before: "", after: "" } }),
      variable("blocks/0/bias", { held: "deleted" }),
    ],
    variables_total: 1000,
    step: 20,
    since: 10,
  });
  expect(find("nni-nnx-node")!.textContent).toContain("features=8");
  expect(find("nni-nnx-node")!.textContent).toContain("2 more");
  const [kernel, counter, mean, bias] = all("nni-nnx-variable");
  expect(kernel.dataset["value"]).toBe("0.123456789");
  expect(kernel.textContent).toContain("f32[2,3]");
  expect(kernel.textContent).toContain("12.3");
  expect(counter.textContent).toContain("3 → 4");
  expect(mean.textContent).toContain("same");
  expect(bias.textContent).toContain("donated");
  expect(bias.textContent).toContain("–");
  expect(find("nni-nnx")!.textContent).toContain("996 more Variables are not shown");
  expect(find("nni-nnx")!.textContent).toContain("8 more nodes are not shown");
  expect(find("nni-nnx-since")!.textContent).toContain("from step 10 to step 20");
  expect(find("nni-nnx-kind")!.textContent).toContain("Param");
});

it("lights up all paths of one object together", async () => {
  await open({ variables: [variable("blocks/0/a", { reference: 2 }), variable("blocks/0/b", { reference: 2, first: "blocks/0/a" }), variable("blocks/0/c")] });
  const marked = (): boolean[] => all("nni-nnx-variable").map((row) => row.className.includes("nni-marked"));
  expect(marked()).toEqual([false, false, false]);
  const sign = all("nni-nnx-variable")[1].querySelector<HTMLElement>(".nni-reference")!;
  expect(sign.getAttribute("aria-label")).toContain("Reference 2");
  sign.focus();
  await settle();
  expect(marked()).toEqual([true, true, false]);
});

it("goes to a Variable's module", async () => {
  await open({ variables: [variable("head/kernel")] });
  all("nni-nnx-variable")[0].querySelector<HTMLElement>(".nni-link")!.click();
  await settle();
  expect(find("nni-selected")!.dataset["value"]).toBe("head");
  expect(find("nni-nnx")!.dataset["value"], "what is of another module is not shown as this one's").toBeUndefined();
});

it("switches a mode, says what failed, and takes a switch back", async () => {
  await open({ modes: [mode("blocks/0", { value: true, in_force: "True", switched: true })] });
  const row = find("nni-nnx-mode")!;
  const toggle = row.querySelector<HTMLElement>("[role=switch]")!;
  expect(toggle.getAttribute("aria-checked")).toBe("true");
  toggle.click();
  const [asked] = control.of("switch_mode");
  expect(asked).toMatchObject({ module: "blocks/0", name: "deterministic", value: false });
  control.emit({ type: "reply", id: asked["id"], ok: false, error: "It has none." });
  await settle();
  expect(find("nni-nnx")!.textContent).toContain("Could not switch deterministic: It has none.");
  [...row.querySelectorAll("button")].at(-1)!.click();
  expect(control.of("switch_mode").at(-1)).toMatchObject({ value: null });
});

it("says why a module cannot be shown", async () => {
  await openTab(find, "nnx");
  await settle();
  const [asked] = control.of("show_nnx");
  control.emit({ type: "reply", id: asked["id"], ok: false, error: "NNX has no module at 'x'." });
  await settle();
  expect(find("nni-nnx")!.textContent).toBe("NNX has no module at 'x'.");
});
