// What anywidget calls: `initialize` once per model, `render` once per view.
// Invariant: both are synchronous (an `initialize` of more than 2 s leaves a model deaf) and do
// nothing but hand over to the session of the inspector that the model belongs to.
import type { Model } from "./kernel/bridge";
import { lighten } from "./saved";
import { sessionOf } from "./session";

interface Context {
  model: Model;
  signal?: AbortSignal;
}

function initialize({ model, signal }: Context): void {
  const role = model.get("role") === "stream" ? "stream" : "control";
  sessionOf(String(model.get("inspector"))).attach(role, model, signal);
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
