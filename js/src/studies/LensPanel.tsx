// The panel "Lens": what the residual stream already says after each layer, at each position, and
// below it what each site adds to the logit of a chosen position. Invariant: a word is a text node.
import { useState } from "preact/hooks";
import { Examples } from "../inputs/Examples";
import { visibleText } from "../inputs/state";
import type { Lens, LensCell } from "../kernel/protocol";
import { label } from "../kernel/sites";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { percent, real } from "../ui/format";
import { Menu } from "../ui/Menu";
import { dark } from "../ui/theme";
import { ColourBar } from "../values/Legend";
import { colours } from "../charts/colour";
import { wordStyle } from "../words/WordStrip";
import { SignedBars, StudyForm, StudyStatus, exampleQuery, refusalText, TokenField } from "./controls";

const PROBABILITIES = { low: 0, high: 1, signed: false };

export function LensPanel({ store }: { store: Store }) {
  const { studies, inputs } = store;
  const wish = studies.options.value;
  const shown = studies.lens.value;
  const found = shown?.found ?? null;
  const example = inputs.example.value;
  studies.useExample("lens", example, store.replayNote.value === "");
  const norm = wish.norm === "none" ? "False" : quoted(wish.norm);
  const given = [
    wish.token !== null && `answer=${wish.token}`,
    wish.unembed && `unembed=${quoted(wish.unembed)}`,
    wish.norm && `norm=${norm}`,
  ].filter(Boolean);
  return (
    <section class="nni-words-panel" aria-label="Lens">
      {!found && <p class="nni-faint">What would the model say after each layer? Compute reads the residual stream by the model's own last norm and unembedding.</p>}
      <StudyStatus store={store} what="lens" now={shown?.latest} found={found ? lensText(found) : ""} />
      {found && <LensTable store={store} lens={found} />}
      <Examples store={store} />
      {found && <LogitParts store={store} />}
      <PythonLine text={`insp.lens(${given.join(", ")})${exampleQuery(example)}`} line={store.inputs.line} />
    </section>
  );
}

export function LensOptions({ store }: { store: Store }) {
  const { studies, inputs } = store;
  const wish = studies.options.value;
  const shown = studies.lens.value;
  const found = shown?.found;
  const sites = (store.sites.value?.list ?? []).map((site) => site.key).filter((key) => key !== "");
  return (
    <StudyForm store={store} name="Compute a lens" running={shown?.latest.running ?? false} start={() => studies.request("lens", { example: inputs.example.value }, true)}>
      <Menu label="More about the lens">
        <TokenField name="answer" hint="its own" value={wish.token} choose={(token) => studies.setOptions({ token })} />
        <SiteSelect name="unembed" value={wish.unembed} sites={sites} proposed={found?.unembed} choose={(unembed) => studies.setOptions({ unembed })} />
        <SiteSelect name="norm" value={wish.norm} sites={["none", ...sites]} proposed={found?.norm} choose={(norm) => studies.setOptions({ norm })} />
      </Menu>
    </StudyForm>
  );
}

function lensText(lens: Lens): string {
  const how = [lens.norm, lens.unembed].filter((name) => name !== "").join(", then ");
  const gap = lens.gap !== null && lens.gap > 1e-3 ? ` The last layer differs from the model by up to ${real(lens.gap)}: something else lies between.` : "";
  return `Read by ${how}, of ${lens.source}.${gap}`;
}

interface WhereProps {
  name: string;
  value: string;
  sites: readonly string[];
  proposed: string | undefined;
  choose: (site: string) => void;
}

/** The choice of a site; empty for the proposal of the trace. */
function SiteSelect({ name, value, sites, proposed, choose }: WhereProps) {
  return (
    <label>
      {name}
      <select value={value} data-testid={`nni-lens-${name}`} onChange={(event) => choose(event.currentTarget.value)}>
        <option value="">{proposed && value === "" ? `found: ${proposed}` : "find it"}</option>
        {sites.map((site) => (
          <option key={site} value={site}>
            {site}
          </option>
        ))}
      </select>
    </label>
  );
}

function LensTable({ store, lens }: { store: Store; lens: Lens }) {
  const [at, point] = useState<readonly [number, number] | null>(null);
  const table = colours(PROBABILITIES, dark.value);
  const chosen = store.studies.logits.value?.found;
  const under = (event: Event): readonly [number, number] | null => {
    const cell = event.target instanceof Element ? event.target.closest("[data-row]") : null;
    return cell ? [Number(cell.getAttribute("data-row")), Number(cell.getAttribute("data-at"))] : null;
  };
  const add = (event: Event): void => {
    const cell = under(event);
    if (cell && store.replayNote.value === "") store.studies.request("logits", { example: lens.example, position: cell[1] }, false);
  };
  const heads = lens.words.length > 0 ? lens.words.map(visibleText) : lens.tokens.map((_, i) => String(i));
  return (
    <>
      <div class="nni-lens" onPointerOver={(event) => point(under(event))} onPointerLeave={() => point(null)} onFocusIn={(event) => point(under(event))}>
        <table data-testid="nni-lens" data-value={lens.rows.length}>
          <thead>
            <tr>
              <th scope="col">after</th>
              {heads.map((word, i) => (
                <th key={i} scope="col" title={`position ${i}`}>
                  <bdi>{word}</bdi>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {lens.rows.map((row, r) => (
              <tr key={row.site}>
                <th scope="row" title={label(row.site)}>
                  {label(row.site)}
                </th>
                {row.cells.map((cell, i) => (
                  <td key={i}>
                    <button
                      type="button"
                      class="nni-lens-cell"
                      data-testid="nni-lens-cell"
                      data-row={r}
                      data-at={i}
                      data-value={cell.words[0]}
                      data-rank={cell.rank}
                      aria-current={chosen?.position === i ? "true" : undefined}
                      style={wordStyle(cell.probabilities[0] ?? NaN, PROBABILITIES, table)}
                      onClick={add}
                    >
                      <bdi>{visibleText(cell.words[0] ?? "")}</bdi>
                    </button>
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="nni-under-pointer">
        {at && lens.rows[at[0]]?.cells[at[1]] ? (
          <UnderPointer cell={lens.rows[at[0]]!.cells[at[1]]!} layer={label(lens.rows[at[0]]!.site)} position={at[1]} answer={lens.answers[at[1]]!} />
        ) : (
          <span class="nni-faint">Point at a word for the likeliest; click for what each site adds to its position's logit.</span>
        )}
      </p>
      <div class="nni-legend">
        <ColourBar range={PROBABILITIES} show={percent} />
        <span class="nni-faint">probability of the word</span>
        {lens.more > 0 && <span class="nni-faint">{lens.more} more positions are in insp.lens().</span>}
      </div>
    </>
  );
}

function UnderPointer({ cell, layer, position, answer }: { cell: LensCell; layer: string; position: number; answer: string }) {
  return (
    <>
      {layer}, position {position}:{" "}
      {cell.words.map((word, i) => (
        <span key={i}>
          <bdi class="nni-word">{visibleText(word)}</bdi> {percent(cell.probabilities[i])}{" · "}
        </span>
      ))}
      answer <bdi class="nni-word">{visibleText(answer)}</bdi> {percent(cell.probability)}, rank {cell.rank}
    </>
  );
}

function LogitParts({ store }: { store: Store }) {
  const shown = store.studies.logits.value;
  const found = shown?.found;
  const state = shown?.latest.running || refusalText(store, "logits") || shown?.latest.error;
  if (!found && !state) return null;
  return (
    <>
      <div class="nni-heading nni-wrap">
        <h4>
          {found ? (
            <>
              Logit of <bdi class="nni-word">{visibleText(found.word)}</bdi> at position {found.position}: {real(found.logit)}
            </>
          ) : (
            "Parts of the logit"
          )}
        </h4>
        <span class="nni-faint nni-small">what each site adds to it; the scale of the last norm is held</span>
      </div>
      {state && <StudyStatus store={store} what="logits" now={shown?.latest} found="" />}
      {found && <SignedBars store={store} bars={found.bars} name="What each site adds to the logit" />}
    </>
  );
}
