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
  struct(structs[type], fields, type);
  return header;
}

function struct(name: string, value: unknown, where: string): void {
  if (!isObject(value)) throw new ProtocolError(`${where} must be an object, got ${nameOf(value)}.`);
  const fields = SHAPES[name];
  for (const field in fields) {
    if (!Object.hasOwn(value, field)) throw new ProtocolError(`${where} lacks ${field}.`);
    shape(fields[field], value[field], `${where}.${field}`);
  }
  for (const field in value) {
    if (!Object.hasOwn(fields, field)) throw new ProtocolError(`${where} has an unknown field ${field}.`);
  }
}

function shape(expected: string, value: unknown, where: string): void {
  if (expected.endsWith("?")) {
    if (value !== null) shape(expected.slice(0, -1), value, where);
  } else if (expected.endsWith("[]")) {
    if (!Array.isArray(value)) throw new ProtocolError(`${where} must be a list, got ${nameOf(value)}.`);
    const item = expected.slice(0, -2);
    for (let i = 0; i < value.length; i++) shape(item, value[i], `${where}[${i}]`);
  } else if (expected.endsWith("{}")) {
    if (!isObject(value)) throw new ProtocolError(`${where} must be an object, got ${nameOf(value)}.`);
    const item = expected.slice(0, -2);
    for (const key in value) shape(item, value[key], `${where}[${JSON.stringify(key)}]`);
  } else if (expected === "str" || expected === "bool") {
    const type = expected === "str" ? "string" : "boolean";
    if (typeof value !== type) throw new ProtocolError(`${where} must be ${expected}, got ${nameOf(value)}.`);
  } else if (expected === "int" || expected === "float") {
    const fits = expected === "int" ? Number.isInteger(value) : Number.isFinite(value);
    if (!fits) throw new ProtocolError(`${where} must be ${expected}, got ${nameOf(value)}.`);
  } else {
    struct(expected, value, where);
  }
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function nameOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  return typeof value === "number" ? String(value) : typeof value;
}
