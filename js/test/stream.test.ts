// The stream comm's own small front end: its model joins the session, whichever is there first.
import { describe, expect, it } from "vitest";
import stream from "../src/stream";
import widget from "../src/widget";
import { MockModel, settle } from "./helpers/kernel";
import { layout, state } from "./helpers/messages";

let count = 0;

function models(): { control: MockModel; beside: MockModel; life: AbortController } {
  const inspector = `stream-${++count}`;
  return {
    control: new MockModel({ role: "control", inspector }),
    beside: new MockModel({ role: "stream", inspector }),
    life: new AbortController(),
  };
}

async function shows(control: MockModel, beside: MockModel, life: AbortController): Promise<boolean> {
  const el = document.createElement("div");
  document.body.append(el);
  widget.render({ model: control, el, signal: life.signal });
  beside.emit(layout());
  beside.emit(state());
  await settle();
  const found = el.querySelector(`[data-testid="nni-selected"]`) !== null;
  life.abort();
  el.remove();
  return found;
}

describe("the stream's model", () => {
  it("joins a session that is there", async () => {
    const { control, beside, life } = models();
    widget.initialize({ model: control, signal: life.signal });
    stream.initialize({ model: beside, signal: life.signal });
    expect(await shows(control, beside, life)).toBe(true);
  });

  it("waits for one that is not, and hello is said once both are there", async () => {
    const { control, beside, life } = models();
    stream.initialize({ model: beside, signal: life.signal });
    widget.initialize({ model: control, signal: life.signal });
    await settle();
    expect(control.of("hello")[0]).toMatchObject({ streams: true });
    expect(await shows(control, beside, life)).toBe(true);
  });

  it("is forgotten when it closes before", async () => {
    const { control, beside, life } = models();
    const own = new AbortController();
    stream.initialize({ model: beside, signal: own.signal });
    own.abort();
    widget.initialize({ model: control, signal: life.signal });
    expect(await shows(control, beside, life)).toBe(false);
  });
});
