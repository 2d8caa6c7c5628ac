// The script beside the plain HTML of a saved notebook: what it does, and when.
import { gzipSync } from "node:zlib";
import { afterEach, beforeEach, expect, it, vi } from "vitest";

let seen: (visible: boolean) => void;

class Watching {
  constructor(callback: (entries: { isIntersecting: boolean }[]) => void) {
    seen = (isIntersecting) => callback([{ isIntersecting }]);
  }
  observe(): void {}
  disconnect(): void {}
}

const packed = (text: string): string => gzipSync(text).toString("base64");
const script = (name: string, text: string): HTMLElement => {
  const element = document.createElement("script");
  element.setAttribute("type", "application/octet-stream");
  element.className = `nni-saved-${name}`;
  element.textContent = text;
  return element;
};

async function output(page = packed("before\0after")): Promise<HTMLElement> {
  const place = document.createElement("div");
  place.className = "nni-saved";
  place.dataset["nniPage"] = String(Math.random());
  const plain = document.createElement("div");
  plain.className = "nni-snapshot";
  place.append(plain, script("page", page), script("recording", "QUJD"));
  document.body.append(place);
  vi.resetModules();
  await import("../../src/page/saved");
  return place;
}

const made: Blob[] = [];
const frameOf = (place: HTMLElement): HTMLIFrameElement | null => place.querySelector("iframe");
const plainOf = (place: HTMLElement): HTMLElement => place.querySelector(".nni-snapshot")!;

beforeEach(() => {
  vi.stubGlobal("IntersectionObserver", Watching);
  vi.spyOn(URL, "createObjectURL").mockImplementation((blob) => {
    made.push(blob as Blob);
    return "about:blank";
  });
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
  document.body.replaceChildren();
  made.length = 0;
});

it("does nothing while a live view hides the output", async () => {
  const place = await output();
  seen(false);
  await new Promise((done) => setTimeout(done, 900));
  expect(frameOf(place)).toBeNull();
});

it("shows the page in a frame that reaches nothing, and hides the plain HTML once there is a screen", async () => {
  const place = await output();
  seen(true);
  await vi.waitFor(() => expect(frameOf(place)).not.toBeNull(), 5000);
  const frame = frameOf(place)!;
  expect(frame.getAttribute("sandbox")).toBe("allow-scripts");
  expect(await made[0]!.text()).toBe("beforeQUJDafter");
  expect(plainOf(place).hidden).toBe(false);
  const say = (data: unknown, source: unknown): boolean => window.dispatchEvent(Object.assign(new Event("message"), { data, source }));
  say({ nniShown: true }, window); // not of the frame
  say("nniShown", frame.contentWindow);
  expect(plainOf(place).hidden).toBe(false);
  say({ nniShown: true }, frame.contentWindow);
  expect(plainOf(place).hidden).toBe(true);
});

it("leaves the plain HTML where what is packed is damaged", async () => {
  const told = vi.spyOn(console, "error").mockImplementation(() => undefined);
  const place = await output("AAAA");
  seen(true);
  await vi.waitFor(() => expect(told).toHaveBeenCalled(), 5000);
  expect(frameOf(place)).toBeNull();
  expect(plainOf(place).hidden).toBe(false);
});

it("says how to get the script of a widget that could not be loaded, as long as it is not", async () => {
  const outputs = ["", ""].map(() => document.createElement("div"));
  for (const one of outputs) one.className = "jp-OutputArea-child";
  const place = await output();
  const [widget, own] = [outputs[0]!, outputs[1]!];
  widget.innerHTML = '<div class="jp-OutputArea-output"><div class="jupyter-widgets-error-widget">Click</div></div>';
  own.append(place);
  document.body.append(widget, own);
  seen(true);
  await vi.waitFor(() => expect(frameOf(place)).not.toBeNull(), 5000);
  window.dispatchEvent(Object.assign(new Event("message"), { data: { nniShown: true }, source: frameOf(place)!.contentWindow }));
  const note = (): Element | null => place.querySelector("[data-testid='nni-not-loaded']");
  expect(note()?.textContent).toContain("pip install anywidget");
  expect(widget.style.display).toBe("");
  widget.innerHTML = '<div class="jp-OutputArea-output">a view</div>';
  await vi.waitFor(() => expect(note()).toBeNull());
});
