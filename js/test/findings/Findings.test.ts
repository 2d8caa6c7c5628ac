// What is wrong: a button that says how much, the list below it, and its links.
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION, type FindingRow, type Findings } from "../../src/kernel/protocol";
import { HOSTILE as EVIL } from "../helpers/hostile";
import { settle } from "../helpers/kernel";
import { passes } from "../helpers/messages";
import { startView, type TestView } from "../helpers/view";

let { control, stream, el, find, all, end } = {} as TestView;
beforeEach(async () => void ({ control, stream, el, find, all, end } = await startView()));
afterEach(() => end());
const button = (): HTMLButtonElement => find("nni-findings") as HTMLButtonElement;

function finding(more: Partial<FindingRow> = {}): FindingRow {
  return { rule: "nonfinite", site: "blocks/0", step: 3, severity: "error", what: "It first held NaN", advice: "look there", effects: [], gone: null, ...more };
}

async function sendFindings(findings: readonly FindingRow[], more = 0): Promise<void> {
  stream.emit({ type: "findings", version: VERSION, findings, more } satisfies Findings);
  await settle();
}

it("says that there are none, and then nothing opens", async () => {
  expect([button().textContent, button().disabled]).toEqual(["no findings", true]);
  await sendFindings([]);
  button().click();
  await settle();
  expect(all("nni-finding")).toEqual([]);
});

it("lists them worst first, each with a link to its site", async () => {
  await sendFindings([finding(), finding({ rule: "unused", site: "head", severity: "info", what: "It is never called" })], 2);
  expect([button().textContent, button().dataset["value"], button().getAttribute("aria-expanded")]).toEqual(["4 findings", "4", "false"]);
  button().click();
  await settle();
  const rows = all("nni-finding");
  expect(rows.map((row) => [row.dataset["rule"], row.querySelector("h4")!.textContent])).toEqual([
    ["nonfinite", "Error: It first held NaN"],
    ["unused", "Note: It is never called"],
  ]);
  expect(rows[1]!.textContent).toContain("Look there.");
  expect(el.querySelector(".nni-findings-list")!.textContent).toContain("2 more: insp.findings has them all.");
  const site = rows[1]!.querySelectorAll("button")[1]!;
  expect(site.textContent).toBe("Go to head");
  site.click();
  await settle();
  expect(find("nni-selected")?.dataset["value"]).toBe("head");
});

it("has links that open the step of a finding", async () => {
  stream.emit(...passes([[0, 0, 0, 0], [1, 3, 0, 0], [2, 6, 0, 0]])); // prettier-ignore
  await sendFindings([finding({ step: 3, site: "head" })]);
  button().click();
  await settle();
  const link = find("nni-finding")!.querySelector("button")!;
  expect(link.textContent).toBe("Go to step 3");
  link.click();
  await settle();
  expect(control.of("show_pass").map((message) => message["number"])).toEqual([1]);
});

it("closes by Escape, with the focus back on the button, and when nothing is wrong any more", async () => {
  await sendFindings([finding()]);
  button().click();
  await settle();
  const link = find("nni-finding")!.querySelector("button")!;
  link.focus();
  link.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  await settle();
  expect(find("nni-finding")).toBeNull();
  expect(document.activeElement).toBe(button());
  button().click();
  await sendFindings([]);
  expect([find("nni-finding"), button().disabled]).toEqual([null, true]);
});

it("stays while one clicks elsewhere, for it covers nothing, and closes by its button", async () => {
  await sendFindings([finding()]);
  button().click();
  await settle();
  expect(button().textContent).toBe("1 error");
  find("nni-search")!.focus();
  await settle();
  expect(find("nni-finding")).not.toBeNull();
  button().click();
  await settle();
  expect(find("nni-finding")).toBeNull();
});

it("folds what follows from a finding, and says since when it is over", async () => {
  await sendFindings([finding({ effects: ["head is NaN too", "the loss is NaN"], gone: 40 }), finding({ site: "head", effects: [] })]);
  button().click();
  await settle();
  const [over, other] = all("nni-finding");
  const details = over!.querySelector("details")!;
  expect([details.open, details.querySelector("summary")!.textContent]).toEqual([false, "2 consequences"]);
  expect([...details.querySelectorAll("li")].map((li) => li.textContent)).toEqual(["head is NaN too", "the loss is NaN"]);
  expect(over!.textContent).toContain("Gone since step 40.");
  expect([over!.className, other!.className, other!.querySelector("details")]).toEqual(["nni-finding-gone", "", null]);
});

it("marks the row at which values stop being finite", async () => {
  await sendFindings([finding({ site: "head" })]);
  const badges = all("nni-nan").map((badge) => [badge.closest<HTMLElement>("[data-site]")!.dataset["site"], badge.textContent]);
  expect(badges.filter(([, text]) => text === "NaN first")).toEqual([["head", "NaN first"]]);
});

it("shows texts as text, and a site that is not in the tree without a link", async () => {
  await sendFindings([finding({ what: EVIL, site: EVIL, rule: EVIL })]);
  button().click();
  await settle();
  expect(find("nni-finding")!.textContent).toContain(EVIL);
  expect([...find("nni-finding")!.querySelectorAll("button, img, script")].map((e) => e.textContent)).toEqual(["Go to step 3"]);
});

