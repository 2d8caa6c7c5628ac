// The bottom line: the Python equivalent of the last click (of a click on an example, what the open
// panel shows of it), or the figures of the row under the pointer.
// Invariant: it keeps its place and its height, whatever it shows; a long line scrolls sideways.
import { notFiniteCount, statistic } from "../kernel/decode";
import type { Statistic } from "../kernel/protocol";
import { groupDescription, isGroup, isState, label } from "../kernel/sites";
import type { Store } from "../store";
import { compact, count, percent, real } from "../ui/format";
import { NAMED_QUANTITIES } from "../kernel/quantities";
import { PythonLine } from "./PythonLine";

export function Footer({ store }: { store: Store }) {
  return <footer class="nni-footer">{store.pointed.value >= 0 ? <PointedRow store={store} /> : <LastClick store={store} />}</footer>;
}

function LastClick({ store }: { store: Store }) {
  const { clicked, line } = store.inputs;
  const text = (clicked.value && line.value) || (store.state.value?.python ?? "");
  return (
    <>
      <span class="nni-faint nni-small">Python</span>
      {text === "" ? <span class="nni-faint nni-foot-text">{"Your last click, as a line of code for a cell."}</span> : <PythonLine text={text} testid="nni-python" />}
    </>
  );
}

const FIGURES: readonly Statistic[] = ["mean", "std", "min", "max", "norm", "zeros"];

/** The figures of a row, in words: what is special about it first. */
function PointedRow({ store }: { store: Store }) {
  const index = store.pointed.value;
  const site = store.sites.value?.list[index];
  const frame = store.frame.value;
  if (!site) return null;
  const measured = NAMED_QUANTITIES.filter(({ index: q }) => frame && !Number.isNaN(statistic(frame, index, q, "size")));
  return (
    <span class="nni-foot-text nni-pointed" tabIndex={0} data-testid="nni-tip" data-site={site.key}>
      <code>{label(site.key)}</code>
      {!isState(site) && <span>{site.kind}</span>}
      {site.unseen !== "" && <span>not seen: {site.unseen}</span>}
      {site.note !== "" && <span>{site.note}</span>}
      {site.aliases.length > 0 && <span>the same module: {site.aliases.join(", ")}</span>}
      {measured.map(({ quantity, index: q, word }) => {
        const of = (name: Statistic): number => statistic(frame!, index, q, name);
        const bad = notFiniteCount(of);
        return (
          <span key={quantity}>
            <b class={`nni-q-${quantity}`}>{isState(site) ? "state" : word}</b>
            {bad > 0 && <b class="nni-bad"> {count(bad)} NaN/Inf</b>}
            {FIGURES.map((name) => (
              <span key={name}>
                {" "}
                <span class="nni-faint">{name}</span> {name === "zeros" ? percent(of(name) / of("size")) : real(of(name))}
              </span>
            ))}
          </span>
        );
      })}
      {isGroup(site) && <span>{groupDescription(site)}</span>}
      {measured.length === 0 && !isGroup(site) && <span>{frame ? "not measured in this pass" : "no pass yet"}</span>}
      {!isState(site) && (
        <span class="nni-faint">
          {count(site.parameters)} parameters, {site.flops === null ? "unknown" : compact(site.flops)} FLOPs
          {site.calls !== 1 && `, ${count(site.calls)} calls`}
        </span>
      )}
    </span>
  );
}
