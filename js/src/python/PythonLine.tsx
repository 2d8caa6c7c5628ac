// The bottom line: the Python equivalent of the last click; of a click on an example, what the open
// panel shows of it.
// Invariant: the line keeps its place even when it is empty.
import type { Store } from "../store";
import { ids } from "../ui/testids";
import { Python } from "./Python";

export function PythonLine({ store }: { store: Store }) {
  const { clicked, line } = store.inputs;
  const text = (clicked.value && line.value) || (store.state.value?.python ?? "");
  if (text === "" && store.replay.value) return null;
  return (
    <footer class="nni-footer" aria-label="Python">
      <b class="nni-faint">Python</b>
      {text === "" ? (
        <span class="nni-faint">Your last click, as a line of code for a cell.</span>
      ) : (
        <Python text={text} testid={ids.python} />
      )}
    </footer>
  );
}
