// A saved page: what it carries is unpacked whole or not at all, and answers the screen as a kernel.
import { gzipSync } from "node:zlib";
import { afterEach, describe, expect, it } from "vitest";
import { decodeFrame, decodeHistory, rowStatistic, statistic, type FrameData } from "../../src/kernel/decode";
import { HISTORY_BINS, HISTORY_QUANTILES, PARAMETER_QUANTITIES, QUANTITIES, ROW_STATS, SPARK, STATISTICS, VERSION, type Frame, type History, type ToKernel } from "../../src/kernel/protocol";
import { checkVersion } from "../../src/kernel/version";
import { replayComms, NEEDS_MODEL, Replay } from "../../src/page/kernel";
import { showRecording } from "../../src/page/page";
import { SavedRecording } from "../../src/page/recording";
import { gunzip } from "../../src/page/gzip";
import { EVIL } from "../helpers/hostile";
import { settle } from "../helpers/kernel";
import { SITES, layout, passes, perturbation, site, state } from "../helpers/messages";

/** Packs as nnx_inspector/screen/export/replay.py does. */
class Packing {
  private readonly parts: Uint8Array[] = [];
  private at = 0;

  add(values: ArrayBufferView & { readonly length: number }, type: string): object {
    const size = values.byteLength / Math.max(values.length, 1) || 1;
    const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
    const planes = new Uint8Array(bytes.length);
    bytes.forEach((byte, i) => (planes[(i % size) * values.length + Math.floor(i / size)] = byte));
    const place = { at: this.at, count: values.length, type };
    this.parts.push(planes);
    this.at += planes.length;
    return place;
  }

  message(header: object, floats?: Float64Array): object {
    return { header, buffer: floats ? [this.add(floats, "f8")] : [] };
  }

  packed(index: object): Uint8Array {
    const text = new TextEncoder().encode(JSON.stringify(index));
    const out = new Uint8Array(4 + text.length + this.at);
    new DataView(out.buffer).setUint32(0, text.length, true);
    out.set(text, 4);
    let at = 4 + text.length;
    for (const part of this.parts) {
      out.set(part, at);
      at += part.length;
    }
    return out;
  }
}

const COUNT = 3;
const NONE = { at: 0, count: 0, type: "f8" };
const OF_VALUE = [1, 2, 0xffff]; // of blocks/0/kernel
const LENGTHS = [9, 0xffff, 7]; // in bytes, of each pass of (blocks/0, output); none of its gradient
const history: History = { type: "history", version: VERSION, layout: 1, site: 2, quantity: 0, steps: 1, parameter: "" };
const code = (key: string): object => ({ type: "code", version: VERSION, id: 0, site: key, kind: key, documentation: key, excerpts: [], sown: [], why: "" });

/** Of the helpers' sites: every figure of pass p is p + 1; blocks/0 has details. */
function packed(more: object | ((packing: Packing) => object) = {}, sites = SITES): Uint8Array {
  const packing = new Packing();
  const width = sites.length * QUANTITIES.length;
  const table = new Float64Array(width * STATISTICS.length * COUNT).map((_, i) => (i % COUNT) + 1);
  const sparklines = new Uint8Array(width * COUNT * SPARK).map((_, i) => Math.floor(i / SPARK) % COUNT);
  const [header, buffer] = passes([[0, 0, 0, 0], [4, 10, 0, 0], [5, 11, 1, 1]]); // prettier-ignore
  const floats = 1 + HISTORY_QUANTILES.length + HISTORY_BINS + 1;
  return packing.packed({
    version: VERSION,
    note: "Saved just now.",
    layout: layout(sites),
    state: state({ progress: { kind: "watch", running: false, step: 11, total: null, rate: null } }),
    kept: [{ type: "findings", version: VERSION, findings: [], more: 0 }],
    curves: packing.message({ type: "curves", version: VERSION, names: ["loss"], points: [2], recorded: [2], not_finite: [0] }, new Float64Array([0, 3, 1, 2])),
    passes: packing.message(header, new Float64Array(buffer.buffer)),
    library: packing.add(new TextEncoder().encode("export const arrange = 1;"), "u1"),
    histories: [
      {
        header: history,
        buffer: [packing.add(new Float64Array(floats).fill(7), "f8"), packing.add(new Float32Array(HISTORY_BINS).fill(0.25), "f4")],
      },
    ],
    answers: { code: [["blocks/0", packing.message(code("blocks/0"))], ["head", { error: "It failed." }]] }, // prettier-ignore
    frames: [0, 4, 5].map((number, i) => ({ number, step: [0, 10, 11][i], perturbed: i === 2, metrics: { loss: i } })),
    table: packing.add(table, "f8"),
    sparklines: packing.add(sparklines, "u1"),
    rows: packing.add(new Float64Array(sites.length * ROW_STATS.length * COUNT).map((_, i) => i), "f8"),
    parameters: [{ site: 2, path: "blocks/0/kernel", name: "kernel" }],
    more: [2],
    figures: packing.add(new Float64Array(PARAMETER_QUANTITIES.length * STATISTICS.length * COUNT).map((_, i) => i), "f8"),
    ratios: packing.add(Float64Array.from([0.5, NaN, 0]), "f8"),
    detailed: [2],
    lengths: packing.add(new Uint16Array([...LENGTHS, 0xffff, 0xffff, 0xffff, ...OF_VALUE, 1, 0xffff, 0xffff]), "u2"),
    counts: packing.add(new Uint8Array([0, 0xfe, 7, 0xf0, 0xa2, 4, 0, 1, 3, 0, 9, 0xff, 0xff, 0xff, 0xff, 0x0f, 5, 6, 7, 8]), "u1"),
    ...(typeof more === "function" ? (more(packing) as object) : more),
  });
}

