// One line across the view while there is no kernel, or nothing to show yet.
import type { ComponentChildren } from "preact";
import type { Bridge } from "../kernel/bridge";
import type { Store } from "../store";
import { Origin } from "../ui/Badge";
import { ids } from "../ui/testids";

export function Banner({ store, bridge }: { store: Store; bridge: Bridge }) {
  const text = textOf(store, bridge);
  if (!text) return null;
  return (
    <div class="nni-banner" role="status" data-testid={ids.banner}>
      {text}
    </div>
  );
}

function textOf(store: Store, bridge: Bridge): ComponentChildren {
  const connection = bridge.connection.value;
  const saved = store.replay.value;
  if (saved) return [<Origin key="" of="saved" />, ` ${saved} Controls that need the model are switched off.`];
  if (store.state.value?.closed) return [<strong key="">This inspector is closed.</strong>, " This is its last state."];
  if (connection === "absent") {
    return [<strong key="">Not connected: run the cell again.</strong>, " (If a cell is running, this view connects when the kernel answers.)"];
  }
  if (connection === "waiting" && !store.sites.value) return <strong>Connecting to the kernel …</strong>;
  return null;
}
