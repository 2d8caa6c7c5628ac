// What belongs to a mask that is drawn: the button that begins, how much is off, and two shortcuts.
// Invariant: nothing is switched off before the button is pressed, because a training may be running.
import type { Signal } from "@preact/signals";
import { count } from "../ui/format";
import type { Mask } from "./requests";

interface Props {
  mask: Mask;
  /** What is switched off, in the plural. */
  what: string;
  /** Whether the mask is being edited; null if it cannot be. */
  editing: Signal<boolean> | null;
  change: (mask: Mask) => void;
}

export function MaskBar({ mask, what, editing, change }: Props) {
  const off = mask.reduce((sum, on) => sum + (on ? 0 : 1), 0);
  const now = editing?.value ?? false;
  return (
    <>
      {editing && (
        <button
          type="button"
          class="nni-button"
          aria-pressed={now}
          title={`Click or drag over ${what} to switch them off; nothing is compiled`}
          data-testid="nni-edit-mask"
          onClick={() => (editing.value = !now)}
        >
          Edit mask
        </button>
      )}
      <span data-testid="nni-units-off" data-value={off}>
        {off > 0 ? `${count(off)} of ${count(mask.length)} switched off` : now ? `Click or drag over ${what} to switch them off.` : ""}
      </span>
      {now && (
        <>
          <button type="button" class="nni-button" disabled={off === 0} onClick={() => change(new Uint8Array(mask.length).fill(1))}>
            All on
          </button>
          <button type="button" class="nni-button" disabled={off === 0} onClick={() => change(mask.map((on) => 1 - on))}>
            Invert
          </button>
        </>
      )}
    </>
  );
}
