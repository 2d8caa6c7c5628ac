// A button that copies a path, and says so for a moment.
import { useCopy } from "../python/copy";

export function CopyPath({ path }: { path: string }) {
  const [copy, outcome] = useCopy(path);
  return (
    <>
      <button type="button" class="nni-button" title={`Copy the path ${JSON.stringify(path)}`} data-testid="nni-copy" onClick={copy}>
        Copy path
      </button>
      <span class="nni-faint nni-small" role="status">
        {outcome}
      </span>
    </>
  );
}
