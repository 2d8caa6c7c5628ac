// The entry of page.js: a saved page shows the screen over what it carries. Invariant: what goes
// wrong before there is a screen is text in its place.
import { render } from "preact";
import { App } from "../App";
import { Bridge } from "../bridge";
import { Store } from "../store";
import { paletteOf, readTheme } from "../theme";
import { comms } from "./kernel";
import { Recorded } from "./recording";

/** Base64 of what gzip made; spaces around it do not matter. */
export async function unpacked(text: string): Promise<Uint8Array> {
  const packed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function show(recorded: Recorded, place: HTMLElement): () => void {
  const store: Store = new Store({
    ask: (request, settle) => bridge.ask(request, settle),
    ack: (seq) => bridge.ack(seq),
  });
  const bridge = new Bridge(store);
  store.replay.value = recorded.note;
  const { control, stream } = comms(recorded);
  bridge.attach("stream", stream);
  bridge.attach("control", control);
  readTheme();
  render(<App store={store} bridge={bridge} />, place);
  const root = place.querySelector(".nni-root");
  if (root) paletteOf(root);
  return () => {
    bridge.close();
    store.close();
    render(null, place);
  };
}

async function start(place: HTMLElement): Promise<void> {
  place.replaceChildren();
  try {
    const recorded = new Recorded(await unpacked(document.getElementById("nni-recording")?.textContent ?? ""));
    show(recorded, place);
  } catch (error) {
    place.textContent = `This page cannot be shown: ${error instanceof Error ? error.message : String(error)}`;
  }
}

const place = document.getElementById("nni-page");
if (place) void start(place);
