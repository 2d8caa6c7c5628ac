// The size of an array that is described in words.

/** How many values "float32[64,8,8,24]" has, and the bytes of each; null if it is not one array of whole bytes. */
export function sizeOf(text: string): readonly [values: number, bytes: number] | null {
  const found = /^(bool|bfloat16|(?:float|u?int|complex)(\d+)\w*)\[([\d,]*)\]$/.exec(text);
  if (!found) return null;
  const bits = found[1] === "bool" ? 8 : found[1] === "bfloat16" ? 16 : Number(found[2]);
  if (bits % 8 !== 0) return null;
  return [found[3]!.split(",").reduce((size, length) => size * (length === "" ? 1 : Number(length)), 1), bits / 8];
}
