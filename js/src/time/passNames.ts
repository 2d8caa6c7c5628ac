// The name of the pinned pass: a step of this run, or another run.
import { OTHER } from "../kernel/protocol";
import type { Store } from "../store";
import { count } from "../ui/format";

/** The name of the other run, with its step. */
export function otherName(store: Store): string {
  const other = store.compare.other.value;
  if (!other) return "another run";
  return other.step === null ? other.name : `${other.name}, step ${count(other.step)}`;
}

/** "" if nothing is pinned. */
export function pinnedName(store: Store): string {
  const pinned = store.timeline.pinned.value;
  if (!pinned) return "";
  return pinned.header.number === OTHER ? otherName(store) : `step ${count(pinned.header.step)}`;
}
