// Lays out flows. The library is the text that the kernel sent. It runs in a worker (200 modules take
// it longer than a click may last) or, if the page does not allow workers from text, in the page.
// Invariant: every request gets one outcome; if the page's content security policy refuses both, the
// outcome is an error that a user can read.
import type { answer, FlowLayout, LayoutReply, LayoutRequest, Link, Size } from "./arrange";

export interface Arranger {
  arrange(nodes: readonly Size[], links: readonly Link[]): Promise<FlowLayout>;
  close(): void;
}

interface PendingLayout {
  readonly order: LayoutRequest;
  readonly resolve: (arranged: FlowLayout) => void;
  readonly reject: (error: Error) => void;
}

export const POLICY_REFUSED = "This page does not let the layout library run: its content security policy refuses it.";

export function makeArranger(source: BlobPart): Arranger {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const waiting = new Map<number, PendingLayout>();
  let last = 0;
  let here: Promise<typeof answer> | null = null;

  const inPage = (entry: PendingLayout): void => {
    here ??= importLibrary(url);
    here.then(
      (answer) => settle(entry, answer(entry.order)),
      () => entry.reject(new Error(POLICY_REFUSED)),
    );
  };
  let worker = startWorker(url);
  if (worker) {
    // A content security policy may let the worker be made and refuse its script only now.
    worker.onerror = () => {
      worker = null;
      waiting.forEach(inPage);
      waiting.clear();
    };
    worker.onmessage = ({ data }: MessageEvent<LayoutReply>) => {
      const entry = waiting.get(data.number);
      waiting.delete(data.number);
      if (entry) settle(entry, data);
    };
  }
  return {
    arrange: (nodes, links) =>
      new Promise((resolve, reject) => {
        const entry: PendingLayout = { order: { number: ++last, nodes, links }, resolve, reject };
        if (!worker) return inPage(entry);
        waiting.set(last, entry);
        worker.postMessage(entry.order);
      }),
    close() {
      worker?.terminate();
      URL.revokeObjectURL(url);
    },
  };
}

function startWorker(url: string): Worker | null {
  try {
    return new Worker(url, { type: "module" });
  } catch {
    return null;
  }
}

async function importLibrary(url: string): Promise<typeof answer> {
  // The one import at run time (eslint.config.js): the layout library, from the text the kernel sent.
  return ((await import(url)) as { answer: typeof answer }).answer;
}

function settle({ resolve, reject }: PendingLayout, { arranged, error }: LayoutReply): void {
  if (arranged) resolve(arranged);
  else reject(new Error(`The flow could not be laid out: ${error}`));
}
