// Checks a message against the generated table of shapes, field by field, as `from_header` does in
// Python. Invariant: what `toBrowser` returns has exactly the fields of its type; anything else is
// a `ProtocolError` whose text a person can read.
import { SHAPES, TO_BROWSER, TO_KERNEL, VERSION, type ToBrowser, type ToKernel } from "./protocol";

export class ProtocolError extends Error {
  override name = "ProtocolError";
}

export function toBrowser(header: unknown): ToBrowser {
  return check(header, TO_BROWSER) as ToBrowser;
}

export function toKernel(header: unknown): ToKernel {
  return check(header, TO_KERNEL) as ToKernel;
}

function check(header: unknown, structs: Readonly<Record<string, string>>): unknown {
  if (!isObject(header)) throw new ProtocolError(`A message must be an object, got ${nameOf(header)}.`);
  const { type, ...fields } = header;
  if (typeof type !== "string" || !Object.hasOwn(structs, type)) {
    throw new ProtocolError(`Unknown message type ${JSON.stringify(type)}.`);
  }
  if ("version" in fields && fields["version"] !== VERSION) {
    throw new ProtocolError(
      `The kernel speaks version ${String(fields["version"])} of the protocol and this view version ` +
        `${VERSION}: restart the kernel, reload the page and run the cell again.`,
    );
  }
  const wrong = struct(structs[type], fields);
  if (wrong !== "") throw new ProtocolError(`${type}${wrong}.`);
  return header;
}

// Both give "" or what is wrong, beginning with the way to it: paths are built only for errors,
// because a layout of 10,000 sites has 150,000 fields.

function struct(name: string, value: unknown): string {
  if (!isObject(value)) return ` must be an object, got ${nameOf(value)}`;
  const fields = SHAPES[name];
  let known = 0;
  for (const field in fields) {
    if (!Object.hasOwn(value, field)) return ` lacks ${field}`;
    const wrong = shape(fields[field], value[field]);
    if (wrong !== "") return `.${field}${wrong}`;
    known += 1;
  }
  const names = Object.keys(value);
  if (names.length === known) return "";
  return ` has an unknown field ${names.find((field) => !Object.hasOwn(fields, field))}`;
}

function shape(expected: string, value: unknown): string {
  switch (expected) {
    case "str":
      return typeof value === "string" ? "" : mismatch(expected, value);
    case "bool":
      return typeof value === "boolean" ? "" : mismatch(expected, value);
    case "int":
      return Number.isInteger(value) ? "" : mismatch(expected, value);
    case "float":
      return Number.isFinite(value) ? "" : mismatch(expected, value);
  }
  if (expected.endsWith("?")) return value === null ? "" : shape(expected.slice(0, -1), value);
  const item = expected.slice(0, -2);
  if (expected.endsWith("[]")) {
    if (!Array.isArray(value)) return ` must be a list, got ${nameOf(value)}`;
    for (let i = 0; i < value.length; i++) {
      const wrong = shape(item, value[i]);
      if (wrong !== "") return `[${i}]${wrong}`;
    }
    return "";
  }
  if (expected.endsWith("{}")) {
    if (!isObject(value)) return ` must be an object, got ${nameOf(value)}`;
    for (const key in value) {
      const wrong = shape(item, value[key]);
      if (wrong !== "") return `[${JSON.stringify(key)}]${wrong}`;
    }
    return "";
  }
  if (!expected.includes("|")) return struct(expected, value);
  const words = expected.split("|");
  if (typeof value === "string" && words.includes(value)) return "";
  return ` must be ${words.map((word) => `'${word}'`).join(" or ")}, got ${JSON.stringify(value)}`;
}

function mismatch(expected: string, value: unknown): string {
  return ` must be ${expected}, got ${nameOf(value)}`;
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function nameOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  return typeof value === "number" ? String(value) : typeof value;
}
