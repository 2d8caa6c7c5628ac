// Masks of units: their bits, and one request at a time for them.
import { describe, expect, it, vi } from "vitest";
import type { Perturbation } from "../../src/kernel/protocol";
import { MaskRequests, findMask, fromHex, toHex } from "../../src/masks/requests";
import { MockKernel } from "../helpers/kernel";
import { perturbation } from "../helpers/messages";

describe("bits", () => {
  it("go to hexadecimal and back, unit 0 the highest bit", () => {
    const mask = Uint8Array.from([1, 0, 1, 1, 1, 1, 1, 1, 1, 0]);
    expect(toHex(mask)).toBe("bf80");
    expect(fromHex("bf80", 10)).toEqual(mask);
    for (const length of [1, 7, 8, 9, 64, 1000]) {
      const any = Uint8Array.from({ length }, (_, i) => (i * 7 + length) % 3 === 0 ? 1 : 0);
      expect(fromHex(toHex(any), length)).toEqual(any);
    }
  });
});

const A = { site: "a", units: 8, axis: -1, columns: 0 };

describe("mask requests", () => {
  const mask = (id: number, hex: string): Perturbation => perturbation(id, "a", { kind: "Mask", units: 8, mask: hex });

  it("adds one, then sets it; one request at a time, and the newest wish follows", () => {
    const kernel = new MockKernel();
    let all: Perturbation[] = [];
    const masks = new MaskRequests(kernel, () => all, () => undefined);
    expect(toHex(masks.maskOf(A))).toBe("ff");
    masks.set(A, fromHex("7f", 8));
    masks.set(A, fromHex("3f", 8));
    masks.set(A, fromHex("1f", 8));
    expect(kernel.asked).toEqual([{ type: "set_mask", perturbation: null, site: "a", units: 8, mask: "7f", axis: -1, columns: 0 }]);
    expect(toHex(masks.maskOf(A)), "shown at once").toBe("1f");
    kernel.settles[0](null);
    expect(kernel.asked, "its number is not known yet").toHaveLength(1);
    all = [mask(5, "7f")];
    masks.settle();
    expect(kernel.asked[1]).toEqual({ type: "set_mask", perturbation: 5, site: "a", units: 8, mask: "1f", axis: -1, columns: 0 });
    kernel.settles[1](null);
    all = [mask(5, "1f")];
    masks.settle();
    expect(toHex(masks.maskOf(A))).toBe("1f");
    expect(masks.wish.value).toBeNull();
  });

  it("takes the wish back where it cannot be", () => {
    const kernel = new MockKernel();
    const failed = vi.fn();
    const masks = new MaskRequests(kernel, () => [], failed);
    masks.set(A, fromHex("00", 8));
    kernel.settles[0]("it does not fit");
    expect(failed).toHaveBeenCalledWith("it does not fit", "a");
    expect(toHex(masks.maskOf(A))).toBe("ff");
  });

  it("edits a mask of this site's output, of this length", () => {
    const all = [mask(1, ""), { ...mask(2, "ff"), at: "input" as const }, { ...mask(3, "ff"), units: 9 }, { ...mask(4, "ff"), site: "b" }, { ...mask(6, "ff"), columns: 4 }, mask(5, "ff")];
    expect(findMask(all, A)?.id).toBe(5);
  });
});
