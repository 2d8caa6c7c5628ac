// How the files of src/ hang together, read from their import lines.
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path/posix";
import { expect, it } from "vitest";

const SOURCE = join(import.meta.dirname, "../src");
const IMPORT = /^@?import (type )?[^;]*?"(\.[^"]+)";$/gm;

type Graph = ReadonlyMap<string, ReadonlySet<string>>;

const files = (readdirSync(SOURCE, { recursive: true }) as string[]).filter((name) => /\.(tsx?|css)$/.test(name));

/** What each file imports: with, or without, what it imports only types of. */
function imports(types: boolean): Graph {
  const graph = files.map((name) => {
    const lines = [...readFileSync(join(SOURCE, name), "utf8").matchAll(IMPORT)];
    return [name, new Set(lines.filter(([, type]) => types || !type).map(([, , to]) => found(join(dirname(name), to))))] as const;
  });
  return new Map(graph);
}

function found(path: string): string {
  const name = ["", ".ts", ".tsx"].map((end) => path + end).find((name) => existsSync(join(SOURCE, name)) && name.includes("."));
  if (name === undefined) throw new Error(`There is no ${path}.`);
  return name;
}

/** The first way that leads back to where it began; empty where there is none. */
function cycle(graph: Graph): string[] {
  const done = new Set<string>();
  const walk = (name: string, way: readonly string[]): string[] => {
    if (way.includes(name)) return [...way.slice(way.indexOf(name)), name];
    if (done.has(name)) return [];
    const round = [...(graph.get(name) ?? [])].map((to) => walk(to, [...way, name])).find((one) => one.length > 0);
    done.add(name);
    return round ?? [];
  };
  return [...graph.keys()].map((name) => walk(name, [])).find((one) => one.length > 0) ?? [];
}

it("no file imports itself on a way round, not even for a type", () => {
  expect(files.length).toBeGreaterThan(100);
  expect(cycle(imports(true))).toEqual([]);
});

it("no folder does but for types, and kernel/ and ui/ are below all others", () => {
  const folders = new Map<string, Set<string>>();
  for (const [name, to] of imports(false)) {
    const from = name.split("/")[0];
    const others = [...to].map((one) => one.split("/")[0]).filter((one) => one !== from);
    folders.set(from, new Set([...(folders.get(from) ?? []), ...others]));
  }
  expect(cycle(folders)).toEqual([]);
  expect([...folders.get("kernel")!]).toEqual([]);
  expect([...folders.get("ui")!].filter((name) => name !== "kernel")).toEqual([]);
});

it("every file is in a bundle", () => {
  const entries = [...readFileSync(join(SOURCE, "../build.mjs"), "utf8").matchAll(/in: "src\/([^"]+)"/g)].map(([, name]) => name);
  const graph = imports(true);
  const reached = new Set(entries);
  for (const name of reached) for (const to of graph.get(name)!) reached.add(to);
  expect(files.filter((name) => !reached.has(name))).toEqual([]);
});

it("a folder has a dozen files at most", () => {
  const crowded = files.map(dirname).filter((folder, _, all) => all.filter((one) => one === folder).length > 12);
  expect([...new Set(crowded)]).toEqual([]);
});
