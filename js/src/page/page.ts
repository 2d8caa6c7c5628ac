// The entry of page.js: a saved page shows the screen over its own data. Invariant: an error before
// there is a screen is shown as text in its place.
import { connect, mount } from "../App";
import { replayComms } from "./kernel";
import { SavedRecording } from "./recording";
import { gunzip } from "./gzip";

export function showRecording(recorded: SavedRecording, place: HTMLElement): () => void {
  const parts = connect();
  const { store, bridge } = parts;
  store.replayNote.value = recorded.note;
  store.missingPanels.value = recorded.missing;
  store.values.part.value = recorded.opened() ?? "output";
  const { control, stream } = replayComms(recorded);
  bridge.attach("stream", stream);
  bridge.attach("control", control);
  const end = mount(parts, place);
  return () => {
    parts.close();
    end();
  };
}

/** In a saved notebook, the frame around the page follows the theme, and appears with the screen. */
function followHost(host: Window): void {
  window.addEventListener("message", ({ source, data }: MessageEvent<unknown>) => {
    if (source !== host || typeof data !== "object" || data === null || !("nniDark" in data)) return;
    const isDark = data.nniDark === true;
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
    document.body.setAttribute("data-jp-theme-light", String(!isDark));
  });
  host.postMessage({ nniShown: true }, "*");
}

async function start(place: HTMLElement): Promise<void> {
  place.replaceChildren();
  try {
    const recorded = new SavedRecording(await gunzip(document.getElementById("nni-recording")?.textContent ?? ""));
    showRecording(recorded, place);
    if (window.parent !== window) followHost(window.parent);
  } catch (error) {
    place.textContent = `This page cannot be shown: ${error instanceof Error ? error.message : String(error)}`;
  }
}

const place = document.getElementById("nni-page");
if (place) void start(place);
