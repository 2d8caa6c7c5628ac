// Where the control model, the stream model and the views of one inspector meet, whichever copy of
// this file anywidget imported for them.
// Invariant: the copy of this file that made a session runs all of it (signals of one copy are
// unknown to the other); a session without models is forgotten.
import { connected, mount } from "./App";
import type { Model } from "./kernel/bridge";
import { sessions, streams, type Session } from "./kernel/shared";
import { coverSaved } from "./saved";

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
  const parts = connected();
  const models = new Set<Model>();
  return {
    attach(role, { model, signal }) {
      models.add(model);
      parts.bridge.attach(role, model);
      signal?.addEventListener("abort", () => {
        models.delete(model);
        if (models.size > 0) return;
        parts.close();
        forget();
      });
    },
    mount(el) {
      const place = document.createElement("div");
      el.append(place);
      const end = mount(parts, place);
      const uncover = coverSaved(inspector, parts.store);
      return () => {
        uncover();
        end();
        place.remove();
      };
    },
  };
}
