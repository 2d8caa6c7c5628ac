// A part that fails says so in its place.
import { h, render } from "preact";
import { expect, it, vi } from "vitest";
import { Boundary } from "../../src/frame/Boundary";

it("shows the text of what was thrown", async () => {
  vi.spyOn(console, "error").mockImplementation(() => undefined);
  const Broken = (): never => {
    throw new Error("no such thing");
  };
  const el = document.createElement("div");
  render(h(Boundary, { name: "the tree", children: h(Broken, {}) }), el);
  await vi.waitFor(() => expect(el.textContent).toContain("Could not draw the tree: no such thing"));
});
