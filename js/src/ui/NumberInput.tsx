// A field for a number. Invariant: what is no finite number, such as an empty field, changes nothing.
import type { JSX } from "preact";

type Props = Omit<JSX.InputHTMLAttributes, "onInput" | "type"> & { readonly change: (value: number) => void };

export function NumberInput({ change, ...more }: Props) {
  return (
    <input
      type="number"
      {...more}
      onInput={(event) => {
        const value = event.currentTarget.valueAsNumber;
        if (Number.isFinite(value)) change(value);
      }}
    />
  );
}
