// Which batch all panels look at, by name and size, and its examples in a row, each as its picture or its
// first words, with label and prediction. A click or the arrow keys choose the one that all look at.
// Invariant: the row is one tab stop and one line high; text of a user is shown as text.
import { useEffect, useRef } from "preact/hooks";
import type { Example, Inputs } from "../kernel/protocol";
import type { Store } from "../store";
import { count as counted } from "../ui/format";
import { NumberInput } from "../ui/NumberInput";
import { Select } from "../ui/Select";
import { argumentName } from "./pictures";
import { Thumbnail } from "./Thumbnail";

const LETTERS = 24;
const HEIGHT = 40;
const BATCH_NAMES = { run: "the example's batch", step: "the last step's batch" } as const;

export function Examples({ store }: { store: Store }) {
  const state = store.inputs;
  const inputs = state.inputs.value;
  const chosen = state.example.value;
  const row = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const [strip, box] = [row.current, row.current?.children[chosen] as HTMLElement | undefined];
    if (!strip || !box) return; // scrollIntoView would move the page too
    const [left, right] = [box.offsetLeft - strip.offsetLeft, box.offsetLeft - strip.offsetLeft + box.offsetWidth];
    if (left < strip.scrollLeft) strip.scrollLeft = left;
    else if (right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = right - strip.clientWidth;
  }, [chosen, inputs]);
  const shown = Math.max(inputs?.pictures?.count ?? 0, inputs?.examples.length ?? 0);
  if (!inputs) return null;
  const problem = inputs.problem !== "" && (
    <p class="nni-unseen nni-small" data-testid="nni-inputs-problem">
      {inputs.problem}
    </p>
  );
  const choose = (to: number): void => state.choose(Math.min(Math.max(to, 0), shown - 1));
  const onKeyDown = (event: KeyboardEvent): void => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: shown - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    choose(to);
    (row.current?.children[Math.min(Math.max(to, 0), shown - 1)] as HTMLElement | undefined)?.focus();
  };
  return (
    <section class="nni-examples" aria-label="The batch" data-testid="nni-examples" data-value={chosen}>
      <BatchLine store={store} inputs={inputs} shown={shown} chosen={chosen} />
      {shown > 0 && (
      <div class="nni-examples-row" role="radiogroup" aria-label="The example that all panels look at" ref={row} onKeyDown={onKeyDown}>
        {Array.from({ length: shown }, (_, i) => {
          const { label = "", prediction = "" } = inputs.examples[i] ?? {};
          const text = state.beginning(inputs.examples[i]?.words ?? [], LETTERS);
          const wrong = label !== "" && prediction !== "" && label !== prediction;
          const name = [`example ${i}`, classText(inputs.examples[i]), text].filter(Boolean).join(", ");
          return (
            <button
              key={i}
              type="button"
              role="radio"
              aria-checked={i === chosen}
              aria-label={name}
              title={name}
              tabIndex={i === chosen ? 0 : -1}
              data-testid={`nni-example-${i}`}
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
      )}
      {problem}
    </section>
  );
}

/** The batch by name and size, and the example that is looked at. */
function BatchLine({ store, inputs, shown, chosen }: { store: Store; inputs: Inputs; shown: number; chosen: number }) {
  const state = store.inputs;
  const said = classText(inputs.examples[chosen]);
  const more = inputs.batch - shown;
  const choices = inputs.other === "" || store.replayNote.value !== "" || (store.progress.value?.running ?? false) ? [inputs.kind] : ([inputs.kind, inputs.other] as const);
  const pictures = inputs.pictures && `; ${argumentName(inputs.pictures)} ${inputs.pictures.rows}×${inputs.pictures.columns}, ${inputs.pictures.shown}`;
  return (
    <p class="nni-batch nni-faint nni-small" title={[more > 0 && shown > 0 ? `The first ${counted(shown)} are here` : "", pictures ?? ""].filter(Boolean).join("")}>
      {choices.length > 1 ? (
        <Select label="The batch that all panels look at" testid="nni-batch" value={inputs.kind} options={choices} word={(one) => BATCH_NAMES[one]} choose={(which) => state.chooseBatch(which)} />
      ) : (
        <span>{BATCH_NAMES[inputs.kind]}</span>
      )}{" "}
      of {counted(inputs.batch)} ·{" "}
      {inputs.batch > shown ? (
        <label>
          example{" "}
          <NumberInput min={0} max={inputs.batch - 1} value={chosen} data-testid="nni-study-example" change={(typed) => state.choose(Math.min(Math.max(Math.round(typed), 0), inputs.batch - 1))} />
        </label>
      ) : (
        <span>example {chosen}</span>
      )}
      {said !== "" && <bdi data-testid="nni-example-said">, {said}</bdi>}
    </p>
  );
}

/** The label and the prediction of an example in words; "" if neither is known. */
function classText(one: Example | undefined): string {
  return [one?.label && `label ${one.label}`, one?.prediction && `predicted ${one.prediction}`].filter(Boolean).join(", ");
}
