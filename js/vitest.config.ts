// Tests run in happy-dom: logic and views, with a mock of the comm. See test/.
// A process has one page for all of its files, which takes half the time: a test leaves no trace.
import { defineConfig } from "vitest/config";

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  test: {
    environment: "happy-dom",
    include: ["test/**/*.test.{ts,tsx}"],
    pool: "threads",
    isolate: false,
    unstubGlobals: true,
    testTimeout: 60_000,
  },
});
