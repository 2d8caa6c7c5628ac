// The bar between two parts, which changes the size of the one before it: by dragging, by the arrow
// keys, and back to its own size by a double click. Invariants: neither part becomes smaller than its
// least size; the size is kept for each width class.
import type { Signal } from "@preact/signals";
import { useRef } from "preact/hooks";

const KEY_PIXELS = 24;

interface Props {
  /** What is resized, in words. */
  label: string;
  testid?: string;
  /** The sizes in pixels that were chosen, by `name`. */
  sizes: Signal<Readonly<Record<string, number>>>;
  name: string;
  /** Whether the parts stand side by side. */
  sideways: boolean;
  /** The selector of the part that is resized, the least size of it, and of the parts behind it. */
  part: string;
  leastSize: number;
  leastRest: number;
}

export function Split({ label, testid, sizes, name, sideways, part, leastSize, leastRest }: Props) {
  const bar = useRef<HTMLDivElement>(null);
  const from = useRef<{ at: number; size: number } | null>(null);
  const measure = (): { size: number; most: number } => {
    const body = bar.current!.parentElement!;
    const [resized, around, own] = [body.querySelector(part)!, body, bar.current!].map((one) => one.getBoundingClientRect());
    const [size, end, start, thick] = sideways ? [resized.width, around.right, resized.left, own.width] : [resized.height, around.bottom, resized.top, own.height];
    return { size, most: Math.max(end - start - thick - leastRest, leastSize) };
  };
  const resize = (to: number, most: number): void => {
    sizes.value = { ...sizes.value, [name]: Math.round(Math.min(Math.max(to, leastSize), most)) };
  };
  const reset = (): void => {
    sizes.value = Object.fromEntries(Object.entries(sizes.value).filter(([one]) => one !== name));
  };
  const place = ({ clientX, clientY }: PointerEvent): number => (sideways ? clientX : clientY);
  return (
    <div
      ref={bar}
      class={sideways ? "nni-split nni-split-sideways" : "nni-split"}
      role="separator"
      tabIndex={0}
      aria-label={label}
      aria-orientation={sideways ? "vertical" : "horizontal"}
      aria-valuenow={sizes.value[name] ?? 0}
      aria-valuetext={name in sizes.value ? `${sizes.value[name]} pixels` : "its own size"}
      title={`${label}: drag it, or press the arrow keys. A double click resets it.`}
      data-testid={testid}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        from.current = { at: place(event), size: measure().size };
      }}
      onPointerMove={(event) => {
        if (from.current) resize(from.current.size + place(event) - from.current.at, measure().most);
      }}
      onPointerUp={() => (from.current = null)}
      onPointerCancel={() => (from.current = null)}
      onDblClick={reset}
      onKeyDown={(event) => {
        const by = { [sideways ? "ArrowLeft" : "ArrowUp"]: -KEY_PIXELS, [sideways ? "ArrowRight" : "ArrowDown"]: KEY_PIXELS }[event.key];
        if (by === undefined && event.key !== "Enter") return;
        event.preventDefault();
        event.stopPropagation();
        const { size, most } = measure();
        if (by === undefined) reset();
        else resize(size + by, most);
      }}
    />
  );
}
