// Copies a path, and says for a moment that it did.
import { useEffect, useState } from "preact/hooks";
import { ids } from "../testids";

export function CopyPath({ path }: { path: string }) {
  const [copied, setCopied] = useState<"" | "copied" | "not allowed here">("");
  useEffect(() => {
    if (copied === "") return;
    const timer = setTimeout(() => setCopied(""), 1500);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = (): void => {
    // Without a secure page there is no clipboard: say so rather than fail.
    const done = navigator.clipboard?.writeText(path) ?? Promise.reject(new Error("no clipboard"));
    done.then(
      () => setCopied("copied"),
      () => setCopied("not allowed here"),
    );
  };
  return (
    <>
      <button type="button" class="nni-button nni-quiet" title={`Copy the path ${JSON.stringify(path)}`} data-testid={ids.copy} onClick={copy}>
        Copy path
      </button>
      <span class="nni-faint nni-small" role="status">
        {copied}
      </span>
    </>
  );
}
