// What is special about a site, as small words; the title says it at length.
import type { Site } from "../protocol";
import { ids } from "../testids";

interface Props {
  site: Site;
  /** Bit 1: values that are not finite here; bit 2: below. */
  bad: number;
  open: boolean;
  /** Whether a perturbation is on; undefined: there is none. */
  on: boolean | undefined;
}

export function Badges({ site, bad, open, on }: Props) {
  const inside = (bad & 2) !== 0 && !open;
  return (
    <span class="nni-badges">
      {(bad & 1) !== 0 && (
        <span class="nni-badge nni-badge-bad" title="Has NaN or infinite values" data-testid={ids.nan}>
          NaN/Inf
        </span>
      )}
      {(bad & 1) === 0 && inside && (
        <span class="nni-badge nni-badge-bad" title="A module inside has NaN or infinite values">
          NaN inside
        </span>
      )}
      {on !== undefined && (
        <span
          class={on ? "nni-badge nni-badge-on" : "nni-badge"}
          title={on ? "Perturbed" : "Has a perturbation, switched off"}
          data-testid={ids.badgePerturbed}
          data-value={String(on)}
        >
          {on ? "perturbed" : "off"}
        </span>
      )}
      {site.stacked > 1 && (
        <span class="nni-badge" title={`${site.stacked} layers stacked in one module`}>
          ×{site.stacked}
        </span>
      )}
      {site.calls > 1 && (
        <span class="nni-badge" title={`Called ${site.calls} times a pass; its values are merged`}>
          {site.calls} calls
        </span>
      )}
      {site.aliases.length > 0 && (
        <span class="nni-badge" title={`One module in several places: also ${site.aliases.join(", ")}`}>
          shared
        </span>
      )}
      {site.unseen !== "" && (
        <span class="nni-badge" title={site.unseen}>
          not seen
        </span>
      )}
    </span>
  );
}
