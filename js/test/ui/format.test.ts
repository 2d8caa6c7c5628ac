// Numbers as a person reads them.
import { expect, it } from "vitest";
import { bytes, compact, count, exact, percent, real, seconds, shortType, signed, tick } from "../../src/ui/format";

it.each([
  [NaN, "–"], [null, "–"], [0, "0"], [Infinity, "∞"], [-Infinity, "−∞"], [3, "3"], [-0.5, "−0.5000"],
  [1234.5678, "1235"], [123456, "1.235e5"], [-0.000012345, "−1.234e−5"], [0.1 + 0.2, "0.3000"],
] as const)("real(%s) is %s", (value, text) => expect(real(value)).toBe(text)); // prettier-ignore

it.each([[NaN, "–"], [Infinity, "∞"], [-Infinity, "−∞"], [0, "0"], [-2e6, "−2e6"], [0.25, "0.25"]] as const)(
  "tick(%s) is %s, on the axis of a value that was never finite too",
  (value, text) => expect(tick(value)).toBe(text),
);

it("counts, shares, sizes and times", () => {
  expect(count(1234567)).toBe("1\u202f234\u202f567");
  expect(count(NaN)).toBe("–");
  expect(compact(1_530_000)).toBe("1.53\u202fM");
  expect(compact(12)).toBe("12");
  expect(percent(0.1234)).toBe("12.3\u202f%");
  expect(percent(NaN)).toBe("–");
  expect(bytes(2048)).toBe("2.05\u202fkB");
  expect(seconds(0.0123)).toBe("12.3\u202fms");
  expect(signed(0.5)).toBe("+0.5000");
  expect(exact(0.1 + 0.2)).toBe("0.30000000000000004");
  expect(shortType("bfloat16[8,4], uint8[3]")).toBe("bf16[8,4], u8[3]");
});
