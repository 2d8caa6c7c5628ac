// Tests run in happy-dom: logic and views, with a mock of the comm. See test/.
import { defineConfig } from "vitest/config";

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  test: { environment: "happy-dom", include: ["test/**/*.test.{ts,tsx}"] },
});
