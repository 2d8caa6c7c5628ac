// Checks a message against the generated table of shapes, field by field, like `from_header` in
// Python. Invariant: a message from `toBrowser` has exactly the fields of its type; anything else is
// a `ProtocolError` with a readable text.
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

function check(header: unknown, structs: typeof SHAPES): unknown {
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
  const wrong = checkOf(type, structs)(fields);
  if (wrong !== "") throw new ProtocolError(`${type}${wrong}.`);
  return header;
}

/** Returns "" or an error that starts with the path of the field; only errors build paths. */
type Check = (value: unknown) => string;

// Made once per shape, because a layout of 10,000 sites has 170,000 fields.
const checks = new Map<string, Check>();

function checkOf(expected: string, structs = SHAPES): Check {
  let found = checks.get(expected);
  if (!found) checks.set(expected, (found = structs[expected] ? struct(structs[expected]) : newCheck(expected)));
  return found;
}

function newCheck(expected: string): Check {
  switch (expected) {
    case "str":
      return (value) => (typeof value === "string" ? "" : mismatch(expected, value));
    case "bool":
      return (value) => (typeof value === "boolean" ? "" : mismatch(expected, value));
    case "int":
      return (value) => (Number.isInteger(value) ? "" : mismatch(expected, value));
    case "float":
      return (value) => (Number.isFinite(value) ? "" : mismatch(expected, value));
  }
  if (expected.endsWith("?")) {
    const present = checkOf(expected.slice(0, -1));
    return (value) => (value === null ? "" : present(value));
  }
  if (expected.endsWith("[]")) return listOf(checkOf(expected.slice(0, -2)));
  if (expected.endsWith("{}")) return mapOf(checkOf(expected.slice(0, -2)));
  return oneOf(expected.split("|"));
}

function listOf(item: Check): Check {
  return (value) => {
    if (!Array.isArray(value)) return ` must be a list, got ${nameOf(value)}`;
    for (let i = 0; i < value.length; i++) {
      const wrong = item(value[i]);
      if (wrong !== "") return `[${i}]${wrong}`;
    }
    return "";
  };
}

function mapOf(item: Check): Check {
  return (value) => {
    if (!isObject(value)) return ` must be an object, got ${nameOf(value)}`;
    for (const key in value) {
      const wrong = item(value[key]);
      if (wrong !== "") return `[${JSON.stringify(key)}]${wrong}`;
    }
    return "";
  };
}

function oneOf(words: readonly string[]): Check {
  return (value) => {
    if (typeof value === "string" && words.includes(value)) return "";
    return ` must be ${words.map((word) => `'${word}'`).join(" or ")}, got ${JSON.stringify(value)}`;
  };
}

function struct(shapes: Readonly<Record<string, string>>): Check {
  const all = Object.entries(shapes).flatMap(([shape, names]) => names.split(" ").map((name) => [name, checkOf(shape)] as const));
  const [names, fields] = [all.map(([name]) => name), all.map(([, field]) => field)];
  // indices instead of iterators: the first layout is checked before any code is optimised
  return (value) => {
    if (!isObject(value)) return ` must be an object, got ${nameOf(value)}`;
    for (let i = 0; i < names.length; i++) {
      const field = value[names[i]];
      if (field === undefined || !Object.hasOwn(value, names[i])) return ` lacks ${names[i]}`;
      const wrong = fields[i](field);
      if (wrong !== "") return `.${names[i]}${wrong}`;
    }
    const has = Object.keys(value);
    if (has.length === names.length) return "";
    return ` has an unknown field ${has.find((field) => !names.includes(field))}`;
  };
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
