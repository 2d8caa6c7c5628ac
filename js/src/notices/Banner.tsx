// One line across the view while there is no kernel, or nothing to show yet.
import type { Bridge } from "../kernel/bridge";
import type { Store } from "../store";
import { ids } from "../ui/testids";

export function Banner({ store, bridge }: { store: Store; bridge: Bridge }) {
  const text = textOf(store, bridge);
  if (!text) return null;
  return (
    <div class="nni-banner" role="status" data-testid={ids.banner}>
      <strong>{text[0]}</strong> {text[1]}
    </div>
  );
}

function textOf(store: Store, bridge: Bridge): [string, string] | null {
  const connection = bridge.connection.value;
  const saved = store.replay.value;
  if (saved) return ["Saved page.", `${saved} Controls that need the model are switched off.`];
  if (store.state.value?.closed) return ["This inspector is closed.", "This is its last state."];
  if (connection === "absent") {
    return ["Not connected: run the cell again.", "(If a cell is running, this view connects when the kernel answers.)"];
  }
  if (connection === "waiting" && !store.sites.value) return ["Connecting to the kernel …", ""];
  return null;
}
