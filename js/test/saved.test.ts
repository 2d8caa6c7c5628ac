// What a live model leaves in the metadata of a notebook.
import { afterEach, expect, it, vi } from "vitest";
import { lighten } from "../src/saved";

afterEach(() => document.body.removeAttribute("data-jp-theme-light"));

it("what JupyterLab saves of a model is no front end, and nobody is told of the change", () => {
  document.body.setAttribute("data-jp-theme-light", "true");
  const set = vi.fn();
  lighten({ get: () => "", on: () => undefined, send: () => undefined, set });
  expect(set.mock.calls.map(([name, , options]) => [name, options])).toEqual([["_esm", { silent: true }], ["_css", { silent: true }]]); // prettier-ignore
  expect(set.mock.calls.every(([, value]) => String(value).length < 100)).toBe(true);
});

it("in other hosts it stays as it is", () => {
  const set = vi.fn();
  lighten({ get: () => "", on: () => undefined, send: () => undefined, set });
  expect(set).not.toHaveBeenCalled();
});
