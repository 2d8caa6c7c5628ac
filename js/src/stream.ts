// The front end of the stream comm, a few lines: ipywidgets sends, and saves, a front end with each
// model, and that of the control comm has all the rest. Invariant: whichever of the two models is
// there first, the stream's joins the session of its inspector at once.
import type { Model } from "./kernel/bridge";

interface Context {
  readonly model: Model;
  readonly signal?: AbortSignal;
}

interface Joined {
  attach(role: "stream", model: Model, signal?: AbortSignal): void;
}

const shared = globalThis as unknown as Record<symbol, Map<string, never> | undefined>;
const mapOf = <T>(name: string): Map<string, T> => (shared[Symbol.for(name)] ??= new Map<string, never>()) as Map<string, unknown> as Map<string, T>;

function initialize({ model, signal }: Context): void {
  const inspector = String(model.get("inspector"));
  const session = mapOf<Joined>("nnx_inspector.sessions").get(inspector);
  if (session) return session.attach("stream", model, signal);
  const early = mapOf<Context>("nnx_inspector.streams");
  early.set(inspector, { model, signal });
  signal?.addEventListener("abort", () => early.delete(inspector));
}

function render({ el }: { el: HTMLElement }): void {
  el.style.display = "none"; // it has nothing to show, should anybody display it
}

export default { initialize, render };
