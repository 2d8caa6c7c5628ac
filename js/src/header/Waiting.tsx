// What the screen waits for, with the time so far: "compiling the first pass, 8 s".
// Invariant: the seconds go on while the kernel is busy; a screen reader hears the words once.
import { useEffect, useState } from "preact/hooks";
import type { Store } from "../store";

export function Waiting({ store, before = "" }: { store: Store; before?: string }) {
  const waiting = store.waiting.value;
  const [now, tick] = useState(() => performance.now());
  useEffect(() => {
    if (waiting.length === 0) return;
    tick(performance.now());
    const timer = setInterval(() => tick(performance.now()), 500);
    return () => clearInterval(timer);
  }, [waiting]);
  return (
    <span>
      {before}
      {waiting.map(({ what, since }, i) => (
        <span key={what} data-testid="nni-waiting" data-value={what}>
          {i > 0 ? "; " : before && ": "}
          {what}
          <span aria-hidden="true">, {Math.max(0, Math.floor((now - since) / 1000))}&nbsp;s</span>
        </span>
      ))}
    </span>
  );
}
