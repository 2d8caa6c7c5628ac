// The examples of the batch in a row, each as its picture or its first words, with label and prediction.
// A click or the arrow keys choose the one that all panels look at.
// Invariant: the row is one tab stop and one line high; text of a user is shown as text.
import { useEffect, useRef } from "preact/hooks";
import type { Example } from "../kernel/protocol";
import type { Store } from "../store";
import { count as counted } from "../ui/format";
import { ids } from "../ui/testids";
import { nameOf } from "./pictures";
import { Thumbnail } from "./Thumbnail";

const LETTERS = 24;
const HEIGHT = 40;

export function Examples({ store, studied }: { store: Store; studied: boolean }) {
  const state = store.inputs;
  const inputs = studied ? state.studied.value : state.inputs.value;
  const chosen = studied ? state.studiedExample.value : state.example.value;
  const row = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const [strip, box] = [row.current, row.current?.children[chosen] as HTMLElement | undefined];
    if (!strip || !box) return; // scrollIntoView would move the page too
    const [left, right] = [box.offsetLeft - strip.offsetLeft, box.offsetLeft - strip.offsetLeft + box.offsetWidth];
    if (left < strip.scrollLeft) strip.scrollLeft = left;
    else if (right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = right - strip.clientWidth;
  }, [chosen, inputs]);
  const shown = Math.max(inputs?.pictures?.count ?? 0, inputs?.examples.length ?? 0);
  if (!inputs || (shown === 0 && inputs.problem === "")) return null;
  const problem = inputs.problem !== "" && (
    <p class="nni-unseen nni-small" data-testid={ids.inputsProblem}>
      {inputs.problem}
    </p>
  );
  if (shown === 0) return problem;
  const choose = (to: number): void => state.choose(Math.min(Math.max(to, 0), shown - 1));
  const onKeyDown = (event: KeyboardEvent): void => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: shown - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    choose(to);
    (row.current?.children[Math.min(Math.max(to, 0), shown - 1)] as HTMLElement | undefined)?.focus();
  };
  const more = inputs.batch - shown;
  const said = classes(inputs.examples[chosen]);
  return (
    <section class="nni-examples" aria-label="Examples of the batch" data-testid={ids.examples} data-value={chosen}>
      <div class="nni-examples-row" role="radiogroup" aria-label="The example that all panels look at" ref={row} onKeyDown={onKeyDown}>
        {Array.from({ length: shown }, (_, i) => {
          const { label = "", prediction = "" } = inputs.examples[i] ?? {};
          const text = state.beginning(inputs.examples[i]?.words ?? [], LETTERS);
          const wrong = label !== "" && prediction !== "" && label !== prediction;
          const name = [`example ${i}`, classes(inputs.examples[i]), text].filter(Boolean).join(", ");
          return (
            <button
              key={i}
              type="button"
              role="radio"
              aria-checked={i === chosen}
              aria-label={name}
              title={name}
              tabIndex={i === chosen ? 0 : -1}
              data-testid={ids.example(i)}
              onClick={() => choose(i)}
            >
              <Thumbnail pictures={inputs.pictures} example={i} height={HEIGHT} />
              {text !== "" && <bdi class="nni-example-text">{text}</bdi>}
              <bdi class={wrong ? "nni-example-class nni-bad" : "nni-example-class"}>
                {label !== "" && label === prediction ? label : prediction !== "" ? `${label} → ${prediction}` : label || i}
              </bdi>
            </button>
          );
        })}
      </div>
      <p class="nni-faint nni-small">
        example {chosen} of {counted(inputs.batch)}
        {inputs.number !== state.inputs.value?.number && " of the last forward pass"}
        {said !== "" && (
          <bdi data-testid={ids.exampleSaid}>, {said}</bdi>
        )}
        {more > 0 && `, the first ${counted(shown)} are here`}
        {inputs.pictures && `; ${nameOf(inputs.pictures)} ${inputs.pictures.rows}×${inputs.pictures.columns}, ${inputs.pictures.shown}`}
      </p>
      {problem}
    </section>
  );
}

/** The label and the prediction of an example in words; "" if neither is known. */
function classes(one: Example | undefined): string {
  return [one?.label && `label ${one.label}`, one?.prediction && `predicted ${one.prediction}`].filter(Boolean).join(", ");
}
