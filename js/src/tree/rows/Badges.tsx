// The badges of a row: what is special about its site.
import type { Site } from "../../kernel/protocol";
import { Badge, PerturbedBadge } from "../../ui/Badge";

interface Props {
  site: Site;
  /** Bit 1: values that are not finite here; bit 2: below; bit 4: some of those here are NaN. */
  bad: number;
  /** Whether a rule has found that they begin here. */
  first: boolean;
  open: boolean;
  /** Whether a perturbation is on; undefined if there is none. */
  on: boolean | undefined;
}

export function Badges({ site, bad, first, open, on }: Props) {
  const inside = (bad & 2) !== 0 && !open;
  return (
    <span class="nni-badges">
      {(bad & 1) !== 0 && (
        <Badge look={first ? "first" : "bad"} sign={(bad & 4) !== 0 ? "NaN" : "Inf"} title={first ? "The values that are not finite begin here" : "Has NaN or infinite values"} testid="nni-nan">
          {`${(bad & 4) !== 0 ? "NaN" : "Inf"}${first ? " first" : ""}`}
        </Badge>
      )}
      {(bad & 1) === 0 && inside && (
        <Badge look="bad" sign="NaN…" title="A row inside has NaN or infinite values">
          NaN inside
        </Badge>
      )}
      <PerturbedBadge on={on} />
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
