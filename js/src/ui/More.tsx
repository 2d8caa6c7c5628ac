// The menu "⋯" of a panel: the choices that are not needed at every look.
import type { ComponentChildren } from "preact";
import { useMenu } from "./menu";
import { ids } from "./testids";

export function More({ label, children }: { label: string; children: ComponentChildren }) {
  const menu = useMenu();
  return (
    <span class="nni-more" {...menu.around}>
      <button {...menu.button} type="button" class="nni-icon" aria-label={label} title={label} aria-expanded={menu.open} data-testid={ids.more}>
        ⋯
      </button>
      {menu.open && (
        <div class="nni-more-list" role="group" aria-label={label}>
          {children}
        </div>
      )}
    </span>
  );
}
