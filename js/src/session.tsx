// Where the control model, the stream model and the views of one inspector meet. anywidget
// imports this file once per model, so they meet in a map on globalThis, by inspector id.
// Invariant: the copy of this file that made a session runs all of it (signals of one copy are
// unknown to the other); a session without models is forgotten.
import { render } from "preact";
import { App } from "./App";
import { Bridge, type Model } from "./kernel/bridge";
import { Store } from "./store";
import { coverSaved } from "./saved";
import { paletteOf, readTheme } from "./ui/theme";

export interface Session {
  attach(role: "control" | "stream", model: Model, signal?: AbortSignal): void;
  /** Shows a view in `el`; call what it returns to take it away. */
  mount(el: HTMLElement): () => void;
}

const EARLY = Symbol.for("nnx_inspector.streams");
const KEY = Symbol.for("nnx_inspector.sessions");

function sessions(): Map<string, Session> {
  const shared = globalThis as unknown as Record<symbol, Map<string, Session> | undefined>;
  return (shared[KEY] ??= new Map<string, Session>());
}

/** Models of the stream comm that are there before the session is: see stream.ts. */
function streams(): Map<string, { readonly model: Model; readonly signal?: AbortSignal }> {
  const shared = globalThis as unknown as Record<symbol, ReturnType<typeof streams> | undefined>;
  return (shared[EARLY] ??= new Map());
}

export function sessionOf(inspector: string): Session {
  const known = sessions().get(inspector);
  if (known) return known;
  const session = createSession(inspector, () => sessions().delete(inspector));
  sessions().set(inspector, session);
  const early = streams().get(inspector);
  streams().delete(inspector);
  if (early) session.attach("stream", early.model, early.signal);
  return session;
}

function createSession(inspector: string, forget: () => void): Session {
  const store: Store = new Store({
    ask: (request, settle) => bridge.ask(request, settle),
    ack: (seq) => bridge.ack(seq),
  });
  const bridge = new Bridge(store);
  const models = new Set<Model>();
  return {
    attach(role, model, signal) {
      models.add(model);
      bridge.attach(role, model);
      signal?.addEventListener("abort", () => {
        models.delete(model);
        if (models.size > 0) return;
        bridge.close();
        store.close();
        forget();
      });
    },
    mount(el) {
      const place = document.createElement("div");
      el.append(place);
      readTheme();
      render(<App store={store} bridge={bridge} />, place);
      // Read while there is nothing to style: with the first data it would style every row twice.
      const root = place.querySelector(".nni-root");
      if (root) paletteOf(root);
      const uncover = coverSaved(inspector, store);
      return () => {
        uncover();
        render(null, place);
        place.remove();
      };
    },
  };
}
