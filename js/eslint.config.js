// Lint rules. Invariant: text of a model reaches the page as text nodes only, so every way of
// turning a string into markup or code is forbidden here, by name.
import tseslint from "typescript-eslint";

const MARKUP = ["innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML", "srcdoc"];
const WHY = "Text from a model must not become markup: use text nodes.";
const TEXT_ONLY = MARKUP.flatMap((name) => [
  { selector: `JSXAttribute[name.name="${name}"]`, message: WHY },
  { selector: `Property[key.name="${name}"]`, message: WHY },
  { selector: `MemberExpression[property.value="${name}"]`, message: WHY },
]);

export default tseslint.config(
  { ignores: ["node_modules", "src/kernel/protocol.ts"] },
  ...tseslint.configs.strict,
  {
    files: ["src/**/*.{ts,tsx}", "test/**/*.{ts,tsx}"],
    languageOptions: { parserOptions: { projectService: true } },
    rules: {
      "@typescript-eslint/no-non-null-assertion": "off",
      "@typescript-eslint/no-floating-promises": "error",
      "@typescript-eslint/switch-exhaustiveness-check": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      eqeqeq: "error",
    },
  },
  {
    files: ["src/**/*.{ts,tsx}"],
    rules: {
      "no-console": ["error", { allow: ["error"] }],
      "no-restricted-properties": [
        "error",
        ...MARKUP.map((property) => ({ property, message: WHY })),
        { object: "document", property: "write", message: WHY },
      ],
      "no-restricted-syntax": [
        "error",
        ...TEXT_ONLY,
        { selector: "ImportExpression", message: "The widget is one file: no imports at run time." },
      ],
    },
  },
  {
    // The layout library is no part of the widget: the kernel sends its text when it is needed.
    files: ["src/flow/layout/arranger.ts"],
    rules: { "no-restricted-syntax": ["error", ...TEXT_ONLY] },
  },
);
