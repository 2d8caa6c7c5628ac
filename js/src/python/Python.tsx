// A line of Python equivalent to the control beside it, with a button that copies it.
import { useCopy } from "../ui/copy";
import { ids } from "../ui/testids";

/** The inspector is called `insp`; a string in JSON is one in Python too. */
export const quoted = (site: string): string => JSON.stringify(site);

export function Python({ text, testid = ids.snippet }: { text: string; testid?: string }) {
  const [copy, said] = useCopy(text);
  return (
    <span class="nni-python">
      <code data-testid={testid} data-value={text} title={text}>
        {text}
      </code>
      <button type="button" class="nni-button nni-quiet" aria-label={`Copy ${text}`} data-testid={ids.copyPython} onClick={copy}>
        {said || "Copy"}
      </button>
    </span>
  );
}
