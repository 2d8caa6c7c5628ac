// What a button and the list below it share. Invariants: Escape, a click elsewhere and leaving the list
// by the keyboard close it; Escape brings the focus back to the button.
import { useRef, useState } from "preact/hooks";

/** Whether the list is open, and the properties of the button and of the element around both. */
export function useMenu() {
  const [open, setOpen] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const close = (): void => {
    setOpen(false);
    button.current?.focus({ preventScroll: true });
  };
  return {
    open,
    setOpen,
    /** Closes the list, and brings the focus back to the button. */
    close,
    button: { ref: button, onClick: () => setOpen(!open) },
    around: {
      onKeyDown: (event: KeyboardEvent): void => {
        if (event.key !== "Escape" || !open) return;
        event.stopPropagation();
        close();
      },
      onFocusOut: (event: FocusEvent): void => {
        const to = event.relatedTarget;
        if (!(to instanceof Node && (event.currentTarget as Node).contains(to))) setOpen(false);
      },
    },
  };
}
