// What a live model leaves in the metadata of a notebook.
import { afterEach, expect, it, vi } from "vitest";
import { hideSavedState, dropSource } from "../src/savedState";
import { Store } from "../src/store";
import { MockKernel } from "./helpers/kernel";
import { layout } from "./helpers/messages";

afterEach(() => document.body.removeAttribute("data-jp-theme-light"));

it("what JupyterLab saves of a model is no front end, and nobody is told of the change", () => {
  document.body.setAttribute("data-jp-theme-light", "true");
  const set = vi.fn();
  dropSource({ get: () => "", on: () => undefined, send: () => undefined, set });
  expect(set.mock.calls.map(([name, , options]) => [name, options])).toEqual([["_esm", { silent: true }], ["_css", { silent: true }]]); // prettier-ignore
  expect(set.mock.calls.every(([, value]) => String(value).length < 100)).toBe(true);
});

it("in other hosts it stays as it is", () => {
  const set = vi.fn();
  dropSource({ get: () => "", on: () => undefined, send: () => undefined, set });
  expect(set).not.toHaveBeenCalled();
});

it.each([true, false])("the last state stands alone in a copy of a notebook as a page (%s), until a kernel answers", (copy) => {
  const [kept, place] = [document.createElement("div"), document.createElement("div")];
  kept.className = "nni-saved nni-of-x";
  document.body.append(kept, place);
  if (copy) document.body.insertAdjacentHTML("beforeend", '<script type="application/vnd.jupyter.widget-state+json">{}</script>');
  const store = new Store(Object.assign(new MockKernel(), { ack: () => undefined }));
  const end = hideSavedState("x", store, place);
  expect(place.hidden).toBe(copy);
  store.receive(layout(), undefined);
  expect(place.hidden).toBe(false);
  expect(document.head.textContent).toContain(".nni-of-x");
  end();
  expect(document.head.textContent).not.toContain(".nni-of-x");
  document.body.replaceChildren();
});

it("a view whose last state is not in the page is never hidden", () => {
  document.body.insertAdjacentHTML("beforeend", '<script type="application/vnd.jupyter.widget-state+json">{}</script>');
  const place = document.createElement("div");
  hideSavedState("x", new Store(Object.assign(new MockKernel(), { ack: () => undefined })), place)();
  expect(place.hidden).toBe(false);
  document.body.replaceChildren();
});
