// The strength of a perturbation: a slider for dragging, a number for any finite value.
// Invariants: arriving values never overwrite one that is being typed; the slider's range grows to
// hold a typed value, and its place stays.
import { useRef } from "preact/hooks";

interface Props {
  /** A full name for screen readers: "factor of Scale on head". */
  name: string;
  value: number;
  low: number;
  high: number;
  /** Ids of the two inputs, for tests. */
  slider: string;
  number: string;
  change: (strength: number) => void;
}

const STEPS = 200;

export function Strength({ name, value, low, high, slider, number, change }: Props) {
  const typing = useRef<string | null>(null);
  const set = (text: string): void => {
    const strength = Number(text);
    if (text.trim() !== "" && Number.isFinite(strength)) change(strength);
  };
  return (
    <span class="nni-strength">
      <input
        type="range"
        min={Math.min(low, Math.floor(value))}
        max={Math.max(high, Math.ceil(value))}
        step={(high - low) / STEPS || "any"}
        value={value}
        aria-label={name}
        title={name}
        data-testid={slider}
        onInput={(event) => set(event.currentTarget.value)}
      />
      <input
        type="number"
        step="any"
        value={typing.current ?? String(Number(value.toPrecision(6)))}
        aria-label={`${name}, as a number`}
        title={name}
        data-testid={number}
        onInput={(event) => {
          typing.current = event.currentTarget.value;
          set(event.currentTarget.value);
        }}
        onBlur={() => (typing.current = null)}
      />
    </span>
  );
}
