// Text of a model is text, whatever it says; a buffer that does not fit changes nothing.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { decodeCasts, decodeChoices, decodeCurves, decodeFrame, decodeHistory, decodeUpdates } from "../src/kernel/decode";
import { VERSION, type Casts, type Choices, type Curves, type Frame, type History, type Nnx, type Updates } from "../src/kernel/protocol";
import { ProtocolError, checkVersion } from "../src/kernel/version";
import { GROUPS } from "../src/detail/groups";
import { EVIL } from "./helpers/hostile";
import { settle } from "./helpers/kernel";
import { effect, frame, layout, scale, site, state } from "./helpers/messages";
import { mountView, type TestView } from "./helpers/view";
import { page } from "./helpers/nnx";

const folder = join(import.meta.dirname, "golden");
const golden = (name: string): Record<string, unknown> => JSON.parse(readFileSync(join(folder, `${name}.json`), "utf8"));

let pages = 0;
let { control, stream, el, find, all, end } = {} as TestView;
beforeEach(() => {
  pages = 0;
  ({ control, stream, el, find, all, end } = mountView());
});
afterEach(() => end());

function emitAll(texts: readonly string[], selected: string): void {
  stream.emit(
    layout([
      site("", -1, { name: texts[0], kind: texts[0] }),
      ...texts.map((text) =>
        site(text, 0, { name: text, kind: text, inputs: text, output: text, source: text, unseen: text, aliases: [text], calls: 2 }),
      ),
    ]),
  );
  stream.emit(
    state({
      selected,
      no_effect: selected,
      notices: texts.slice(0, 20).map((text) => ({ level: text, text, site: text })),
      perturbations: texts.map((text, i) => scale(i, text, 1, { kind: text, strength_name: text, expression: text, pending: true })),
      effect: effect({ source: selected, clean: { [selected]: 1 }, perturbed: { [selected]: 2 }, sites: texts.slice(0, 12).map((s) => ({ site: s, change: 1 })) }),
    }),
  );
  stream.emit(...frame(1, { sites: texts.length + 1 }));
}

function pageOf(texts: readonly string[], selected: string, id: number): Nnx {
  return page(selected, {
    id,
    nodes: texts.map((text) => ({
      path: text, name: text, type: text, depth: 0, module: text, reference: 1, first: text, also: [text], attributes: [{ name: text, text }],
      attributes_total: 9,
    })),
    variables: texts.map((text) => ({
      path: text, module: text, type: text, shape: text, dtype: text, bytes: 4, sharding: text, held: "array", committed: true, metadata: text, value: text,
      reference: 1, first: null, also: [text], change: { same: false, distance: 1, relative: 1, before: text, after: text }, passed: null,
    })),
    kinds: texts.map((text) => ({ type: text, variables: 1, elements: 1, bytes: 4 })),
    modes: texts.map((text) => ({
      module: text, type: text, name: text, own: text, in_force: text, value: null, flag: false, switched: true, documentation: text,
    })),
    uncompared: selected,
  }); // prettier-ignore
}

/** The kinds of elements and attributes on the page. */
function vocabulary(): { tags: Set<string>; attributes: Set<string> } {
  const every = [...el.querySelectorAll("*")];
  return {
    tags: new Set(every.map((e) => e.localName)),
    attributes: new Set(every.flatMap((e) => e.getAttributeNames())),
  };
}

/** Answers what the NNX panel asks, until it shows this site. */
function answered(texts: readonly string[], selected: string): void {
  for (const { id } of control.of("show_nnx").slice(pages)) {
    pages += 1;
    stream.emit(pageOf(texts, selected, id as number));
    control.emit({ type: "reply", id, ok: true, error: "" });
  }
  expect(find("nni-nnx")?.dataset["value"]).toBe(selected);
}

const DETAIL = ".nni-panel-tabs [role=tab]";

