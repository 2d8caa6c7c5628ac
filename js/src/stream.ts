// The front end of the stream comm, a few lines: ipywidgets sends, and saves, a front end with each
// model, and that of the control comm has all the rest. Invariant: whichever of the two models is
// there first, the stream's joins the session of its inspector at once.
import { sessions, streams, type Context } from "./kernel/shared";

function initialize(context: Context): void {
  const inspector = String(context.model.get("inspector"));
  const session = sessions().get(inspector);
  if (session) return session.attach("stream", context);
  streams().set(inspector, context);
  context.signal?.addEventListener("abort", () => streams().delete(inspector));
}

function render({ el }: { el: HTMLElement }): void {
  el.style.display = "none"; // it has nothing to show, should anybody display it
}

export default { initialize, render };
