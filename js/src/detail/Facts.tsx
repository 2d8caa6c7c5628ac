// The facts about a site that need no run: type, shapes, parameters, cost, source of its call.
import type { ComponentChildren } from "preact";
import type { Site } from "../kernel/protocol";
import { compact, count } from "../ui/format";

const EXAMPLE_HINT = "For the example; the batch size of other passes may differ";

const ARRAY_HINT = "The call returns several arrays. Statistics and charts are of this one; each of the others has a row of its own.";

export function Facts({ site, counted }: { site: Site; counted: string }) {
  if (site.single)
    return (
      <dl class="nni-facts">
        <Fact name="array" hint={ARRAY_HINT}>({site.array})</Fact>
        <Fact name="type" hint={EXAMPLE_HINT}>{site.output}</Fact>
        {site.calls > 1 && <Fact name="calls">{count(site.calls)} in one pass</Fact>}
      </dl>
    );
  return (
    <dl class="nni-facts">
      <Fact name="type">{site.kind}</Fact>
      <Fact name="parameters">{count(site.parameters)}</Fact>
      <Fact name="inputs" hint={EXAMPLE_HINT}>{site.inputs || "–"}</Fact>
      <Fact name="FLOPs" hint={EXAMPLE_HINT}>{site.flops === null ? "unknown" : compact(site.flops)}</Fact>
      <Fact name="output" hint={EXAMPLE_HINT}>{site.output || "–"}</Fact>
      {site.array !== "" && <Fact name="statistics of" hint={ARRAY_HINT}>({site.array})</Fact>}
      {counted !== "" && <Fact name="statistics">{counted}</Fact>}
      {site.calls > 1 && <Fact name="calls">{count(site.calls)} in one pass</Fact>}
      {site.stacked > 1 && <Fact name="stacked">{count(site.stacked)} layers</Fact>}
      {site.source !== "" && (
        <Fact name="source">
          <code>{site.source}</code>
        </Fact>
      )}
      {site.aliases.length > 0 && <Fact name="also at">{site.aliases.join(", ")}</Fact>}
    </dl>
  );
}

function Fact({ name, hint, children }: { name: string; hint?: string; children: ComponentChildren }) {
  return (
    <div title={hint}>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}
