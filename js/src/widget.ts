// The functions that anywidget calls: `initialize` once per model, `render` once per view.
// Invariant: both are synchronous (an `initialize` of more than 2 s leaves a model deaf) and only
// hand over to the session of the model's inspector.
import type { Context } from "./kernel/globals";
import { dropSource } from "./savedState";
import { sessionOf } from "./session";

function initialize(context: Context): void {
  const { model } = context;
  const role = model.get("role") === "stream" ? "stream" : "control";
  sessionOf(String(model.get("inspector"))).attach(role, context);
  dropSource(model);
}

function render({ model, el, signal }: Context & { el: HTMLElement }): (() => void) | undefined {
  if (model.get("role") === "stream") {
    el.style.display = "none"; // it shows nothing, even if it is displayed
    return undefined;
  }
  const unmount = sessionOf(String(model.get("inspector"))).mount(el);
  signal?.addEventListener("abort", unmount);
  return unmount;
}

export default { initialize, render };
