// How the files of src/ hang together, read from their import lines.
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path/posix";
import { expect, it } from "vitest";

const SOURCE = join(import.meta.dirname, "../src");
const IMPORT = /^@?import (type )?[^;]*?"(\.[^"]+)";$/gm;

type Graph = ReadonlyMap<string, ReadonlySet<string>>;

const files = (readdirSync(SOURCE, { recursive: true }) as string[]).filter((name) => /\.(tsx?|css)$/.test(name));

/** What each file imports: from where alone types come is a part of it, or not. */
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

it("leads no file back to itself, not even for a type", () => {
  expect(files.length).toBeGreaterThan(100);
  expect(cycle(imports(true))).toEqual([]);
});
