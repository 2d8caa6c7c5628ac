// The golden messages, which pytest reads too: both sides decode and re-encode them.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, it } from "vitest";
import { decodeChoices, decodeCurves, decodeFrame, decodeHistory, decodeUnits, decodeUpdates, decodeCounts, rowStatistic, statistic } from "../../src/kernel/decode";
import { HISTORY_BINS, SPARK, STATISTICS, type Choices, type Curves, type Frame, type History, type Updates } from "../../src/kernel/protocol";
import { ProtocolError, checkVersion } from "../../src/kernel/version";
import { units } from "../helpers/messages";

const folder = join(import.meta.dirname, "../golden");
const read = (name: string): Record<string, unknown> => JSON.parse(readFileSync(join(folder, `${name}.json`), "utf8"));

/** At an odd offset, as a message's buffer may lie. */
function buffer(name: string, offset = 3): DataView {
  const bytes = readFileSync(join(folder, `${name}.bin`));
  const moved = new Uint8Array(offset + bytes.length);
  moved.set(bytes, offset);
  return new DataView(moved.buffer, offset, bytes.length);
}

function bytes(...arrays: (Float64Array | Uint8Array)[]): Buffer {
  return Buffer.concat(arrays.map((a) => Buffer.from(a.buffer, a.byteOffset, a.byteLength)));
}

describe("golden messages", () => {
  it.each([0, 3, 8])("frame decodes at byte offset %i and re-encodes", (offset) => {
    const header = checkVersion(read("frame")) as Frame;
    const frame = decodeFrame(header, buffer("frame", offset));
    expect(statistic(frame, 0, 0, "mean")).toBe(1 / 8);
    expect(statistic(frame, 1, 0, "size")).toBe(22 / 8);
    expect(statistic(frame, 1, 1, "neginf")).toBeNaN();
    expect([...frame.histograms.get("1/0")!]).toEqual([8, 6, 1016, 10]); // of 8 more, which are in no bin
    expect([...frame.histograms.get("1/1")!]).toEqual([3064, 2]);
    expect(frame.sparklines[SPARK + 1]).toBe(SPARK + 1);
    const whole = readFileSync(join(folder, "frame.bin"));
    const [first, second] = frame.parameters;
    expect([first.name, first.update_ratio, first.measured[1]!.figures.size]).toEqual(["kernel", 0.001, 11 / 8]);
    expect([...first.measured[0]!.pairs]).toEqual([8, 6, 1016, 10]);
    expect([second.name, second.update_ratio, second.measured[0]!.figures.mean, second.measured[1]]).toEqual(["<b>", null, 23 / 8, null]);
    expect([...second.measured[0]!.pairs]).toEqual([3064, 2]);
    expect(rowStatistic(frame, 1, "parameter_norm")).toBe(6 / 8);
    const tables = whole.subarray(0, frame.table.byteLength + frame.rows.byteLength);
    expect(bytes(frame.table, frame.rows).equals(tables)).toBe(true);
    const after = tables.length + 2 * 2 * STATISTICS.length * 8;
    expect(bytes(frame.sparklines).equals(whole.subarray(after, after + frame.sparklines.length))).toBe(true);
  });

  it("history decodes and re-encodes", () => {
    const h = decodeHistory(checkVersion(read("history")) as History, buffer("history"));
    expect([...h.steps]).toEqual([5, 7]);
    expect(h.quantiles[7]).toBe(7 / 8);
    expect(h.edges[HISTORY_BINS]).toBe(HISTORY_BINS / 8);
    expect(bytes(h.steps, h.quantiles, h.edges, h.fractions).equals(readFileSync(join(folder, "history.bin")))).toBe(true);
  });

  it("updates decode and re-encode", () => {
    const u = decodeUpdates(checkVersion(read("updates")) as Updates, buffer("updates"));
    expect([...u.ratios[0]]).toEqual([0, 1 / 8]);
    expect([...u.lost[0]]).toEqual([1, 7 / 8]);
    expect(bytes(u.steps, ...u.ratios, ...u.lost).equals(readFileSync(join(folder, "updates.bin")))).toBe(true);
  });

  it("choices decode and re-encode", () => {
    const c = decodeChoices(checkVersion(read("choices")) as Choices, buffer("choices"));
    expect([...c.figures[1]![0]!]).toEqual([6 / 8, 7 / 8, 1]);
    expect(bytes(c.steps, ...c.figures.flat()).equals(readFileSync(join(folder, "choices.bin")))).toBe(true);
  });

  it("curves decode and re-encode", () => {
    const curves = decodeCurves(checkVersion(read("curves")) as Curves, buffer("curves"));
    expect(curves.map((c) => c.name)).toEqual(["loss", "accuracy"]);
    expect([...curves[0].points]).toEqual([1, 0.5, 2, NaN, 3, 0.25]);
    expect(bytes(...curves.map((c) => c.points)).equals(readFileSync(join(folder, "curves.bin")))).toBe(true);
  });
});

