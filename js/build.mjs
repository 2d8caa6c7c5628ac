// Bundles the widget: src/widget.tsx -> widget.js and src/theme.css -> widget.css, in
// ../nnx_inspector/static or in the folder given. Invariant: one ESM file and one style sheet
// that load nothing else, neither from disk nor from the network.
import { build } from "esbuild";

const outdir = process.argv[2] ?? "../nnx_inspector/static";

await build({
  absWorkingDir: import.meta.dirname,
  entryPoints: [
    { in: "src/widget.tsx", out: "widget" },
    { in: "src/theme.css", out: "widget" },
  ],
  outdir,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
});
