// A choice of which only the chosen word is in sight: "Axis: auto ▾".

interface Props<T extends string> {
  label: string;
  testid?: string;
  value: T;
  options: readonly T[];
  choose: (value: T) => void;
  /** What is shown for an option; by default the option. */
  word?: (option: T) => string;
  /** Whether the label stands before the chosen word. */
  labelled?: boolean;
  /** Whether the chosen word is a path, which is cut at its front where there is no room. */
  path?: boolean;
}

export function Select<T extends string>({ label, testid, value, options, choose, word = (one) => one, labelled = false, path = false }: Props<T>) {
  return (
    <label class={path ? "nni-select nni-select-path" : "nni-select"} title={path ? word(value) : label}>
      {path && (
        <span aria-hidden="true">
          ▾ <bdi>{word(value)}</bdi>
        </span>
      )}
      {labelled && <span>{label}:</span>}
      <select aria-label={label} data-testid={testid} data-value={value} value={value} onChange={(event) => choose(event.currentTarget.value as T)}>
        {options.map((option) => (
          <option key={option} value={option}>
            {word(option)}
          </option>
        ))}
      </select>
    </label>
  );
}
