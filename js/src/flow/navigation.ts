// Moves between modules: select one and stay, or leave one for a module around it.
import { ancestors } from "../kernel/sites";
import type { Store } from "../store";

export function selectNode(store: Store, site: string): void {
  store.flow.pick(site);
  store.select(site);
}

/** Show the flow of an enclosing module, and select the module that was left if it is a node. */
export function showOuterFlow(store: Store, to: string): void {
  const sites = store.sites.peek();
  const from = store.flow.scope.peek();
  if (!sites || from === null) return;
  const way = [from, ...ancestors(sites, sites.byKey.get(from)!)];
  selectNode(store, way.slice(0, way.indexOf(to)).findLast((key) => sites.list[sites.byKey.get(key)!].calls > 0) ?? from);
  store.flow.show(to);
}
