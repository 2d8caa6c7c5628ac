// A line that says how much of a long list is not on screen.
import { count } from "../ui/format";

export function Truncation({ shown, total, what }: { shown: number; total: number; what: string }) {
  if (shown >= total) return null;
  return <p class="nni-faint nni-small">{`${count(total - shown)} more ${what} are not shown: select a module inside.`}</p>;
}
