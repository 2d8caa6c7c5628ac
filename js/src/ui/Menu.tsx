// A menu behind a button, by default "⋯": the choices that are not needed at every look.
import type { ComponentChildren } from "preact";
import { useMenu } from "./useMenu";

interface Props {
  label: string;
  testid?: string;
  /** What stands on the button in place of the dots. */
  word?: ComponentChildren;
  /** Whether something in it is in force. */
  on?: boolean;
  children: ComponentChildren;
}

export function Menu({ label, testid = "nni-more", word, on = false, children }: Props) {
  const menu = useMenu();
  return (
    <span class="nni-menu-anchor" {...menu.around}>
      <button
        {...menu.button}
        type="button"
        class={word ? "nni-button" : "nni-icon"}
        aria-label={label}
        title={label}
        aria-expanded={menu.open}
        data-on={on}
        data-testid={testid}
      >
        {word ?? "⋯"}
      </button>
      {menu.open && (
        // a press on a label clears the focus, but is still inside the list
        <div class="nni-menu-list" role="group" aria-label={label} tabIndex={-1}>
          {children}
        </div>
      )}
    </span>
  );
}
