// A strip of units: the figure of each as a shade, and the numbers of the unit under the pointer or
// the arrow keys. In edit mode it sets a mask by click, drag or space (shift and arrows: several).
// Invariants: it is one tab stop; nothing changes outside edit mode; a drag sends one request, at
// its end; the line of numbers keeps its place even when it is empty.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import type { UnitStatistic, UnitsData } from "../kernel/decode";
import { visibleText } from "../inputs/state";
import { count, percent, real } from "../ui/format";
import { observeSize } from "../ui/observeSize";
import { dark } from "../ui/theme";
import { unitAt, stripGrid, isDead, unitsOnLine, paintStrip } from "./cells";
import type { Mask } from "../masks/requests";

interface Props {
  data: UnitsData;
  figure: UnitStatistic;
  mask: Mask;
  editing: boolean;
  change: (mask: Mask) => void;
  /** The word of each unit, where the units are the positions of one text. */
  words?: readonly string[] | undefined;
  /** The picture of which the units are patches. */
  picture?: Parameters<typeof paintStrip>[1]["picture"];
}

export function UnitStrip({ data, figure, mask: given, editing, change, words, picture }: Props) {
  const units = data.header.units;
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState<number | null>(null);
  const [drag, setDrag] = useState<{ mask: Mask; to: 0 | 1; last: number } | null>(null);
  useEffect(() => {
    const element = box.current!;
    return observeSize(element, () => setWidth(element.clientWidth));
  }, []);
  const grid = stripGrid(units, width, picture?.patches);
  const mask = drag?.mask ?? given;
  const active = at === null || at >= units ? null : at;
  const night = dark.value;

  const paint = useCallback(
    (area: Area) => paintStrip(area, { data, figure, grid, mask, active, dark: night, picture }),
    [data, figure, grid.columns, grid.width, grid.height, mask, active, night, picture?.of],
  );

  const under = (event: PointerEvent): number | null => {
    const place = box.current!.querySelector("canvas")!.getBoundingClientRect();
    return unitAt(grid, units, event.clientX - place.left, event.clientY - place.top);
  };
  const set = (mask: Mask, from: number, end: number, to: 0 | 1): Mask => {
    const next = mask.slice();
    if (picture) for (const unit of unitsOnLine(grid, from, end)) next[unit] = to;
    else next.fill(to, Math.min(from, end), Math.max(from, end) + 1);
    return next;
  };
  const down = (event: PointerEvent): void => {
    const unit = under(event);
    if (unit === null) return;
    setAt(unit);
    if (!editing || event.button !== 0) return;
    event.preventDefault();
    box.current!.focus();
    box.current!.setPointerCapture?.(event.pointerId);
    const to = given[unit] ? 0 : 1;
    setDrag({ mask: set(given, unit, unit, to), to, last: unit });
  };
  const move = (event: PointerEvent): void => {
    const unit = under(event);
    if (unit !== at) setAt(unit);
    if (drag && unit !== null && unit !== drag.last) {
      // several moves may come before the next drawing
      setDrag((so) => so && { mask: set(so.mask, so.last, unit, so.to), to: so.to, last: unit });
    }
  };
  const up = (): void => {
    if (!drag) return;
    setDrag(null);
    change(drag.mask);
  };
  const key = (event: KeyboardEvent): void => {
    const steps: Readonly<Record<string, number>> = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
    const here = active ?? 0;
    let to: number | undefined;
    if (event.key in steps) to = active === null ? 0 : here + steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = units - 1;
    if (to !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      if (to < 0 || to >= units) return;
      setAt(to);
      if (editing && event.shiftKey && active !== null) change(set(given, here, to, given[here] as 0 | 1));
    } else if (event.key === " " && active !== null) {
      event.preventDefault();
      event.stopPropagation();
      if (editing) change(set(given, here, here, given[here] ? 0 : 1));
    }
  };

  const id = `nni-unit-${data.header.id}`;
  const readout = active === null ? "" : unitText(data, active, mask, words?.[active]);
  return (
    <div class="nni-strip">
      <div
        ref={box}
        class={editing ? "nni-strip-cells nni-strip-editing" : "nni-strip-cells"}
        role="listbox"
        tabIndex={0}
        aria-multiselectable={editing}
        aria-label={`${figure} of ${count(units)} units: ${editing ? "space switches one off or on" : "arrows go along them"}`}
        aria-activedescendant={active === null ? undefined : id}
        data-testid="nni-strip"
        data-value={units}
        onPointerDown={down}
        onPointerMove={move}
        onPointerUp={up}
        onPointerCancel={() => setDrag(null)}
        onPointerLeave={() => !drag && document.activeElement !== box.current && setAt(null)}
        onFocus={() => active === null && setAt(0)}
        onBlur={() => setAt(null)}
        onKeyDown={key}
      >
        <Canvas height={grid.rows * grid.height + grid.below} width={Math.max(width, 1)} label="" paint={paint} />
        {active !== null && (
          <span id={id} class="nni-hidden" role="option" aria-selected={mask[active] === 1}>
            {readout}
          </span>
        )}
      </div>
      <p class="nni-under-pointer" data-testid="nni-unit-pointed" data-value={active ?? ""}>
        {readout || " "}
      </p>
    </div>
  );
}

function unitText({ figures: f }: UnitsData, unit: number, mask: Mask, word: string | undefined): string {
  const parts = [
    `unit ${unit}${word === undefined ? "" : ` \u2068${visibleText(word)}\u2069`}`,
    `mean ${real(f.mean[unit])}`,
    `std ${real(f.std[unit])}`,
    `${real(f.min[unit])} … ${real(f.max[unit])}`,
    `zeros ${percent(f.zero_fraction[unit])}`,
  ];
  if (f.nonfinite[unit] > 0) parts.push(`${count(f.nonfinite[unit])} NaN or Inf`);
  if (isDead({ figures: f } as UnitsData, unit)) parts.push(mask[unit] ? "dead" : "all 0");
  if (!mask[unit]) parts.push("switched off");
  return parts.join(" · ");
}
