// Maps on globalThis, shared by all scripts of a page: anywidget imports a front end once per model.
import type { Model } from "./bridge";

/** The arguments from anywidget; the signal ends with the model or the view. */
export interface Context {
  readonly model: Model;
  readonly signal?: AbortSignal;
}

/** The models and the views of one inspector. */
export interface Session {
  attach(role: "control" | "stream", context: Context): void;
  /** Shows a view in `el`; call the returned function to remove it. */
  mount(el: HTMLElement): () => void;
}

/** The sessions of the page, by inspector. */
export const sessions = (): Map<string, Session> => globalMap("nnx_inspector.sessions");
/** Models of the stream comm that arrived before their session. */
export const streams = (): Map<string, Context> => globalMap("nnx_inspector.streams");

/** The map with this name; the first script that needs it creates it. */
export function globalMap<T>(name: string): Map<string, T> {
  return ((globalThis as unknown as Record<symbol, Map<string, T> | undefined>)[Symbol.for(name)] ??= new Map<string, T>());
}
