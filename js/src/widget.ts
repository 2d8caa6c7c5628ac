// What anywidget calls: `initialize` once per model, `render` once per view.
// Invariant: both are synchronous (an `initialize` of more than 2 s leaves a model deaf) and do
// nothing but hand over to the session of the inspector that the model belongs to.
import type { Context } from "./kernel/shared";
import { lighten } from "./saved";
import { sessionOf } from "./session";

function initialize(context: Context): void {
  const { model } = context;
  const role = model.get("role") === "stream" ? "stream" : "control";
  sessionOf(String(model.get("inspector"))).attach(role, context);
  lighten(model);
}

function render({ model, el, signal }: Context & { el: HTMLElement }): (() => void) | undefined {
  if (model.get("role") === "stream") {
    el.style.display = "none"; // it has nothing to show, should anybody display it
    return undefined;
  }
  const unmount = sessionOf(String(model.get("inspector"))).mount(el);
  signal?.addEventListener("abort", unmount);
  return unmount;
}

export default { initialize, render };