const ask = (request: object): Exclude<ToKernel, { type: "ack" }> => request as never;
const types = (messages: readonly (readonly [unknown, unknown])[]): string[] => messages.map(([header]) => checkVersion(header).type);

describe("what a page carries", () => {
  const recorded = new SavedRecording(packed());
  const progress = recorded.state.progress;

  it("gives each pass's figures, sparklines and histograms as a frame", () => {
    for (let at = 0; at < COUNT; at++) {
      const [header, buffer] = recorded.frame(at, 2, { seq: 1, held: true, progress });
      expect(checkVersion(header)).toEqual(header);
      const frame = decodeFrame(header, buffer);
      expect(statistic(frame, 4, 1, "neginf")).toBe(at + 1);
      expect([...new Set(frame.sparklines)]).toEqual([at]);
      const pairs = frame.histograms.get("2/0");
      expect(pairs && [...pairs]).toEqual([[0x3fe, 70_000, 0x400, 3], undefined, [9, 2 ** 32 - 1]][at]);
      expect([header.number, header.step, header.metrics]).toEqual([[0, 4, 5][at], [0, 10, 11][at], { loss: at }]);
    }
  });

  it("gives the parameters of a row with details, as far as each pass has them", () => {
    const of = (at: number): FrameData => decodeFrame(...recorded.frame(at, 2, { seq: 1, held: true, progress }));
    expect(of(0).parameters.map(({ name, update_ratio }) => [name, update_ratio])).toEqual([["kernel", 0.5]]);
    expect([0, 1].map((j) => [...of(0).parameters[0].measured[j]!.pairs])).toEqual([[0, 5], [0, 8]]); // prettier-ignore
    expect(of(0).parameters[0].measured[1]!.figures.mean).toBe((STATISTICS.length + 1) * COUNT);
    expect([of(1).parameters[0].update_ratio, of(1).parameters[0].measured[1]]).toEqual([null, null]);
    expect([of(0).header.more, of(2).header.more, of(2).parameters]).toEqual([2, 0, []]);
    expect(rowStatistic(of(1), 2, "parameter_norm")).toBe((2 * ROW_STATS.length + ROW_STATS.indexOf("parameter_norm")) * COUNT + 1);
    expect(decodeFrame(...recorded.frame(0, 4, { seq: 1, held: true, progress })).parameters).toEqual([]);
  });

  it("gives a buffer of numbers and bytes as it was, bit by bit", () => {
    const bits = new Float64Array(Uint8Array.from([1, 2, 3, 4, 5, 6, 0xf7, 0xff]).buffer); // a NaN
    const parts = (packing: Packing): object[] => [packing.add(bits, "f8"), packing.add(Uint8Array.from([7, 8, 9]), "u1")];
    const found = new SavedRecording(packed((packing) => ({ answers: { units: [["head", { header: {}, buffer: parts(packing) }]] } })));
    const [, buffer] = found.answer("units", "head") as [unknown, DataView];
    expect([...new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength)]).toEqual([1, 2, 3, 4, 5, 6, 0xf7, 0xff, 7, 8, 9]);
  });

  it("has no histogram of a site without details, and its figures", () => {
    const [header, buffer] = recorded.frame(1, 4, { seq: 1, held: false, progress });
    expect(header.histograms).toEqual([]);
    expect(statistic(decodeFrame(header, buffer), 4, 0, "mean")).toBe(2);
  });

  it("says which part of the selected site was opened last", () => {
    expect(recorded.opened()).toBeUndefined();
    const keys = [["head", "output", false], ["head", "attention", false], ["head", "gradient", true], [1, [0, 0], [-1, 0, 1], -1, "value"], ["blocks/0", "input", false]]; // prettier-ignore
    const values = keys.map((key) => [JSON.stringify(key), { error: "" }]);
    expect(new SavedRecording(packed({ answers: { values }, state: state({ selected: "head" }) })).opened()).toBe("attention");
  });

  it("puts a message together of exact numbers and shades", () => {
    const [[header, buffer]] = recorded.histories(2);
    const { quantiles, fractions } = decodeHistory(header as History, buffer);
    expect([quantiles[0], fractions[0], fractions.length]).toEqual([7, 0.25, HISTORY_BINS]);
    expect(recorded.histories(4)).toEqual([]);
  });

  it.each([
    ["empty", new Uint8Array(2)],
    ["cut off in its index", packed().subarray(0, 40)],
    ["cut off in its numbers", packed().subarray(0, packed().length - 1)],
    ["of another version", packed({ version: VERSION + 1 })],
    ["with an array of another length", packed({ sparklines: { at: 0, count: 3, type: "u1" } })],
    ["with an array before its beginning", packed({ library: { at: -8, count: 8, type: "u1" }, table: { at: -8, count: 300, type: "f8" } })],
    ["of an unknown type", packed({ counts: { at: 0, count: 3, type: "i9" } })],
    ["with histograms that do not fit", packed({ counts: { at: 0, count: 2, type: "u1" } })],
  ])("is refused where it is %s", (_, bytes) => {
    expect(() => new SavedRecording(bytes)).toThrow(/recording|layout/);
  });
});

