// Numbers in readable form. Invariants: a number that was not measured is a dash, never "NaN" or 0;
// four significant digits; big counts in groups of three with thin spaces; a true minus sign.

const THIN_SPACE = "\u202f";
export const NOT_MEASURED = "–";

/** A real number, always four significant digits: columns of them do not jitter. */
export function real(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NOT_MEASURED;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    return minus(value.toExponential(3).replace("e+", "e"));
  }
  return minus(Number.isInteger(value) ? String(value) : value.toPrecision(4));
}

/** A short form for an axis. */
export function tick(value: number): string {
  if (value === 0 || !Number.isFinite(value)) return real(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    const [digits, exponent] = value.toExponential(1).split("e");
    return minus(`${trim(digits)}e${exponent.replace("+", "")}`);
  }
  return minus(trim(value.toPrecision(3)));
}

/** Without an exponent, as long as that is at most ten digits: for steps and metrics. */
export function decimal(value: number, digits = 3): string {
  const size = Math.abs(value);
  if (size >= 1e10 || (size < 1e-7 && size > 0) || !Number.isFinite(value)) return digits === 3 ? tick(value) : real(value);
  if (Number.isInteger(value)) return count(value);
  const places = Math.max(digits - 1 - Math.floor(Math.log10(size)), 0);
  return minus(trim(value.toFixed(places)));
}

/** A whole number with all digits. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NOT_MEASURED;
  if (!Number.isFinite(value)) return real(value);
  return minus(Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, THIN_SPACE));
}

/** JAX's own short form, for narrow columns: float32[8,4] -> f32[8,4]. */
export function shortType(text: string): string {
  return text.replace(/\b(b?)(float|uint|int|complex)(\d+)/g, (_, b: string, kind: string, bits: string) => {
    return `${b}${{ float: "f", uint: "u", int: "i", complex: "c" }[kind]}${bits}`;
  });
}

/** A whole number, shortened: 1.23 M. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NOT_MEASURED;
  return scaled(value, ["", "k", "M", "G", "T", "P", "E"]);
}

export function bytes(value: number): string {
  return scaled(value, ["B", "kB", "MB", "GB", "TB"]);
}

export function seconds(value: number | null): string {
  if (value === null) return NOT_MEASURED;
  if (value < 1e-3) return `${trim((value * 1e6).toPrecision(3))}${THIN_SPACE}µs`;
  if (value < 1) return `${trim((value * 1e3).toPrecision(3))}${THIN_SPACE}ms`;
  return `${trim(value.toPrecision(3))}${THIN_SPACE}s`;
}

export function percent(fraction: number | null | undefined): string {
  if (fraction === null || fraction === undefined || Number.isNaN(fraction)) return NOT_MEASURED;
  if (!Number.isFinite(fraction)) return real(fraction);
  const value = fraction * 100;
  const size = Math.abs(value);
  const text = value === 0 ? "0" : size < 0.01 ? real(value) : size < 1000 ? trim(value.toPrecision(3)) : real(value);
  return `${minus(text)}${THIN_SPACE}%`;
}

/** A difference, always with its sign. */
export function signed(value: number): string {
  const text = real(value);
  return value > 0 ? `+${text}` : text;
}

/** Every digit, for `data-value`, in a form that JavaScript and Python both read. */
export function exact(value: number | null | undefined): string {
  return value === null || value === undefined ? "" : String(value);
}

function scaled(value: number, units: string[]): string {
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1000 && unit < units.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  const digits = Number.isInteger(rest) && Math.abs(rest) < 1000 ? String(rest) : trim(rest.toPrecision(3));
  return minus(units[unit] === "" ? digits : `${digits}${THIN_SPACE}${units[unit]}`);
}

function trim(digits: string): string {
  return digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
}

function minus(text: string): string {
  return text.replace(/-/g, "−");
}
