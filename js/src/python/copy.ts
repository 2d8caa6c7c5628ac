// Copying a text, and saying so for a moment.
import { useEffect, useState } from "preact/hooks";

export function useCopy(text: string): [copy: () => void, said: "" | "copied" | "not allowed here"] {
  const [said, say] = useState<"" | "copied" | "not allowed here">("");
  useEffect(() => {
    if (said === "") return;
    const timer = setTimeout(() => say(""), 1500);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = (): void => {
    // An insecure page has no clipboard: say so instead of failing.
    const done = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
    done.then(
      () => say("copied"),
      () => say("not allowed here"),
    );
  };
  return [copy, said];
}
