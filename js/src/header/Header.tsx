// The top line: the model, how its run is and the step on screen, whether training is perturbed, the
// findings, and a menu with the rest; below it a line of two pixels for the progress.
// Invariant: it is one line of 40 pixels, whatever happens.
import { useState } from "preact/hooks";
import { FindingsButton } from "../findings/Findings";
import type { Bridge } from "../kernel/bridge";
import type { State } from "../kernel/protocol";
import type { Store } from "../store";
import { Badge } from "../ui/Badge";
import { NOT_MEASURED, real } from "../ui/format";
import { Menu } from "../ui/Menu";
import { Compilations } from "./Compilations";
import { Cost } from "./Cost";
import { RunProgress } from "./RunProgress";

interface Props {
  store: Store;
  bridge: Bridge;
  /** Whether the list of findings is open, and how that changes. */
  open: boolean;
  setOpen: (open: boolean) => void;
}

/** How a change on the screen reaches a loop. */
const LISTENING_TEXTS: Readonly<Record<State["listening"], string>> = {
  during: "Changes act at the next step, even while a cell runs.",
  steps: "Changes act at the next step of a loop that is watched, even while its cell runs. In any other cell they act when it has ended.",
  thread: "Changes act at the next step: the loop runs in a thread of its own.",
  after:
    "This kernel handles changes when the cell has finished; run the loop with insp.background(train) to change things meanwhile.",
};

export function Header({ store, bridge, open, setOpen }: Props) {
  const sites = store.sites.value;
  const state = store.state.value;
  const rate = store.progress.value?.rate ?? null;
  return (
    <header class="nni-header">
      <strong class="nni-model" title={sites?.model}>
        {sites?.model ?? "nnx_inspector"}
      </strong>
      <RunProgress store={store} />
      {state?.training_perturbed && (
        <Badge look="on" sign="◆" role="status" title="Training is perturbed: a perturbation acts on the real step, and hence on what the model learns" testid="nni-training-perturbed">
          training is perturbed
        </Badge>
      )}
      <span class="nni-grow" />
      <FindingsButton store={store} open={open} setOpen={setOpen} />
      {store.replayNote.value === "" && state && !state.closed && (
        <button type="button" class="nni-icon nni-open-beside" aria-label="Open beside the notebook" title="Open beside the notebook" data-testid="nni-open-beside" onClick={() => store.openBeside()}>
          ◨
        </button>
      )}
      {state && (
        <Menu label="More: cost of inspection, speed" testid="nni-menu">
          <p class="nni-menu-line">
            <span>Speed</span>
            <b>{rate === null ? NOT_MEASURED : `${real(Number(rate.toPrecision(3)))} steps/s`}</b>
          </p>
          {state.cost && <Cost cost={state.cost} />}
          {state.cost && store.replayNote.value === "" && <CompilationsMenu store={store} />}
          {bridge.settled.value && store.replayNote.value === "" && (
            <p class="nni-faint" data-testid="nni-listening" data-value={state.listening}>
              {LISTENING_TEXTS[state.listening]}
            </p>
          )}
        </Menu>
      )}
    </header>
  );
}

/** What was compiled and why, which is asked for once it is opened. */
function CompilationsMenu({ store }: { store: Store }) {
  const [open, setOpen] = useState(false);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>What was compiled, and why</summary>
      {open && <Compilations store={store} />}
    </details>
  );
}
