// The host's theme: light or dark, and the palette that canvases paint with.
// Invariant: colours are named once, in base.css; `repaint` counts up whenever they, the window's
// size or its pixel ratio may have changed, and everything that paints a canvas reads it.
import { signal } from "@preact/signals";

export const repaint = signal(0);
export const dark = signal(false);

const COLOURS = ["text", "text-faint", "line", "control", "background", "output", "gradient", "weight", "focus", "metric", "perturb", "bad"] as const;
export type Palette = Readonly<Record<(typeof COLOURS)[number], string>>;

/** Called before the first rendering, so that the first painting has its colours. */
export function readTheme(): void {
  dark.value = isDark();
}

let watchers = 0;
let stopObserving: () => void = () => undefined;

/** Follow the host's theme, with one observer for all; call the returned function to end. */
export function watchTheme(): () => void {
  if (watchers++ === 0) stopObserving = observe();
  return () => {
    if (--watchers === 0) stopObserving();
  };
}

function observe(): () => void {
  const changed = (): void => {
    dark.value = isDark();
    repaint.value += 1;
  };
  const observer = new MutationObserver(changed);
  for (const node of [document.body, document.documentElement]) {
    observer.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "theme"] });
  }
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  preference.addEventListener("change", changed);
  window.addEventListener("resize", changed);
  changed();
  return () => {
    observer.disconnect();
    preference.removeEventListener("change", changed);
    window.removeEventListener("resize", changed);
  };
}

function isDark(): boolean {
  // JupyterLab says it by an attribute of the body, VS Code by a class of it, Colab by an attribute of the
  // root; a page of its own says nothing, and has the theme that the person prefers.
  const { body, documentElement } = document;
  const jupyter = body.getAttribute("data-jp-theme-light");
  if (jupyter !== null) return jupyter === "false";
  if (/vscode-(dark|high-contrast)(\s|$)/.test(body.className)) return true;
  if (body.classList.contains("vscode-light")) return false;
  const colab = documentElement.getAttribute("theme");
  if (colab !== null) return colab === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

const unstyled = new WeakSet<Element>();

/** Hosts render an element before they attach it, without colours. Attaching changes its size. */
function repaintWhenStyled(root: Element): void {
  if (unstyled.has(root)) return;
  unstyled.add(root);
  const observer = new ResizeObserver(() => {
    if (getComputedStyle(root).getPropertyValue("--nni-text") === "") return;
    observer.disconnect();
    unstyled.delete(root);
    repaint.value += 1;
    paletteOf(root);
  });
  observer.observe(root);
}

const palettes = new WeakMap<Element, { at: number; palette: Palette }>();

/** The colours of an element, read from its style once per change of theme. */
export function paletteOf(element: Element): Palette {
  const root = element.closest(".nni-root") ?? element;
  const known = palettes.get(root);
  if (known?.at === repaint.peek()) return known.palette;
  const style = getComputedStyle(root);
  if (style.getPropertyValue("--nni-text") === "") repaintWhenStyled(root);
  const palette = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--nni-${name}`).trim() || "gray"])) as Palette;
  palettes.set(root, { at: repaint.peek(), palette });
  return palette;
}
