// Short words about special sites; the title has the full text.
// Invariant: a badge is never cut; in a narrow tree it shows a sign, and its word stays its name.
import type { ComponentChildren } from "preact";
import type { Site } from "../../kernel/protocol";
import { ids } from "../../ui/testids";

interface Props {
  site: Site;
  /** Bit 1: values that are not finite here; bit 2: below. */
  bad: number;
  open: boolean;
  /** Whether a perturbation is on; undefined if there is none. */
  on: boolean | undefined;
}

export function Badges({ site, bad, open, on }: Props) {
  const inside = (bad & 2) !== 0 && !open;
  return (
    <span class="nni-badges">
      {(bad & 1) !== 0 && (
        <Badge look="nni-badge-bad" sign="NaN" title="Has NaN or infinite values" testid={ids.nan}>
          NaN/Inf
        </Badge>
      )}
      {(bad & 1) === 0 && inside && (
        <Badge look="nni-badge-bad" sign="NaN…" title="A module inside has NaN or infinite values">
          NaN inside
        </Badge>
      )}
      {on !== undefined && (
        <Badge
          look={on ? "nni-badge-on" : ""}
          sign={on ? "◆" : "◇"}
          title={on ? "A perturbation is on" : "Has a perturbation, switched off"}
          testid={ids.badgePerturbed}
          value={String(on)}
        >
          {on ? "perturbed" : "off"}
        </Badge>
      )}
      {site.stacked > 1 && (
        <Badge sign={`×${site.stacked}`} title={`${site.stacked} layers stacked in one module. ${site.note}`}>
          {`×${site.stacked}`}
        </Badge>
      )}
      {site.calls > 1 && (
        <Badge sign={`${site.calls}c`} title={`Called ${site.calls} times per pass; its values are merged`}>
          {`${site.calls} calls`}
        </Badge>
      )}
      {site.aliases.length > 0 && (
        <Badge sign="=" title={`One module in several places: also ${site.aliases.join(", ")}`}>
          shared
        </Badge>
      )}
      {site.unseen !== "" && (
        <Badge sign="?" title={site.unseen}>
          not seen
        </Badge>
      )}
    </span>
  );
}

interface BadgeProps {
  look?: string;
  sign: string;
  title: string;
  testid?: string;
  value?: string;
  children: ComponentChildren;
}

function Badge({ look = "", sign, title, testid, value, children }: BadgeProps) {
  return (
    <span class={`nni-badge ${look}`} title={title} data-testid={testid} data-value={value} data-sign={sign}>
      <span class="nni-word">{children}</span>
    </span>
  );
}
