// Bundles the front end into ../nnx_inspector/static or the folder given: src/widget.ts ->
// widget.js, src/widget.css -> widget.css, src/stream.ts -> stream.js, src/flow/layout/arrange.ts ->
// layout.js, which the kernel sends when the first flow is shown, src/page/page.ts -> page.js, the
// script of a saved page, and src/page/saved.ts -> saved.js, which shows one in a saved notebook.
// Invariants: each is one file that loads nothing else, neither from disk nor from the network; the
// licences of what was bundled lie beside them.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { build } from "esbuild";

const outdir = process.argv[2] ?? "../nnx_inspector/static";

const options = {
  metafile: true,
  absWorkingDir: import.meta.dirname,
  preserveSymlinks: true, // else the packages of a linked node_modules have no licences here
  outdir,
  bundle: true,
  minify: true,
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
};

const { metafile } = await build({
  ...options,
  entryPoints: [
    { in: "src/widget.ts", out: "widget" },
    { in: "src/widget.css", out: "widget" },
    { in: "src/stream.ts", out: "stream" },
    { in: "src/flow/layout/arrange.ts", out: "layout" },
  ],
  format: "esm",
});
// a classic script: a module of a page opened from disk would be a foreign one
await build({
  ...options,
  entryPoints: [
    { in: "src/page/page.ts", out: "page" },
    { in: "src/page/saved.ts", out: "saved" },
  ],
  format: "iife",
});

/** Of the packages that are in the bundles: name, version and the text of the licence. */
function licences(inputs) {
  const packages = inputs.map((path) => /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1]).filter(Boolean);
  return [...new Set(packages)].sort().map((name) => {
    const folder = resolve(import.meta.dirname, "node_modules", name);
    const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
    if (!file) throw new Error(`${name} is bundled, and has no licence beside it.`);
    const { version } = JSON.parse(readFileSync(resolve(folder, "package.json"), "utf8"));
    return `${name} ${version}\n\n${readFileSync(resolve(folder, file), "utf8").trim()}\n`;
  });
}

writeFileSync(resolve(import.meta.dirname, outdir, "licenses.txt"), licences(Object.keys(metafile.inputs)).join("\n----\n\n"));