describe("counts of a summary", () => {
  const bins = (counts: number[], low = -8, high = 8): number[] => [...decodeCounts(Uint8Array.from(counts), low, high)];

  it("are read with the bins that are left out, whatever their size", () => {
    expect(bins([])).toEqual([]);
    expect(bins([7, 1, 0, 0x85, 1, 2])).toEqual([0, 7, 1, 1, 135, 2]);
    expect(bins([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f])).toEqual([0, 2 ** 53 - 1]);
  });

  it("leave out NaN, Inf and what has no figures, and have zeros with the subnormals", () => {
    // +Inf, +0, without figures, (unseen), NaN; -Inf, -0
    expect(bins([0, 0xf8, 0x0f, 1, 2, 4, 0, 4, 8, 0, 0xf8, 0x0f, 16, 32])).toEqual([0, 34]);
  });

  it("of a sample are scaled up, but not zeros", () => {
    expect(bins([0, 1, 3, 1, 0, 0xf6, 0x0f, 5, 0, 1, 8])).toEqual([1, 9, 2, 3, 0, 5]);
  });

  it("of a sample without a nonzero value are at both ends of the range", () => {
    const unseen = [0, 0xfb, 0x0f, 6];
    expect(bins(unseen, -1, 1)).toEqual([0xbf8, 3, 0x3f8, 3]);
    expect(bins(unseen, -1e300, 1e300)).toEqual([0xff7, 3, 0x7f7, 3]);
    expect(bins(unseen, NaN, NaN)).toEqual([]);
  });

  it("that are cut off do not hang", () => {
    expect(bins([0x80])).toEqual([]);
    expect(bins([5, 0])).toEqual([0, 5]);
  });
});

describe("messages that do not fit", () => {
  it("says what to do about another version", () => {
    expect(() => checkVersion({ ...read("layout"), version: 99 })).toThrow(/version 99 .* restart the kernel/);
  });

  it("refuses buffers of another length", () => {
    const header = checkVersion(read("history")) as History;
    const whole = buffer("history", 0);
    expect(() => decodeHistory(header, undefined)).toThrow(ProtocolError);
    expect(() => decodeHistory(header, new DataView(whole.buffer, 0, whole.byteLength - 8))).toThrow(ProtocolError);
    expect(() => decodeHistory({ ...header, steps: 1 }, whole)).toThrow(ProtocolError);
    expect(() => decodeFrame(checkVersion(read("frame")) as Frame, new DataView(new ArrayBuffer(10)))).toThrow(ProtocolError);
  });

  it("counts the bytes of a buffer of another length", () => {
    const [header, buffer] = units(4);
    expect(() => decodeUnits({ ...header, units: 5 }, buffer)).toThrow("The buffer of units has 256 bytes, 320 were expected.");
  });
});
