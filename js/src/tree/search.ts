// The search in the tree: words separated by spaces, all of which must match a site. A word is a
// dtype and shape (`float32[*,64]`, `[8,**]`), a glob over the path like Python's `only=` (a word
// with a star), or part of a path, name or type.
// Invariant: only the site's own text decides; case matters in globs only.
import type { Site } from "../kernel/protocol";

type SiteTest = (site: Site) => boolean;

const SHAPE = /^((?:b?float|bf|f|u?int|u|i|complex|c|bool|key)[\w<>]*)?\[([\d*,.\s]*)\]$/i;

export function parseQuery(query: string): SiteTest | null {
  const tests = query.trim().split(/\s+/).filter(Boolean).map(wordTest);
  return tests.length === 0 ? null : (site) => tests.every((test) => test(site));
}

function wordTest(word: string): SiteTest {
  const shape = SHAPE.exec(word);
  if (shape) return shapeTest(shape[1] ?? "", shape[2]);
  if (word.includes("*")) return globTest(word);
  const part = word.toLowerCase();
  return (site) => `${site.key}\n${site.name}\n${site.kind}\n${site.aliases.join("\n")}`.toLowerCase().includes(part);
}

function shapeTest(dtype: string, dims: string): SiteTest {
  const wanted = dims.split(",").map((d) => d.trim()).filter(Boolean); // prettier-ignore
  const name = longName(dtype.toLowerCase());
  return (site) => {
    for (const found of site.output.matchAll(/([\w<>]+)\[([\d,]*)\]/g)) {
      if (name !== "" && found[1].toLowerCase() !== name) continue;
      if (matchSequence(wanted, found[2] === "" ? [] : found[2].split(","), (w, d) => w === "*" || w === d)) return true;
    }
    return false;
  };
}

/** The tree's short form f32 means float32. */
function longName(dtype: string): string {
  const short = /^(bf|f|u|i|c)(\d+)$/.exec(dtype);
  if (!short) return dtype;
  return `${{ bf: "bfloat", f: "float", u: "uint", i: "int", c: "complex" }[short[1]]}${short[2]}`;
}

function globTest(pattern: string): SiteTest {
  const parts = segments(pattern);
  const memo = new Map<string, RegExp>();
  const one = (wanted: string, segment: string): boolean => {
    let test = memo.get(wanted);
    if (!test) {
      test = new RegExp(`^${wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".")}$`, "s");
      memo.set(wanted, test);
    }
    return test.test(segment);
  };
  return (site) => [site.key, ...site.aliases].some((key) => matchSequence(parts, segments(key), one));
}

function segments(key: string): string[] {
  return key === "" ? [] : key.split(/(?<!\\)\//);
}

/** `*` (or `one`) matches one item, `**` any number; `...` is NumPy's form of `**`. */
function matchSequence(wanted: readonly string[], found: readonly string[], one: (wanted: string, found: string) => boolean): boolean {
  if (wanted.length === 0) return found.length === 0;
  const [first, ...rest] = wanted;
  if (first === "**" || first === "...") {
    return matchSequence(rest, found, one) || (found.length > 0 && matchSequence(wanted, found.slice(1), one));
  }
  return found.length > 0 && one(first, found[0]) && matchSequence(rest, found.slice(1), one);
}
