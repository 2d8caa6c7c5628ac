// The findings of the rules: a button in the top line, and a band below it with the list, worst first.
// What follows from a finding is folded under it, and one that is over is faint.
// Invariants: the band pushes the page and covers nothing; it opens by a click only, so a finding that
// arrives while data streams moves nothing; all texts are text nodes.
import type { FindingRow } from "../kernel/protocol";
import { label, rowKey } from "../kernel/sites";
import { LEVEL_NAMES } from "../ui/Badge";
import type { Store } from "../store";
import { count } from "../ui/format";

interface ButtonProps {
  store: Store;
  open: boolean;
  setOpen: (open: boolean) => void;
}

export function FindingsButton({ store, open, setOpen }: ButtonProps) {
  const found = store.findings.value;
  const all = found ? found.findings.length + found.more : 0;
  const worst = all > 0 ? found!.findings[0]!.severity : "none";
  const alike = worst !== "none" && found!.findings.every((one) => one.severity === worst);
  const unknown = store.frame.value === null;
  const word = alike ? LEVEL_NAMES[worst].toLowerCase() : "finding";
  return (
    <button
      type="button"
      class={`nni-button nni-findings-button nni-severity-${worst}`}
      aria-expanded={open && all > 0}
      disabled={all === 0}
      title={all === 0 ? "No rule has found anything wrong so far" : open ? "Close the findings" : "Show the findings, worst first"}
      data-testid="nni-findings"
      data-value={all}
      onClick={() => setOpen(!open)}
    >
      <span role="status">{all === 0 ? (unknown ? "no findings yet" : "no findings") : `${count(all)} ${word}${all === 1 ? "" : "s"}`}</span>
    </button>
  );
}

/** The band; nothing if there is no finding. */
export function Findings({ store, close }: { store: Store; close: () => void }) {
  const found = store.findings.value;
  if (!found || found.findings.length === 0) return null;
  const worst = found.findings[0]!.severity;
  return (
    <section
      class={`nni-findings-band nni-findings-band-${worst}`}
      aria-label="Findings"
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        close();
      }}
    >
      <ol class="nni-findings-list" aria-label="Findings, worst first">
        {found.findings.map((one, i) => (
          <FindingItem key={i} one={one} store={store} />
        ))}
        {found.more > 0 && <li class="nni-faint">{count(found.more)} more: insp.findings has them all.</li>}
      </ol>
    </section>
  );
}

function FindingItem({ one, store }: { one: FindingRow; store: Store }) {
  const row = rowKey(store.sites.value, one.site);
  return (
    <li class={one.gone === null ? undefined : "nni-finding-gone"} data-testid="nni-finding" data-rule={one.rule} data-site={one.site}>
      <h4 class={`nni-severity-${one.severity}`}>
        <span class="nni-hidden">{LEVEL_NAMES[one.severity]}: </span>
        {one.what}
      </h4>
      <p>
        {one.advice && `${one.advice.charAt(0).toUpperCase()}${one.advice.slice(1)}.`}
        {one.gone !== null && <b> Gone since step {count(one.gone)}.</b>} <span class="nni-faint">{one.rule}</span>
      </p>
      <div class="nni-finding-actions">
        <button type="button" class="nni-button" onClick={() => store.timeline.goToStep(one.step)}>
          Go to step {count(one.step)}
        </button>
        {row === undefined ? (
          <code>{label(one.site)}</code>
        ) : (
          <button
            type="button"
            class="nni-button"
            title={`Show ${label(one.site)} at step ${one.step}`}
            onClick={() => {
              store.select(row);
              store.timeline.goToStep(one.step);
            }}
          >
            Go to {label(one.site)}
          </button>
        )}
        {one.effects.length > 0 && (
          <details>
            <summary>
              <b>{one.effects.length === 1 ? "1 consequence" : `${count(one.effects.length)} consequences`}</b>
            </summary>
            <ul>
              {one.effects.map((text, i) => (
                <li key={i}>{text}</li>
              ))}
            </ul>
          </details>
        )}
      </div>
    </li>
  );
}