describe("the kernel that it plays", () => {
  const replay = (): Replay => new Replay(new SavedRecording(packed()));

  it("says everything to a hello", () => {
    const { messages, error } = replay().answer(ask({ type: "hello", version: VERSION, streams: true, page: "" }));
    expect(error).toBe("");
    expect(types(messages)).toEqual(["layout", "findings", "passes", "curves", "state", "frame", "history"]);
    expect((messages[5][0] as Frame).number).toBe(5);
  });

  it("selects a site, and refuses one that there is not", () => {
    const one = replay();
    const { messages } = one.answer(ask({ type: "select", id: 1, site: "head" }));
    expect(messages[0][0]).toMatchObject({ type: "state", selected: "head" });
    expect(types(messages)).toEqual(["state", "frame"]);
    expect(one.answer(ask({ type: "select", id: 2, site: "nowhere" })).error).toContain("nowhere");
  });

  it("shows an older pass, and says where there is none", () => {
    const { messages } = replay().answer(ask({ type: "show_pass", id: 1, number: 4, site: "blocks/0" }));
    expect(messages[0][0]).toMatchObject({ type: "frame", number: 4, held: true, histograms: [] });
    expect(replay().answer(ask({ type: "show_pass", id: 1, number: 3, site: "" })).error).toContain("Pass 3");
  });

  it("gives what was kept of a site under the request's number, or the error that was kept", () => {
    const look = (site: string) => replay().answer(ask({ type: "look", id: 9, what: "code", site, axis: -1 }));
    expect(look("blocks/0").messages[0][0]).toMatchObject({ type: "code", id: 9 });
    expect(look("head")).toEqual({ messages: [], error: "It failed." });
    expect(look("blocks/1").error).toContain("does not keep");
    expect(look("__proto__").error).toContain("does not keep");
  });

  it("refuses what needs the model", () => {
    const requests = [
      { type: "perturb", id: 1, site: "head", kind: "Zero", strength: null, at: "output" },
      { type: "adjust", id: 1, perturbation: 1, enabled: true, strength: null },
      { type: "switch_all", id: 1, enabled: true },
      { type: "start_sweep", id: 1, sites: "**", kind: "Zero", strength: null, at: "output" },
      { type: "switch_mode", id: 1, module: "", name: "deterministic", value: true },
    ];
    for (const request of requests) expect(replay().answer(ask(request))).toEqual({ messages: [], error: NEEDS_MODEL });
    expect(replay().answer(ask({ type: "show_values", id: 1, site: "", part: "output", clean: false })).error).toContain("keeps only the values that were open");
    expect(replay().answer(ask({ type: "compare", id: 1, number: 0, pinned: 7 })).error).toContain("keeps only the comparisons");
  });

  it("answers with the values and comparisons that were on screen, whatever window is asked for", () => {
    const arrays = { type: "arrays", version: VERSION, request: 5, site: "a\"b", part: "output", clean: false, parts: ["output"], arrays: [], perturbed: false, source: "", notes: [] };
    const values = { type: "values", version: VERSION, request: 6, array: 3, index: [0, 2, 0], axes: [-1, 0, 2], norm_over: -1, component: "value", exact: false, starts: [0, 0, 0], ends: [1, 4, 4], block: [1, 1, 1], counts: [1, 4, 4], planes: ["value"], encoding: "float32" };
    const compared = { type: "compared", version: VERSION, id: 9, number: 2, pinned: 0, rows: [], total: 0 };
    const one = (header: object): object => ({ header, buffer: [] });
    const answers = {
      values: [['["a\\"b","output",false]', one(arrays)], ['[3,[0,2,0],[-1,0,2],-1,"value"]', one(values)]],
      compare: [["2 0", one(compared)]],
    };
    const page = new Replay(new SavedRecording(packed({ answers })));
    const read = { type: "read_values", id: 12, array: 3, index: [1, 2, 3], axes: [-1, 0, 2], starts: [0, 1, 1], ends: [1, 2, 2], most: [1, 9, 9], norm_over: -1, component: "value", exact: false };
    const header = (request: object): unknown => page.answer(ask(request)).messages[0]?.[0];
    expect(header({ type: "show_values", id: 11, site: 'a"b', part: "output", clean: false })).toEqual({ ...arrays, request: 11 });
    expect(header(read)).toEqual({ ...values, request: 12 });
    expect(header({ ...read, index: [1, 1, 3] })).toBeUndefined();
    expect(page.answer(ask({ ...read, exact: true }))).toEqual({ messages: [], error: "" });
    expect(header({ type: "compare", id: 13, number: 2, pinned: 0 })).toEqual({ ...compared, id: 13 });
  });

  it("answers after the call that asks, messages first, with one reply", async () => {
    const { control, stream } = replayComms(new SavedRecording(packed()));
    const heard: string[] = [];
    for (const model of [control, stream]) model.on("msg:custom", (content) => heard.push((content as { type: string }).type));
    control.send({ type: "get_layout_library", id: 3 });
    expect(heard).toEqual([]);
    await settle();
    expect(heard).toEqual(["layout_library", "reply"]);
  });
});

