// The panel "Examples": the examples that excite a unit of the selected site most and least, and a
// few at random. Invariant: another unit of what was found is shown without computing it again.
import { placeOnPicture } from "../inputs/patches";
import { Thumbnail } from "../inputs/Thumbnail";
import { areWholeWords, visibleText } from "../inputs/state";
import type { ExciteRow, Pictures, Site, UnitExamples } from "../kernel/protocol";
import { label, withoutLayers } from "../kernel/sites";
import { PythonLine, quoted } from "../python/PythonLine";
import type { Store } from "../store";
import { count, exact, real } from "../ui/format";
import { Menu } from "../ui/Menu";
import { Select } from "../ui/Select";
import { StudyForm, StudyStatus, IntegerField } from "./controls";

const TITLES = { most: "Most", least: "Least", random: "At random" } as const;
const UNIT_AXES = [
  ["-1", "last axis (units)"],
  ["-2", "last but one (heads)"],
  ["1", "axis 1 (channels first)"],
] as const;

export function ExamplesPanel({ store, site }: { store: Store; site: Site }) {
  const { studies } = store;
  const shown = studies.examples.value;
  const found = shown?.found ?? null;
  const wish = studies.options.value;
  const here = found !== null && [found.site, withoutLayers(found.site)].includes(site.key);
  // a saved page shows what was found, and nothing else can be asked for
  const same = here && found.unit === wish.unit && found.axis === wish.axis;
  const of = found && (store.replayNote.value !== "" || same) ? found : { ...wish, site: site.key, batch: 0 };
  const axis = of.axis === -1 ? "" : `, axis=${of.axis}`;
  return (
    <section class="nni-words-panel" aria-label="Examples">
      {!found && (
        <p class="nni-faint">
          Which inputs excite one unit, head or channel? Compute searches the batch that all panels look at; insp.examples(data, …) searches any data, and shows what it finds here.
        </p>
      )}
      <StudyStatus store={store} what="examples" now={shown?.latest} found={found ? searchText(found) : ""} />
      {found && <ExampleLists store={store} found={found} />}
      <PythonLine text={`insp.examples(${of.batch >= 0 ? "None" : "data"}, ${quoted(of.site)}, ${of.unit}${axis})`} />
    </section>
  );
}

export function ExamplesOptions({ store, site }: { store: Store; site: Site }) {
  const { studies } = store;
  const shown = studies.examples.value;
  const found = shown?.found ?? null;
  const wish = studies.options.value;
  const here = found !== null && [found.site, withoutLayers(found.site)].includes(site.key);
  const choose = (unit: number): void => {
    if (here && found.axis === wish.axis && unit < found.units && store.replayNote.value === "") studies.request("examples", { site: found.site, unit }, false);
    else studies.setOptions({ unit });
  };
  return (
    <StudyForm store={store} name="Search for examples" running={shown?.latest.running ?? false} start={() => studies.request("examples", { site: site.key }, true)}>
      <IntegerField name="unit" value={wish.unit} choose={choose} of={here ? found.units : undefined} />
      <Menu label="More about the examples">
        <Select labelled label="Units along" value={String(wish.axis)} options={UNIT_AXES.map(([axis]) => axis)} word={(axis) => UNIT_AXES.find(([one]) => one === axis)?.[1] ?? axis} choose={(axis) => studies.setOptions({ axis: Number(axis) })} />
      </Menu>
    </StudyForm>
  );
}

function searchText(found: UnitExamples): string {
  const nan = found.nan > 0 ? ` ${count(found.nan)} have a NaN, which is left out.` : "";
  const stopped = found.stopped ? " The search was stopped." : "";
  const notes = found.notes.map((note) => ` ${note}.`).join("");
  return `Unit ${found.unit} of ${count(found.units)} of ${label(found.site)}, in ${count(found.count)} examples of ${found.source}.${nan}${stopped}${notes}`;
}

function ExampleLists({ store, found }: { store: Store; found: UnitExamples }) {
  const pictures = found.pictures ?? store.inputs.picturesOf(found.batch);
  if (found.rows.length === 0) return <p class="nni-unseen">No example has a number for this unit.</p>;
  return (
    <>
      {found.constant && (
        <p class="nni-change" data-testid="nni-examples-constant">
          This unit has one value, {real(found.rows[0]!.value)}, for every example, so it means nothing which ones are listed.
        </p>
      )}
      <div class="nni-excited">
        {(Object.keys(TITLES) as (keyof typeof TITLES)[]).map((which) => (
          <section key={which} aria-label={TITLES[which]}>
            <h4>{TITLES[which]}</h4>
            <ol class="nni-bare">
              {found.rows.map((row, i) => row.which === which && <ExampleItem key={row.rank} row={row} pictures={pictures} at={found.pictures ? i : row.example} extent={found.extent} />)}
            </ol>
          </section>
        ))}
      </div>
    </>
  );
}

/** `at`: the number of its picture. */
function ExampleItem({ row, pictures, at, extent }: { row: ExciteRow; pictures: Pictures | null | undefined; at: number; extent: readonly number[] }) {
  const names = row.place.length === 1 ? ["position"] : row.place.length === 2 ? ["row", "column"] : row.place.map((_, i) => `axis ${i}`);
  const place = row.place.map((at, i) => `${names[i]} ${at}`).join(", ");
  return (
    <li data-testid="nni-excited" data-site={row.which} data-value={exact(row.value)}>
      <Thumbnail pictures={pictures} example={at} height={56} mark={placeOnPicture(row.place, extent, pictures)} />
      <span class="nni-excited-value">{real(row.value)}</span>
      <span class="nni-faint">
        example {row.example}
        {place && `, ${place}`}
      </span>
      {row.words.length > 0 && (
        <span class="nni-excited-text" data-apart={areWholeWords(row.words) ? "" : undefined}>
          {row.words.map((word, i) => (
            <bdi key={i} class="nni-word" data-pointed={i === row.at ? "" : undefined}>
              {visibleText(word)}
            </bdi>
          ))}
        </span>
      )}
    </li>
  );
}
