// The entry of page.js: a saved page shows the screen over its own data. Invariant: an error before
// there is a screen is shown as text in its place.
import { connected, mount } from "../App";
import { comms } from "./kernel";
import { Recorded } from "./recording";
import { unpacked } from "./unpacked";

export function show(recorded: Recorded, place: HTMLElement): () => void {
  const parts = connected();
  const { store, bridge } = parts;
  store.replay.value = recorded.note;
  store.missing.value = recorded.missing;
  store.values.part.value = recorded.opened() ?? "output";
  const { control, stream } = comms(recorded);
  bridge.attach("stream", stream);
  bridge.attach("control", control);
  const end = mount(parts, place);
  return () => {
    parts.close();
    end();
  };
}

/** In a saved notebook, the frame around the page follows the theme, and appears with the screen. */
function obey(host: Window): void {
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
    const recorded = new Recorded(await unpacked(document.getElementById("nni-recording")?.textContent ?? ""));
    show(recorded, place);
    if (window.parent !== window) obey(window.parent);
  } catch (error) {
    place.textContent = `This page cannot be shown: ${error instanceof Error ? error.message : String(error)}`;
  }
}

const place = document.getElementById("nni-page");
if (place) void start(place);
