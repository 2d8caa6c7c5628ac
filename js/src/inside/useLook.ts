// Asks for what a panel shows: when it is first shown, and again when the site or the pass changes.
import { useEffect } from "preact/hooks";
import type { Store } from "../store";
import type { What } from "./inside";

export function useLook(store: Store, what: What, site: string, moment: unknown): void {
  useEffect(() => store.inside.look(what, site), [store, what, site, moment]);
  useEffect(() => () => store.inside.forget(what), [store, what]);
}