describe("the page", () => {
  const place = document.createElement("div");
  let end = (): void => undefined;
  document.body.append(place);
  afterEach(() => end());
  const find = (id: string): HTMLElement | null => place.querySelector<HTMLElement>(`[data-testid="${id}"]`);

  it("unpacks what Python deflated", async () => {
    const bytes = packed();
    expect(await gunzip(`\n${gzipSync(bytes).toString("base64")}\n`)).toEqual(bytes);
    await expect(gunzip(gzipSync(bytes).toString("base64").slice(0, 400))).rejects.toThrow();
  });

  it("shows the last state and says what it is", async () => {
    end = showRecording(new SavedRecording(packed({ missing: ["values"], state: state({ perturbations: [perturbation(1, "head")] }) })), place);
    await settle();
    expect(find("nni-selected")?.dataset["value"]).toBe("blocks/0");
    expect(find("nni-stat-output-mean")?.dataset["value"]).toBe("3");
    expect(find("nni-banner")?.textContent).toContain("Saved just now.");
    expect(find("nni-switch")?.hasAttribute("disabled")).toBe(true);
    for (const absent of ["nni-perturb", "nni-remove", "nni-switch-all", "nni-add-here", "nni-tab-values"]) expect(find(absent)).toBeNull();
  });

  it("takes hostile names for text", async () => {
    const sites = [site("", -1, { name: EVIL[0] }), ...EVIL.map((text) => site(text, 0, { name: text, kind: text, source: text }))];
    end = showRecording(new SavedRecording(packed({ note: EVIL[0], detailed: [], parameters: [], more: [], figures: NONE, ratios: NONE, lengths: { at: 0, count: 0, type: "u2" }, counts: { at: 0, count: 0, type: "u1" } }, sites)), place);
    await settle();
    const allowed = new Set("a b button circle code dd div dl dt figcaption figure footer form g h3 h4 header input label li line option p path rect section select small span strong svg table tbody td text th thead tr ul canvas ol summary details bdi main kbd".split(" "));
    expect([...place.querySelectorAll("*")].map((e) => e.localName).filter((name) => !allowed.has(name))).toEqual([]);
    expect("hacked" in window).toBe(false);
    expect(find("nni-banner")?.textContent).toContain(EVIL[0]);
  });
});
