// The panel "Code": what the kernel tells of a module's source is text.
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION, type Code } from "../../src/kernel/protocol";
import { HOSTILE } from "../helpers/hostile";
import { settle } from "../helpers/kernel";
import { startView, type TestView, openTab } from "../helpers/view";

let { stream, el, find, all, end } = {} as TestView;
beforeEach(async () => void ({ stream, el, find, all, end } = await startView()));
afterEach(() => end());

it("shows source and documentation as text", async () => {
  await openTab(find, "code");
  await settle();
  const code: Code = {
    type: "code", version: VERSION, id: 2, site: "blocks/0", kind: HOSTILE, documentation: `  ${HOSTILE}\n    indented`,
    excerpts: [{ file: HOSTILE, function: HOSTILE, first: 3, line: 4, text: `# ${HOSTILE}\nx = block(x)` }], sown: ["head"], why: "",
  }; // prettier-ignore
  stream.emit(code);
  await settle();
  expect(find("nni-excerpt")?.dataset["value"]).toBe("4");
  expect(el.querySelector("[aria-current=true].nni-line")?.textContent).toBe("4x = block(x)\n");
  expect(find("nni-documentation")?.textContent).toBe(`  ${HOSTILE}\n    indented`);
  expect(all("nni-sown").map((row) => row.dataset["site"])).toEqual(["head"]);
  expect(el.querySelectorAll("img, script")).toHaveLength(0);
});
