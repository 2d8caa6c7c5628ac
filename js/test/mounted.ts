// A whole view over a mock comm, through anywidget's two entry points, for the tests of its parts.
import widget from "../src/widget";
import { MockModel, frame, layout, settle, state } from "./helpers";

export interface Mounted {
  readonly control: MockModel;
  readonly stream: MockModel;
  readonly el: HTMLElement;
  /** Aborted at the end of a test, which ends the view. */
  readonly life: AbortController;
  /** The first part with this test id, or all of them. */
  find(id: string): HTMLElement | null;
  all(id: string): HTMLElement[];
  /** Ends the view, after a test. */
  end(): void;
}

let count = 0;

/** A view that has been told nothing yet. */
export function mounted(): Mounted {
  const inspector = `test-${++count}`;
  const life = new AbortController();
  const control = new MockModel({ role: "control", inspector, version: 1 });
  const stream = new MockModel({ role: "stream", inspector, version: 1 });
  for (const model of [stream, control]) widget.initialize({ model, signal: life.signal });
  const el = document.createElement("div");
  document.body.append(el);
  widget.render({ model: control, el, signal: life.signal });
  return {
    control,
    stream,
    el,
    life,
    find: (id) => el.querySelector<HTMLElement>(`[data-testid="${id}"]`),
    all: (id) => [...el.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)],
    end() {
      life.abort();
      el.remove();
    },
  };
}

/** A view of the small model of the helpers, with one pass. */
export async function started(): Promise<Mounted> {
  const view = mounted();
  view.stream.emit(layout());
  view.stream.emit(state());
  view.stream.emit(...frame(1));
  await settle();
  return view;
}
