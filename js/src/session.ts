// The session of one inspector: its control model, its stream model and its views, even if anywidget
// imported several copies of this file for them.
// Invariant: the copy of this file that made a session runs all of it, because one copy does not
// know the signals of another; a session without models is dropped.
import { connect, mount } from "./App";
import type { Model } from "./kernel/bridge";
import { sessions, streams, type Session } from "./kernel/globals";
import { hideSavedState } from "./savedState";

export function sessionOf(inspector: string): Session {
  const known = sessions().get(inspector);
  if (known) return known;
  const session = createSession(inspector, () => sessions().delete(inspector));
  sessions().set(inspector, session);
  const early = streams().get(inspector);
  streams().delete(inspector);
  if (early) session.attach("stream", early);
  return session;
}

function createSession(inspector: string, forget: () => void): Session {
  const parts = connect();
  const models = new Set<Model>();
  return {
    attach(role, { model, signal }) {
      models.add(model);
      parts.bridge.attach(role, model);
      const end = (): void => {
        models.delete(model);
        if (models.size > 0) return;
        parts.close();
        forget();
      };
      if (signal) signal.addEventListener("abort", end);
      else model.on("destroy", end); // anywidget 0.9 and 0.10 have no signal
    },
    mount(el) {
      const place = document.createElement("div");
      el.append(place);
      const end = mount(parts, place);
      const uncover = hideSavedState(inspector, parts.store, place);
      return () => {
        uncover();
        end();
        place.remove();
      };
    },
  };
}
