// The heads of an attention and the experts of a router over the steps: where they are shown, and their numbers.
import { afterEach, beforeEach, expect, it } from "vitest";
import { VERSION, type Choices } from "../../src/kernel/protocol";
import { settle } from "../helpers/kernel";
import { openTab, startView, type TestView } from "../helpers/view";
import { frame, layout } from "../helpers/messages";

let { stream, el, find, all, end } = {} as TestView;
beforeEach(async () => void ({ stream, el, find, all, end } = await startView()));
afterEach(() => end());

const sendChoices = async (of: Partial<Choices>, steps: number[], ...figures: number[][][]): Promise<void> => {
  const numbers = Float64Array.from([...steps, ...figures.flat(2)]);
  const header: Choices = { type: "choices", version: VERSION, layout: 1, site: 2, key: "@attention", experts: false, figures: [], rows: figures[0]!.length, steps: steps.length, more: 0, ...of };
  stream.emit(header, new DataView(numbers.buffer));
  await settle();
};
const shown = (): number[][] => all("nni-head-stat").map((row) => [...row.querySelectorAll("td")].map((one) => Number(one.dataset["value"])));
const paths = (): (string | null)[] => [...el.querySelectorAll(".nni-head-stats path")].map((one) => one.getAttribute("d"));

it("shows the figures of each head at the step on screen, and a line over the steps", async () => {
  expect(find("nni-tab-attention")).toBeNull();
  const evenness = [[1, 0.5, 0.25], [0.5, NaN, 0.75]]; // prettier-ignore
  const logit = [[-2, 6, 6], [2, 2, 2]]; // prettier-ignore
  await sendChoices({ figures: ["evenness", "logit"], more: 3 }, [0, 5, 10], evenness, logit);
  await openTab(find, "attention");
  stream.emit(...frame(2, { step: 7 }));
  await settle();
  expect(shown()).toEqual([[0.5, 6], [NaN, 2]]); // prettier-ignore
  expect(el.querySelector(".nni-head-stats caption")!.textContent).toBe("@attention, step 5");
  stream.emit(...frame(3, { step: 10 }));
  await settle();
  expect(shown()).toEqual([[0.25, 6], [0.75, 2]]); // prettier-ignore
  // from 0 to 1, with a gap; and from -2 to 6
  expect(paths()).toEqual(["M0.0 1.0h.1L50.0 8.0h.1L100.0 11.5h.1", "M0.0 15.0h.1L50.0 1.0h.1L100.0 1.0h.1", "M0.0 8.0h.1M100.0 4.5h.1", "M0.0 8.0h.1L50.0 8.0h.1L100.0 8.0h.1"]);
  expect(el.textContent).toContain("3 more are left out.");
  expect(el.textContent).toContain('insp.figure("@attention")');
});

it("shows experts in a panel of their own, until another module is selected", async () => {
  await sendChoices({ key: "@experts", experts: true, figures: ["load", "router_entropy"] }, [4], [[0.75], [0.25]], [[0.5], [0.5]]);
  expect(find("nni-tab-attention")).toBeNull();
  await openTab(find, "experts");
  expect(shown()).toEqual([[0.75, 0.5], [0.25, 0.5]]); // prettier-ignore
  expect(paths()).toHaveLength(3); // one of the router
  stream.emit(layout(undefined, 2));
  await settle();
  expect(find("nni-tab-experts")).toBeNull();
});
