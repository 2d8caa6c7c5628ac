// The numbers of the row under the pointer, or of the row that the keys have reached.
// Invariants: it covers no row and moves nothing; Escape, scrolling by hand and leaving the tree
// close it.
import type { RefObject } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { statistic } from "../../kernel/decode";
import type { Statistic } from "../../kernel/protocol";
import { label, type Sites } from "../../kernel/sites";
import type { Store } from "../../store";
import { NOT_MEASURED, compact, count, percent, real } from "../../ui/format";
import { EACH } from "../../kernel/quantities";
import { ids } from "../../ui/testids";
import { HEAD_HEIGHT, ROW_HEIGHT } from "../visible";

const HOVER_MS = 350;
const KEY_MS = 500;

interface Told {
  hovered: (index: number) => void;
  keyed: (index: number) => void;
  scrolled: () => void;
  hide: () => void;
}

/** The site of the tip, and the handlers that report the pointer and the keys to this hook. */
export function useTip(selected: number): [tip: number | null, told: Told] {
  const [tip, setTip] = useState<number | null>(null);
  const timer = useRef<ReturnType<typeof setTimeout>>();
  const byKey = useRef(false);
  const told = useMemo<Told>(() => {
    const soon = (index: number, ms: number): void => {
      clearTimeout(timer.current);
      setTip(null);
      timer.current = setTimeout(() => setTip(index), ms);
    };
    return {
      hovered: (index) => {
        byKey.current = false;
        soon(index, HOVER_MS);
      },
      keyed: (index) => {
        byKey.current = true;
        soon(index, KEY_MS);
      },
      scrolled: () => {
        if (byKey.current) return; // by the keys themselves
        clearTimeout(timer.current);
        setTip(null);
      },
      hide: () => {
        clearTimeout(timer.current);
        setTip(null);
      },
    };
  }, []);
  useEffect(() => () => clearTimeout(timer.current), []);
  return [byKey.current && tip !== selected ? null : tip, told];
}

const FIGURES: readonly Statistic[] = ["mean", "std", "min", "max", "norm", "zeros"];

interface Props {
  id: string;
  store: Store;
  sites: Sites;
  index: number;
  /** The position of its row among the rows in view, in pixels. */
  row: number;
  scroller: RefObject<HTMLDivElement>;
}

export function Tip({ id, store, sites, index, row, scroller }: Props) {
  const site = sites.list[index];
  const frame = store.frame.value;
  const element = scroller.current;
  const top = (element?.offsetTop ?? 0) + HEAD_HEIGHT + row;
  const below = row + ROW_HEIGHT < (element?.clientHeight ?? 0) / 2;
  const height = element?.parentElement?.clientHeight ?? 0;
  const place = below ? { top: `${top}px` } : { bottom: `${height - top - ROW_HEIGHT}px` };
  const measured = EACH.filter(({ index: q }) => frame && !Number.isNaN(statistic(frame, index, q, "size")));
  return (
    <div id={id} class="nni-tip" role="tooltip" style={place} data-testid={ids.tip} data-site={site.key}>
      <p>
        <code>{label(site.key)}</code> {site.kind} {site.output && <span class="nni-faint">{site.output}</span>}
      </p>
      <p class="nni-faint">
        {count(site.parameters)} parameters, {site.flops === null ? "unknown" : compact(site.flops)} FLOPs
        {site.calls !== 1 && `, ${count(site.calls)} calls`}
      </p>
      {measured.length > 0 && (
        <table>
          <thead>
            <tr>
              <td />
              {FIGURES.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
              <th scope="col">NaN/Inf</th>
            </tr>
          </thead>
          <tbody>
            {measured.map(({ quantity, index: q, word }) => {
              const of = (name: Statistic): number => statistic(frame!, index, q, name);
              const bad = of("nan") + of("posinf") + of("neginf");
              return (
                <tr key={quantity}>
                  <th scope="row" class={`nni-q-${quantity}`}>
                    {word}
                  </th>
                  {FIGURES.map((name) => (
                    <td key={name}>{name === "zeros" ? percent(of(name) / of("size")) : real(of(name))}</td>
                  ))}
                  <td class={bad > 0 ? "nni-bad" : undefined}>{Number.isNaN(bad) ? NOT_MEASURED : count(bad)}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      )}
      {measured.length === 0 && <p>{frame ? "Not measured in this pass." : "No pass yet."}</p>}
      {site.unseen !== "" && <p>Not seen: {site.unseen}.</p>}
      {site.note !== "" && <p>{site.note}</p>}
      {site.aliases.length > 0 && <p>The same module: {site.aliases.join(", ")}</p>}
    </div>
  );
}
