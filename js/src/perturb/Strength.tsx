// The strength of a perturbation: a slider for dragging, a number for any finite value.
// Invariant: what is being typed is never overwritten by what arrives.
import { useRef } from "preact/hooks";
import { ids } from "../testids";

interface Props {
  name: string;
  value: number;
  change: (strength: number) => void;
}

export function Strength({ name, value, change }: Props) {
  const typing = useRef<string | null>(null);
  const set = (text: string): void => {
    const strength = Number(text);
    if (text.trim() !== "" && Number.isFinite(strength)) change(strength);
  };
  return (
    <span class="nni-strength">
      <input
        type="range"
        min={Math.min(0, Math.floor(value))}
        max={Math.max(2, Math.ceil(value))}
        step={0.01}
        value={value}
        aria-label={`Strength of ${name}`}
        data-testid={ids.strength}
        onInput={(event) => set(event.currentTarget.value)}
      />
      <input
        type="number"
        step="any"
        value={typing.current ?? String(Number(value.toPrecision(6)))}
        aria-label={`Strength of ${name}, as a number`}
        data-testid={ids.strengthNumber}
        onInput={(event) => {
          typing.current = event.currentTarget.value;
          set(event.currentTarget.value);
        }}
        onBlur={() => (typing.current = null)}
      />
    </span>
  );
}
