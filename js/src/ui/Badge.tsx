// Short words about a site, a pass or the whole view; the title has the full text.
// Invariants: a badge is never cut; where there is no room it shows its sign, and its word stays its
// name; perturbed, live, held and saved each look the same and say the same wherever they are.
import type { ComponentChildren } from "preact";

interface BadgeProps {
  look?: "bad" | "first" | "on" | "live" | "saved";
  sign?: string;
  title: string;
  testid?: string;
  value?: string;
  /** Whether a change of it is read out. */
  role?: "status";
  children: ComponentChildren;
}

export function Badge({ look, sign, title, testid, value, role, children }: BadgeProps) {
  return (
    <span class={look ? `nni-badge nni-badge-${look}` : "nni-badge"} title={title} role={role} data-testid={testid} data-value={value} data-sign={sign}>
      <span class="nni-badge-word">{children}</span>
    </span>
  );
}

/** Of a site with a perturbation, on or switched off; nothing for one without. */
export function PerturbedBadge({ on }: { on: boolean | undefined }) {
  if (on === undefined) return null;
  const title = on ? "A perturbation is on" : "Has a perturbation, switched off";
  return (
    <Badge look={on ? "on" : undefined} sign={on ? "◆" : "◇"} title={title} testid="nni-badge-perturbed" value={String(on)}>
      {on ? "perturbed" : "off"}
    </Badge>
  );
}

/** How bad something is, in words. */
export const LEVEL_NAMES = { error: "Error", warning: "Warning", info: "Note" } as const;

/** Where what is on screen comes from. */
export const ORIGINS = {
  live: "Shows each new pass as it arrives",
  held: "Stays at this pass; the run goes on",
  saved: "What was saved; the model is not here",
} as const;
