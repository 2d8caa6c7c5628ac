// A layout with indexes for the screen: the children of each site, and its place by its key.
// Invariant: it is built once per layout, in time linear in its sites.
import type { Layout, Site } from "./protocol";

export interface Sites {
  readonly id: number;
  readonly model: string;
  readonly list: readonly Site[];
  readonly children: readonly (readonly number[])[];
  readonly roots: readonly number[];
  readonly byKey: ReadonlyMap<string, number>;
  /** The keys of the sites whose call computes an attention. */
  readonly attending: ReadonlySet<string>;
  /** Whether the model reads sequences, which a lens needs. */
  readonly sequences: boolean;
  /** Which positions the sites that are `counted` count, as a clause; "" for all. */
  readonly where: string;
}

/** The children of every leaf. */
const NO_CHILDREN: number[] = [];

export function indexSites(layout: Layout): Sites {
  const children = new Array<number[]>(layout.sites.length).fill(NO_CHILDREN);
  const roots: number[] = [];
  const byKey = new Map<string, number>();
  layout.sites.forEach((site, i) => {
    byKey.set(site.key, i);
    if (site.parent >= 0 && site.parent < layout.sites.length && site.parent !== i) {
      if (children[site.parent] === NO_CHILDREN) children[site.parent] = [i];
      else children[site.parent].push(i);
    } else roots.push(i);
  });
  return { id: layout.layout, model: layout.model, list: layout.sites, children, roots, byKey, attending: new Set(layout.attending), sequences: layout.sequences, where: layout.where };
}

/** The keys of all rows above a site; its row is shown if these are open. */
export function ancestors(sites: Sites, index: number): string[] {
  const keys: string[] = [];
  for (let at = sites.list[index].parent; at >= 0; at = sites.list[at].parent) keys.push(sites.list[at].key);
  return keys;
}

/** The key of the row that shows a site: its own key, or for a layer or an array without a row that of the whole. */
export function rowKey(sites: Sites | null, key: string): string | undefined {
  const whole = withoutArray(key);
  return [key, withoutLayers(key), whole, withoutLayers(whole)].find((one) => sites?.byKey.has(one));
}

/** A key without the name of an array, "head" for "head(logits)". */
export function withoutArray(key: string): string {
  return /^((?:\\.|[^\\(])*)\((?:\\.|[^\\()])+\)$/s.exec(key)?.[1] ?? key;
}

/** A key without the numbers of layers, "blocks@mul[1]" for "blocks[3]@mul[1]": those of an operation are none. */
export function withoutLayers(key: string): string {
  const called = /^(\\.|[^\\@])*/s.exec(key)![0];
  return called.replace(/(?<!\\)\[-?\d+\]/g, "") + key.slice(called.length);
}

/** Whether a key names an operation within a call: an `@` that no backslash escapes. */
export function isOperation(key: string): boolean {
  return /^(\\.|[^\\@])*@/s.test(key);
}

/** Whether a row shows an array of an optimizer, which no call returns, or a group of them. */
export const isState = (site: Site | undefined): boolean => site?.kind === "state" || site?.kind === "optimizer";

/** Whether a row is a group of an optimizer's arrays, which has no values of its own. */
export const isGroup = (site: Site | undefined): boolean => isState(site) && site!.output === "";

/** What a group is, in words. */
export const groupDescription = (site: Site): string => `${site.kind === "optimizer" ? "" : "a part of "}the optimizer's state`;

/** The readable form of a site's key; the root's key is empty. */
export function label(key: string): string {
  return key === "" ? "(model)" : key;
}
