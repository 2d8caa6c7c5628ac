// The front end of the stream comm. It is a few lines, because ipywidgets sends and saves a front end
// with each model; the control comm has the rest. Invariant: the stream's model joins the session of
// its inspector at once, whichever of the two models comes first.
import { sessions, streams, type Context } from "./kernel/globals";

function initialize(context: Context): void {
  const inspector = String(context.model.get("inspector"));
  const session = sessions().get(inspector);
  if (session) return session.attach("stream", context);
  streams().set(inspector, context);
  context.signal?.addEventListener("abort", () => streams().delete(inspector));
}

function render({ el }: { el: HTMLElement }): void {
  el.style.display = "none"; // it shows nothing, even if it is displayed
}

export default { initialize, render };
