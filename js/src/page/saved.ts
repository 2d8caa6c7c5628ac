// The script beside the last state in a notebook's output (screen/export/last_state.py). It shows the
// screen over the output's data, in a frame of its own that replaces the plain HTML. Invariants: it
// does nothing while a live view hides the output; the plain HTML disappears only once there is a
// screen; the frame can reach neither the notebook nor the network.
import { globalMap } from "../kernel/globals";
import { gunzip } from "./gzip";

/** How long an output must be in sight first: a live view of its inspector may be about to hide it. */
const WAIT_MS = 700;
/** What a host leaves in place of a widget whose kernel is gone. */
const DEAD_WIDGET_TEXTS = new Set(["Loading widget...", "Error displaying widget: model not found", "Error displaying widget"]);
/** What a host shows in place of a widget whose script it has not found. */
const FAILED_WIDGET = ".jupyter-widgets-error-widget";
const NOT_LOADED =
  "The live view could not be loaded, so this is the last saved state. If the error above names anywidget: " +
  "pip install anywidget in the environment that JupyterLab runs in, then load the page again.";
const SAVED_OUTPUT = ".nni-saved[data-nni-page]";
const NARROW_WIDTH = 760;

type PageShell = Promise<readonly [before: string, after: string]>;

/** Pages without their recordings, each unpacked once. */
function unpackShell(place: HTMLElement): PageShell {
  const shells = globalMap<PageShell>("nnx_inspector.shells");
  const name = String(place.dataset["nniPage"]);
  const known = shells.get(name);
  if (known) return known;
  const shell = gunzip(textOf(place, "page")).then((bytes) => {
    const [before, after] = new TextDecoder().decode(bytes).split("\0");
    return [before ?? "", after ?? ""] as const;
  });
  shells.set(name, shell);
  return shell;
}

function textOf(place: HTMLElement, what: "page" | "recording"): string {
  return place.querySelector(`:scope > .nni-saved-${what}`)?.textContent ?? "";
}

async function showFrame(place: HTMLElement): Promise<void> {
  const [before, after] = await unpackShell(place);
  const url = URL.createObjectURL(new Blob([before, textOf(place, "recording"), after], { type: "text/html" }));
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "The saved state of an inspector";
  frame.dataset["testid"] = "nni-saved-frame";
  const height = place.clientWidth < NARROW_WIDTH ? 1200 : Math.min(900, Math.max(560, 0.82 * window.innerHeight));
  frame.style.cssText = `display: block; width: 100%; height: 0; border: 0; resize: vertical; color-scheme: auto`;
  const sendTheme = (): void => frame.contentWindow?.postMessage({ nniDark: isDark() }, "*");
  const theme = new MutationObserver(sendTheme);
  const heard = ({ source, data }: MessageEvent<unknown>): void => {
    if (!frame.isConnected) return leave();
    if (source !== frame.contentWindow || typeof data !== "object" || data === null || !("nniShown" in data)) return;
    URL.revokeObjectURL(url);
    sendTheme();
    frame.style.height = `${height}px`;
    for (const plain of place.querySelectorAll<HTMLElement>(":scope > .nni-snapshot")) plain.hidden = true;
    hideDeadWidget(place);
  };
  const leave = (): void => {
    theme.disconnect();
    window.removeEventListener("message", heard);
  };
  window.addEventListener("message", heard);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  frame.src = url;
  place.prepend(frame);
}

function isDark(): boolean {
  const jupyter = document.body.getAttribute("data-jp-theme-light");
  return jupyter === null ? window.matchMedia("(prefers-color-scheme: dark)").matches : jupyter === "false";
}

/** Hides the output before it as long as that is a widget without a kernel, and says how to get the
 * script of one that could not be loaded. */
function hideDeadWidget(place: HTMLElement): void {
  const before = place.closest(".jp-OutputArea-child")?.previousElementSibling;
  if (!(before instanceof HTMLElement)) return;
  const note = document.createElement("p");
  note.dataset["testid"] = "nni-not-loaded";
  note.textContent = NOT_LOADED;
  const look = (): void => {
    const text = before.querySelector(".jp-OutputArea-output")?.textContent ?? "";
    before.style.display = DEAD_WIDGET_TEXTS.has(text.trim()) ? "none" : "";
    if (before.querySelector(FAILED_WIDGET)) place.prepend(note);
    else note.remove();
  };
  new MutationObserver(look).observe(before, { childList: true, subtree: true, characterData: true });
  look();
}

function showWhenVisible(place: HTMLElement): void {
  if (place.dataset["nniBegun"]) return;
  place.dataset["nniBegun"] = "yes";
  let timer: ReturnType<typeof setTimeout> | undefined;
  const watching = new IntersectionObserver((entries) => {
    clearTimeout(timer);
    if (!entries.at(-1)?.isIntersecting) return;
    timer = setTimeout(() => {
      watching.disconnect();
      showFrame(place).catch((error: unknown) => console.error("nnx_inspector: the saved state stays as plain HTML.", error));
    }, WAIT_MS);
  });
  watching.observe(place);
}

const own = document.currentScript?.closest<HTMLElement>(SAVED_OUTPUT);
for (const place of own ? [own] : document.querySelectorAll<HTMLElement>(SAVED_OUTPUT)) showWhenVisible(place);
