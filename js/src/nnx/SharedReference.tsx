// The sign of a shared reference: equal numbers are one object, and light up together.
// Invariant: the number and a text say what the colour says.
import type { Store } from "../store";

interface Referenced {
  readonly reference: number;
  readonly first: string | null;
  readonly also: readonly string[];
}

export function SharedReference({ store, shared }: { store: Store; shared: Referenced }) {
  const { reference } = shared;
  if (reference === 0) return null;
  const { marked } = store.nnx;
  const text = referenceText(shared);
  return (
    <button
      type="button"
      class={marked.value === reference ? "nni-reference nni-reference-marked" : "nni-reference"}
      title={text}
      aria-label={`Reference ${reference}: ${text}`}
      onMouseEnter={() => (marked.value = reference)}
      onMouseLeave={() => (marked.value = 0)}
      onFocus={() => (marked.value = reference)}
      onBlur={() => (marked.value = 0)}
    >
      ↔{reference}
    </button>
  );
}

function referenceText({ first, also }: Referenced): string {
  const parts = ["one object under several paths"];
  if (first !== null) parts.push(`the same as ${first || "(model)"} above`);
  if (also.length > 0) parts.push(`also at ${also.join(", ")}`);
  return parts.join("; ");
}
