// The findings of the rules: one button in the header, and below it the list, worst first, each with
// a link to its site and step. Invariant: the list overlays the view, so a finding that arrives while data
// streams moves nothing; all texts are text nodes.
import type { FindingRow, Findings as Found } from "../kernel/protocol";
import { label, rowOf } from "../kernel/sites";
import type { Store } from "../store";
import { count } from "../ui/format";
import { useMenu } from "../ui/menu";
import { ids } from "../ui/testids";

const WORDS: Readonly<Record<FindingRow["severity"], string>> = { error: "Error", warning: "Warning", info: "Note" };

export function Findings({ store }: { store: Store }) {
  const found = store.findings.value;
  const menu = useMenu();
  const all = found ? found.findings.length + found.more : 0;
  const shown = menu.open && all > 0;
  const unknown = store.frame.value === null;
  return (
    <div class="nni-findings" {...menu.around}>
      <button
        type="button"
        class={`nni-button nni-found nni-found-${all > 0 ? found!.findings[0]!.severity : "none"}`}
        aria-expanded={shown}
        disabled={all === 0}
        title={all === 0 ? "No rule has found anything wrong so far" : "Show the findings, worst first"}
        data-testid={ids.findings}
        data-value={all}
        {...menu.button}
      >
        <span role="status">{all === 0 ? (unknown ? "no findings yet" : "no findings") : all === 1 ? "1 finding" : `${count(all)} findings`}</span>
      </button>
      {shown && <List found={found!} store={store} />}
    </div>
  );
}

function List({ found, store }: { found: Found; store: Store }) {
  return (
    <ol class="nni-found-list" aria-label="Findings, worst first" tabIndex={-1}>
      {found.findings.map((one, i) => (
        <li key={i} class={one.gone === null ? "" : "nni-faint"} data-testid={ids.finding} data-rule={one.rule} data-site={one.site}>
          <b class={`nni-found-${one.severity}`}>{WORDS[one.severity]}</b>
          <span class="nni-found-rule">{one.rule}</span>
          <Site one={one} store={store} />
          <p>
            {one.what}: {one.advice}.{one.gone !== null && ` It is gone since step ${one.gone}.`}
          </p>
          {one.effects.length > 0 && (
            <details>
              <summary>{one.effects.length === 1 ? "1 consequence" : `${count(one.effects.length)} consequences`}</summary>
              {one.effects.map((text, i) => (
                <p key={i}>{text}</p>
              ))}
            </details>
          )}
        </li>
      ))}
      {found.more > 0 && <li class="nni-faint">{count(found.more)} more: insp.findings has them all.</li>}
    </ol>
  );
}

function Site({ one, store }: { one: FindingRow; store: Store }) {
  const sites = store.sites.value;
  const row = sites ? rowOf(sites, one.site) : undefined;
  if (row === undefined) return <span class="nni-site">{label(one.site)}</span>;
  const open = () => {
    store.select(row);
    store.timeline.goToStep(one.step);
  };
  return (
    <button type="button" class="nni-link nni-site" title={`Show it at step ${one.step}`} onClick={open}>
      {label(one.site)}
    </button>
  );
}
