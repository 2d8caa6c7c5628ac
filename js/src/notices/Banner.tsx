// One line across the view while there is no kernel, or nothing to show yet.
import type { ComponentChildren } from "preact";
import type { Bridge } from "../kernel/bridge";
import type { Store } from "../store";
import { Badge, ORIGINS } from "../ui/Badge";

/** What can be asked of a run that happens elsewhere, besides its perturbations. */
function RunControls({ store, every }: { store: Store; every: number }) {
  return (
    <span class="nni-steering">
      <label>
        {"It measures every "}
        <input
          type="number"
          min={1}
          value={every}
          data-testid="nni-every"
          onChange={(event) => {
            const wish = Math.round(event.currentTarget.valueAsNumber);
            if (wish >= 1 && wish !== every) store.setEvery(wish);
          }}
        />
        {" steps. "}
      </label>
      <button type="button" class="nni-button" data-testid="nni-measure-next" onClick={() => store.measureNext()}>
        Measure the next step
      </button>
    </span>
  );
}

export function Banner({ store, bridge }: { store: Store; bridge: Bridge }) {
  const text = bannerText(store, bridge);
  if (!text) return null;
  return (
    <div class="nni-banner" role="status" data-testid="nni-banner">
      {text}
    </div>
  );
}

function bannerText(store: Store, bridge: Bridge): ComponentChildren {
  const connection = bridge.connection.value;
  const saved = store.replayNote.value;
  if (saved) {
    const recorded = store.state.value?.recorded;
    const origin = store.isSaved.value ? "saved" : "live";
    return [
      <Badge key="" look={origin} title={ORIGINS[origin]}>
        {origin}
      </Badge>,
      ` ${saved} `,
      recorded?.steers ? <RunControls key="steering" store={store} every={recorded.every} /> : "Controls that need the model are switched off.",
    ];
  }
  if (store.state.value?.closed) return [<strong key="">This inspector is closed.</strong>, " This is its last state."];
  if (connection === "absent") {
    return [<strong key="">Not connected: run the cell again.</strong>, " (If a cell is running, this view connects when the kernel answers.)"];
  }
  if (connection === "waiting" && !store.sites.value) return <strong>Connecting to the kernel …</strong>;
  return null;
}
