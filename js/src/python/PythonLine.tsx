// A line of Python equivalent to the control beside it, with a button that copies it.
import type { Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { useCopy } from "./copy";

/** The inspector is called `insp`; a string in JSON is one in Python too. */
export const quoted = (site: string): string => JSON.stringify(site);

interface Props {
  text: string;
  testid?: string;
  /** Where a panel that looks at an example has its line, for the line at the bottom. */
  line?: Signal<string>;
}

export function PythonLine({ text, testid, line }: Props) {
  const [copy, outcome] = useCopy(text);
  useEffect(() => {
    if (!line) return;
    line.value = text;
    return () => void (line.value = "");
  }, [line, text]);
  return (
    <span class="nni-python">
      <code data-testid={testid} data-value={text} title={text}>
        {text}
      </code>
      <button type="button" class="nni-button nni-quiet-button" aria-label={`Copy ${text}`} data-testid="nni-copy-python" onClick={copy}>
        {outcome || "Copy"}
      </button>
    </span>
  );
}
