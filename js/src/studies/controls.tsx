// What the panels of studies share: the button that computes, what is under way, bars with a sign.
import type { ComponentChildren } from "preact";
import type { Attributed, Lens, Logits, LogitBar, UnitExamples } from "../kernel/protocol";
import type { Store } from "../store";
import { count, exact, NOT_MEASURED, real } from "../ui/format";
import { SiteLink } from "../ui/SiteLink";
import type { StudyKind } from "./state";

interface FormProps {
  store: Store;
  name: string;
  running: boolean;
  /** What stands on the button that starts it. */
  word?: string;
  disabled?: boolean | undefined;
  start: () => void;
  stop?: () => void;
  children: ComponentChildren;
}

/** The choices of a study and its button; a page without a kernel has neither. */
export function StudyForm({ store, name, running, word = "Compute", disabled = false, start, stop = () => store.studies.stop(), children }: FormProps) {
  if (store.replayNote.value !== "") return null;
  const submit = (event: Event): void => {
    event.preventDefault();
    if (!running && !disabled) start();
  };
  return (
    <form class="nni-options" noValidate aria-label={name} onSubmit={submit}>
      {children}
      {running ? (
        <button type="button" class="nni-button" data-testid="nni-study-stop" onClick={stop}>
          Stop
        </button>
      ) : (
        <button type="submit" class="nni-button" disabled={disabled} data-testid="nni-study-start">
          {word}
        </button>
      )}
    </form>
  );
}

/** The Python that takes one example out of a result; of the first, "". */
export const exampleQuery = (example: number): string => (example > 0 ? `.to_frame().query("example == ${example}")` : "");

/** Why what one clicked in a panel was refused, "" if it was not. */
export const refusalText = (store: Store, what: StudyKind): string => {
  const refused = store.studies.refused.value;
  return refused?.what === what ? refused.why : "";
};

export function Refusal({ store, what }: { store: Store; what: StudyKind }) {
  const why = refusalText(store, what);
  return why ? (
    <p class="nni-small nni-bad" role="status" data-testid="nni-study-problem">
      {why}
    </p>
  ) : null;
}

/** Whether a study that was asked for waits for another one. */
export const isQueued = (store: Store, what: StudyKind): boolean => store.studies.queue.value.indexOf(what) > 0;

interface StatusProps {
  store: Store;
  what: StudyKind;
  now: Lens | Logits | Attributed | UnitExamples | undefined;
  found: string;
}

/** What is under way, why nothing was found, or where what is shown comes from. */
export function StudyStatus({ store, what, now, found }: StatusProps) {
  const problem = refusalText(store, what) || now?.error;
  const done = now?.type === "examples" ? now.done : 0;
  const total = now?.type === "examples" ? now.total : 0;
  return (
    <p class="nni-study-now nni-small" role="status" data-testid="nni-study" data-state={now?.running ? "running" : problem ? "failed" : found ? "done" : "none"}>
      {now?.running && <progress max={Math.max(total, 1)} value={done > 0 ? done : undefined} aria-label="Progress" />}
      {now?.running ? (
        <span>{isQueued(store, what) ? "waits for another study to end …" : done > 0 ? `${count(done)} of ${count(total)} batches` : "compiling and running …"}</span>
      ) : problem ? (
        <span class="nni-bad" data-testid="nni-study-problem">{problem}</span>
      ) : (
        <span class="nni-faint">
          {found}
          {found && store.studies.isOutdated(now) && " Another batch has been run since: press Compute."}
        </span>
      )}
    </p>
  );
}

/** Bars to the left and the right of zero, in the order given. */
export function SignedBars({ store, bars, name }: { store: Store; bars: readonly LogitBar[]; name: string }) {
  const most = Math.max(...bars.map((bar) => Math.abs(bar.value ?? 0)), 0) || 1;
  return (
    <ol class="nni-bars" aria-label={name}>
      {bars.map(({ site, value }) => {

        const share = Math.abs(value ?? 0) / most / 2;
        return (
          <li key={site} data-site={site} data-value={exact(value)}>
            <SiteLink store={store} site={site} />
            <span class="nni-signed-bar" aria-hidden="true">
              <span data-below={(value ?? 0) < 0 ? "" : undefined} style={{ width: `${100 * share}%` }} />
            </span>
            <span class={value === null ? "nni-bad" : undefined}>{value === null ? NOT_MEASURED : real(value)}</span>
          </li>
        );
      })}
    </ol>
  );
}

interface IntegerProps {
  name: string;
  /** null for none. */
  value: number | null;
  choose: (value: number) => void;
  /** Called for an empty field; without it an empty field changes nothing. */
  none?: () => void;
  least?: number;
  hint?: string;
  title?: string;
  of?: number | undefined;
}

/** A field for a whole number. */
export function IntegerField({ name, value, choose, none, least = 0, hint, title, of }: IntegerProps) {
  const read = (text: string): void => {
    if (text === "") none?.();
    else if (Number.isFinite(Number(text))) choose(Math.max(least, Math.round(Number(text))));
  };
  return (
    <label title={title}>
      {name}
      <input
        type="number"
        min={Number.isFinite(least) ? least : undefined}
        class="nni-study-number"
        placeholder={hint}
        value={value ?? ""}
       
        onInput={({ currentTarget }) => read(currentTarget.value)}
      />
      {of !== undefined && <span class="nni-faint">of {count(of)}</span>}
    </label>
  );
}

/** The choice of a class or token; empty for the model's own answer. */
export function TokenField({ value, choose, name, hint }: { value: number | null; choose: (token: number | null) => void; name: string; hint: string }) {
  return <IntegerField name={name} hint={hint} value={value} choose={choose} none={() => choose(null)} />;
}
