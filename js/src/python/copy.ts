// Copying a text, and saying so for a moment.
import { useEffect, useState } from "preact/hooks";

export function useCopy(text: string): [copy: () => void, said: "" | "copied" | "not allowed here"] {
  const [outcome, setOutcome] = useState<"" | "copied" | "not allowed here">("");
  useEffect(() => {
    if (outcome === "") return;
    const timer = setTimeout(() => setOutcome(""), 1500);
    return () => clearTimeout(timer);
  }, [outcome]);
  const copy = (): void => {
    // An insecure page has no clipboard: say so instead of failing.
    const done = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
    done.then(
      () => setOutcome("copied"),
      () => setOutcome("not allowed here"),
    );
  };
  return [copy, outcome];
}