/** Everything there is to see of these texts, the selected one's panels one after the other. */
async function showEverything(texts: readonly string[], selected: string): Promise<ReturnType<typeof vocabulary>> {
  emitAll(texts, selected);
  await settle();
  const seen = vocabulary();
  const look = (): void => {
    const now = vocabulary();
    now.tags.forEach((tag) => seen.tags.add(tag));
    now.attributes.forEach((name) => seen.attributes.add(name));
  };
  for (const button of el.querySelectorAll<HTMLElement>("[aria-expanded]:not([role=row])")) {
    button.click(); // menus, the findings, the whole effect
    await settle();
    look();
    if (button.getAttribute("aria-expanded") === "true") button.click();
    await settle();
  }
  for (const group of GROUPS) {
    find(`nni-group-${group}`)?.click();
    await settle();
    for (const tab of el.querySelectorAll<HTMLElement>(DETAIL)) {
      tab.click();
      if (tab.dataset["testid"] === "nni-tab-nnx") await vi.waitFor(() => answered(texts, selected));
      await settle();
      look();
    }
  }
  return seen;
}

describe("a hundred texts", () => {
  it("are a hundred, all different", () => {
    expect(new Set(EVIL).size).toBe(EVIL.length);
    expect(EVIL.length).toBeGreaterThanOrEqual(100);
  });

  it("make no element, attribute or request that a harmless text does not", async () => {
    const known = await showEverything(
      EVIL.map((_, i) => `harmless${i}`),
      "harmless0",
    );
    for (const name of ["href", "src", "srcdoc", "action", "onerror", "onclick"]) expect(known.attributes).not.toContain(name);
    for (const tag of ["script", "img", "iframe", "a", "style", "link", "object"]) expect(known.tags).not.toContain(tag);
    const evil = await showEverything(EVIL, EVIL[0]);
    expect([...evil.tags].filter((tag) => !known.tags.has(tag))).toEqual([]);
    expect([...evil.attributes].filter((name) => !known.attributes.has(name))).toEqual([]);
    for (const text of EVIL) {
      stream.emit(state({ selected: text, notices: [{ level: "error", text, site: text }] }));
      await vi.waitFor(() => expect(find("nni-selected")?.textContent).toBe(text));
      expect(find("nni-selected")?.dataset["value"]).toBe(text);
      expect(find("nni-error")).toBeNull();
      const now = vocabulary();
      expect([...now.tags].filter((tag) => !known.tags.has(tag)), text).toEqual([]);
      expect([...now.attributes].filter((name) => !known.attributes.has(name)), text).toEqual([]);
      for (const styled of el.querySelectorAll("[style]")) expect(styled.getAttribute("style")).not.toContain("evil.example");
    }
    expect("hacked" in window).toBe(false);
    expect(({} as Record<string, unknown>)["polluted"]).toBeUndefined();
  }, 120_000);
});

describe("buffers and versions that do not fit", () => {
  it.each([
    ["frame", decodeFrame],
    ["history", decodeHistory],
    ["updates", decodeUpdates],
    ["curves", decodeCurves],
    ["casts", decodeCasts],
    ["choices", decodeChoices],
  ] as const)("%s with a buffer of any other length is refused", (name, decode) => {
    const header = checkVersion(golden(name)) as Frame & History & Updates & Curves & Casts & Choices;
    const whole = readFileSync(join(folder, `${name}.bin`)).length;
    (decode as (h: unknown, b: DataView | undefined) => unknown)(header, new DataView(new ArrayBuffer(whole)));
    for (const size of [0, 1, 7, 8, whole - 8, whole - 1, whole + 1, whole + 8, 2 * whole + 3]) {
      const attempt = (): unknown => (decode as (h: unknown, b: DataView) => unknown)(header, new DataView(new ArrayBuffer(size)));
      expect(attempt, `${size} of ${whole} bytes`).toThrow(ProtocolError);
    }
    expect(() => (decode as (h: unknown, b: undefined) => unknown)(header, undefined)).toThrow(ProtocolError);
  });

  it("of another version say what to do", () => {
    expect(() => checkVersion({ ...golden("nnx"), version: VERSION + 1 })).toThrow(/restart the kernel/);
  });

  it.each([VERSION - 1, VERSION + 1])("of a kernel of version %d are one notice, whatever else they have", async (version) => {
    const told = ["layout", "state", "findings", "frame"];
    for (const name of told) stream.emit({ type: name, version, once: "there was a field" }, new DataView(new ArrayBuffer(7)));
    await settle();
    const said = all("nni-notice").map((notice) => notice.textContent);
    expect(said).toHaveLength(1);
    expect(said[0]).toContain(`The kernel speaks version ${version} of the protocol and this view version ${VERSION}: restart the kernel, reload the page`);
  });
});
