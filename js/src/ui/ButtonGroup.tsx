// A choice between a few words, all in sight.

interface Props<T extends string> {
  label: string;
  testid?: string;
  value: T;
  options: readonly T[];
  choose: (value: T) => void;
}

export function ButtonGroup<T extends string>({ label, testid, value, options, choose }: Props<T>) {
  return (
    <span class="nni-button-group" role="group" aria-label={label} data-testid={testid} data-value={value}>
      {options.map((option) => (
        <button key={option} type="button" aria-pressed={option === value} onClick={() => choose(option)}>
          {option}
        </button>
      ))}
    </span>
  );
}
