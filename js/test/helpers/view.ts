// A whole view over a mock comm, through anywidget's two entry points, for the tests of its parts.
import type { State } from "../../src/kernel/protocol";
import { GROUP_OF } from "../../src/detail/groups";
import widget from "../../src/widget";
import { MockModel, settle } from "./kernel";
import { frame, layout, state } from "./messages";

export interface TestView {
  readonly control: MockModel;
  readonly stream: MockModel;
  readonly el: HTMLElement;
  /** Aborted at the end of a test, which ends the view. */
  readonly life: AbortController;
  readonly inspector: string;
  /** The first part with this test id, or all of them. */
  find(id: string): HTMLElement | null;
  all(id: string): HTMLElement[];
  /** Ends the view, after a test. */
  end(): void;
}

let count = 0;

/** A view that has been told nothing yet. */
export function mountView(): TestView {
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
    inspector,
    find: (id) => el.querySelector<HTMLElement>(`[data-testid="${id}"]`),
    all: (id) => [...el.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)],
    end() {
      life.abort();
      el.remove();
    },
  };
}

/** A view of the small model of the helpers, with one pass. */
export async function startView(more: Partial<State> = {}): Promise<TestView> {
  const view = mountView();
  await sendStart(view, more);
  return view;
}

/** Tells a view what there is at first. */
export async function sendStart({ stream }: TestView, more: Partial<State> = {}): Promise<void> {
  stream.emit(layout());
  stream.emit(state(more));
  stream.emit(...frame(1));
  await settle();
}

export function press(target: Element, key: string, more: KeyboardEventInit = {}): void {
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
}

/** Sets a field, as a person does. */
export function enterValue(field: HTMLElement | null, value: string, event = "change"): void {
  (field as HTMLInputElement).value = value;
  field!.dispatchEvent(new Event(event, { bubbles: true }));
}

/** Shows a panel, as a click on its group and one on its tab do. */
export async function openTab(find: TestView["find"], panel: string): Promise<void> {
  if (!find(`nni-tab-${panel}`)) {
    find(`nni-group-${GROUP_OF[panel]!}`)!.click();
    await settle();
  }
  find(`nni-tab-${panel}`)!.click();
  await settle();
}

/** Opens a menu, or the part behind a button. */
export async function openMenu(find: TestView["find"], id: string): Promise<void> {
  if (find(id)!.getAttribute("aria-expanded") === "true") return;
  find(id)!.click();
  await settle();
}
