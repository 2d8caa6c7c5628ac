// The flow: which one is shown, where nodes go, what keys do, and the panel, in happy-dom.
import { afterEach, beforeEach, describe, expect, it } from "vitest";
import { colourScale, nodeValue } from "../../src/flow/colouring";
import { arrange, type Link, type Size } from "../../src/flow/layout/arrange";
import { POLICY_REFUSED, makeArranger, type Arranger } from "../../src/flow/layout/arranger";
import { edgeLabel, linksOf, callMarks, sizeOf } from "../../src/flow/layout/sizes";
import { arrowHead, edgeLine, neighbours, nextNode } from "../../src/flow/paths";
import { FlowState, scopeOf } from "../../src/flow/state";
import { initialViewport, fit, reveal, keepVisible, zoom } from "../../src/flow/viewport";
import type { KernelRequest } from "../../src/kernel/bridge";
import { VERSION, type Flow, type FlowEdge, type FlowNode } from "../../src/kernel/protocol";
import { indexSites } from "../../src/kernel/sites";
import { settle } from "../helpers/kernel";
import { cell, effect, frame, layout, perturbation, site, state } from "../helpers/messages";
import { enterValue, mountView, press, type TestView, openTab } from "../helpers/view";

const X = "float32[4,3]";

function node(site: string, more: Partial<FlowNode> = {}): FlowNode {
  return { role: "module", site, name: site, kind: "Linear", output: X, calls: 1, times: 1, conditional: false, ...more };
}

function edge(producer: number, consumer: number, more: Partial<FlowEdge> = {}): FlowEdge {
  return { producer, consumer, shapes: [X], loop: false, ...more };
}

/** x + head(blocks/0(x)), with blocks/0 in a loop: IN, blocks/0, head, +, OUT. */
function residual(site = "", id = 1, layoutId = 1): Flow {
  return {
    type: "flow", version: VERSION, layout: layoutId, site, id,
    nodes: [
      node(site, { role: "input", name: "input", kind: "" }), node("blocks/0", { times: 6 }), node("head"),
      node("", { role: "join", name: "", kind: "made of 2 values" }), node(site, { role: "output", name: "output", kind: "" }),
    ],
    edges: [edge(0, 1), edge(1, 1, { loop: true }), edge(1, 2), edge(0, 3), edge(2, 3), edge(3, 4)],
    absent: [{ site: "blocks/1", why: "it is not called by the example" }],
  }; // prettier-ignore
}

describe("the layout", () => {
  const sizes = (n: number): Size[] => Array.from({ length: n }, () => ({ width: 100, height: 40 }));
  const link = (from: number, to: number, loop = false): Link => ({ from, to, loop, label: { width: 60, height: 14 } });

  it("puts what is fed below what feeds it, and nothing on anything", () => {
    const { nodes, edges, width, height } = arrange(sizes(4), [link(0, 1), link(0, 2), link(1, 3), link(2, 3)]);
    expect(nodes[0].y).toBeLessThan(nodes[1].y);
    expect(nodes[1].y).toBe(nodes[2].y);
    expect(nodes[2].x - nodes[1].x).toBeGreaterThan(100);
    expect(nodes[3].y).toBeGreaterThan(nodes[2].y);
    for (const { x, y } of nodes) expect(x > 50 && x < width - 50 && y > 20 && y < height - 20).toBe(true);
    expect(edges.every(({ label, points }) => label !== null && points.length >= 2)).toBe(true);
  });

  it("is not turned round by loops", () => {
    const { nodes, edges } = arrange(sizes(3), [link(0, 1), link(1, 2), link(2, 0, true), link(1, 1, true)]);
    expect(nodes[0].y < nodes[1].y && nodes[1].y < nodes[2].y).toBe(true);
    const back = edges[2].points;
    expect(back[0].y).toBeGreaterThan(back.at(-1)!.y);
    expect(edges[3].points.length).toBeGreaterThan(2);
  });

  it("takes 200 nodes", () => {
    const links = Array.from({ length: 199 }, (_, i) => link(i, i + 1));
    for (let i = 4; i < 200; i += 4) links.push(link(i - 4, i));
    const { nodes } = arrange(sizes(200), links);
    expect(new Set(nodes.map(({ y }) => Math.round(y))).size).toBe(200);
  });
});

describe("where a page has no workers", () => {
  const bytes = (text: string): Uint8Array<ArrayBuffer> => new TextEncoder().encode(text);

  it("a library that cannot be loaded is told", async () => {
    const arranger = makeArranger(bytes("not a module ("));
    await expect(arranger.arrange([], [])).rejects.toThrow(POLICY_REFUSED);
    arranger.close();
  });
});

describe("what is drawn", () => {
  const flow = residual();

  it("says shapes once, where values are joined", () => {
    expect(flow.edges.map((e) => edgeLabel(flow, e))).toEqual(["f32[4,3]", "f32[4,3]", "f32[4,3]", "", "", "f32[4,3]"]);
    const many = edge(0, 2, { shapes: ["float32[1]", "int32[2]", "bool[3]", "bool[4]"] });
    expect(edgeLabel(flow, many)).toBe("f32[1], i32[2] +2");
    expect(linksOf(flow)[3].label).toEqual({ width: 0, height: 0 });
  });

  it("says what is special about a call", () => {
    expect(callMarks(node("a"))).toEqual([]);
    expect(callMarks(node("a", { times: 6 }))).toEqual(["×6"]);
    expect(callMarks(node("a", { times: null, conditional: true }))).toEqual(["loop", "cond"]);
    expect(sizeOf(node("a".repeat(500))).width).toBe(216);
  });

  it("leads along edges, through joins, and to what is beside", () => {
    const along = neighbours(flow);
    expect(along.next).toEqual([[1, 4], [2], [4], [], []]);
    expect(along.before).toEqual([[], [0], [1], [], [0, 2]]);
    const arranged = arrange(flow.nodes.map(sizeOf), linksOf(flow));
    expect(nextNode("ArrowDown", 0, flow, arranged, along)).toBe(1);
    expect(nextNode("ArrowDown", 2, flow, arranged, along)).toBe(4);
    expect(nextNode("ArrowUp", 4, flow, arranged, along)).toBe(2);
    expect(nextNode("ArrowDown", 4, flow, arranged, along)).toBeNull();
    expect(nextNode("Enter", 0, flow, arranged, along)).toBeNull();
  });

  it("has lines and arrows", () => {
    const points = [{ x: 0, y: 0 }, { x: 0, y: 10 }, { x: 0, y: 30 }]; // prettier-ignore
    expect(edgeLine(points)).toBe("M0.0 0.0L0.0 5.0Q0.0 10.0 0.0 20.0L0.0 30.0");
    expect(arrowHead(points)).toBe("M0.0 30.0L-3.3 24.0L3.3 24.0z");
    expect([edgeLine([]), arrowHead([])]).toEqual(["", ""]);
  });

  it("is coloured by a figure from the least to the most", () => {
    const log = colourScale("activation norm", new Map([["a", 1], ["b", 10], ["c", 100], ["d", NaN], ["e", 0], ["f", Infinity]])); // prettier-ignore
    expect([log.low, log.high]).toEqual([1, 100]);
    expect([...log.shares]).toEqual([["a", 0], ["b", 0.5], ["c", 1], ["e", 0], ["f", 1]]); // prettier-ignore
    const bad = colourScale("NaN and Inf", new Map([["a", 0], ["b", 4], ["c", 2]])); // prettier-ignore
    expect([bad.low, ...bad.shares.values()]).toEqual([0, 0, 1, 0.5]);
    expect(colourScale("effect", new Map([["a", NaN]])).high).toBeNaN();
    const moved = effect({ sites: [{ site: "a", change: 0.5 }, { site: "b", change: null }] }); // prettier-ignore
    expect(["a", "b", "c"].map((key) => nodeValue("effect", null, 0, moved, key))).toEqual([0.5, Infinity, NaN]);
  });

  it("is fitted, enlarged about a point, and never lost", () => {
    const [drawing, view] = [{ width: 200, height: 1000 }, { width: 400, height: 300 }]; // prettier-ignore
    expect(fit(drawing, view)).toEqual({ x: 170, y: 0, k: 0.3 });
    expect(initialViewport(drawing, view, null)).toEqual({ x: 134, y: 0, k: 0.66 });
    expect(zoom({ x: 10, y: 20, k: 1 }, 2, { x: 30, y: 20 })).toEqual({ x: -10, y: 20, k: 2 });
    expect(keepVisible({ x: 9999, y: -9999, k: 1 }, drawing, view)).toEqual({ x: 340, y: -940, k: 1 });
    const seen = reveal({ x: 0, y: 0, k: 1 }, { x: 100, y: 500 }, { width: 100, height: 40 }, view);
    expect(seen).toEqual({ x: 0, y: -234, k: 1 });
  });
});

describe("the state", () => {
  const sites = indexSites(layout());
  let asked: { request: KernelRequest; settle: (error: string | null) => void }[];
  let laid: number[];
  let flow: FlowState;

  beforeEach(() => {
    asked = [];
    laid = [];
    const make = (): Arranger => ({
      arrange: (nodes, links) => {
        laid.push(nodes.length);
        return Promise.resolve(arrange(nodes, links));
      },
      close: () => undefined,
    });
    flow = new FlowState({ sites: () => sites, ask: (request, settle) => asked.push({ request, settle }) }, make);
  });
  const requests = (): unknown[] => asked.map(({ request }) => request);
  const library = new DataView(new ArrayBuffer(4));
  const message = { type: "layout_library", version: VERSION } as const;

  it("follows what is selected elsewhere, and stays where a node was picked", () => {
    expect(["", "blocks", "blocks/0", "head", "gone"].map((key) => scopeOf(sites, key))).toEqual(["", "blocks", "blocks", "", ""]);
    flow.follow("head");
    expect(flow.scope.value).toBe("");
    flow.pick("blocks");
    flow.follow("blocks");
    expect(flow.scope.value).toBe("");
    flow.follow("blocks/0");
    expect(flow.scope.value).toBe("blocks");
    flow.show("");
    flow.follow("blocks/0");
    expect(flow.scope.value).toBe("");
    expect(requests()).toEqual([
      { type: "show_flow", site: "" }, { type: "show_flow", site: "blocks" }, { type: "show_flow", site: "" },
    ]); // prettier-ignore
  });

  it("asks for the library once, when there is something to lay out", async () => {
    flow.show("");
    expect(requests()).toEqual([{ type: "show_flow", site: "" }]);
    flow.takeFlow(residual());
    flow.takeFlow(residual());
    expect(requests().slice(1)).toEqual([{ type: "get_layout_library" }]);
    flow.takeLibrary(message, library);
    await settle();
    expect(flow.drawing.value?.arranged.nodes).toHaveLength(5);
    flow.takeFlow(residual());
    await settle();
    expect(laid).toEqual([5, 5]);
    expect(asked).toHaveLength(2);
  });

  it("ignores answers to older requests and of older layouts", () => {
    flow.show("");
    flow.show("blocks");
    flow.takeFlow(residual(""));
    flow.takeFlow(residual("blocks", 1, 99));
    expect(flow.flow.value).toBeNull();
    asked[0].settle("late");
    expect(flow.problem.value).toBe("");
    flow.takeFlow(residual("blocks"));
    expect(flow.flow.value?.site).toBe("blocks");
  });

  it("numbers the nodes of the drawing, not those of a flow that is still laid out", async () => {
    flow.show("");
    flow.takeFlow(residual(""));
    flow.takeLibrary(message, library);
    await settle();
    expect(flow.byKey.value.get("head")).toBe(2);
    flow.takeFlow({ ...residual("", 2), nodes: [node("a"), node("b"), ...residual().nodes] });
    expect(flow.byKey.value.get("head")).toBe(2);
    await settle();
    expect(flow.byKey.value.get("head")).toBe(4);
  });

  it("says what went wrong, and may be asked again", () => {
    flow.show("blocks");
    asked[0].settle("no site");
    expect(flow.problem.value).toBe("The flow of blocks could not be loaded: no site");
    flow.show("blocks");
    expect(asked).toHaveLength(2);
    flow.takeFlow(residual("blocks"));
    expect(flow.problem.value).toBe("");
    asked[2].settle("not built");
    expect(flow.problem.value).toBe("The layout library could not be loaded: not built");
  });
});

describe("the panel", () => {
  let { control, stream, el, find, all, end } = {} as TestView;
  const nodes = (): HTMLElement[] => all("nni-flow-node");
  /** happy-dom runs no module of a Blob: the layout is called here, as a worker would. */
  const RealWorker = globalThis.Worker;

  beforeEach(async () => {
    class Direct {
      onmessage: ((event: { data: unknown }) => void) | null = null;
      postMessage({ number, nodes: sizes, links }: { number: number; nodes: Size[]; links: Link[] }): void {
        queueMicrotask(() => this.onmessage?.({ data: { number, arranged: arrange(sizes, links), error: "" } }));
      }
      terminate(): void {
        this.onmessage = null;
      }
    }
    globalThis.Worker = Direct as never;
    ({ control, stream, el, find, all, end } = mountView());
    stream.emit(layout([site("", -1, { name: "MLP", kind: "MLP" }), ...layout().sites.slice(1)]));
    stream.emit(state({ selected: "" }));
    stream.emit(...frame(1, { edit: (table) => (table[cell(2, 0, "norm")] = 4) }));
    await settle();
    await openTab(find, "flow");
    await settle();
  });
  afterEach(() => {
    end();
    globalThis.Worker = RealWorker;
  });

  async function show(flow = residual()): Promise<void> {
    stream.emit(flow);
    stream.emit({ type: "layout_library", version: VERSION }, new DataView(new ArrayBuffer(4)));
    await settle();
  }

  it("asks when it is shown, and names what each node gives and feeds", async () => {
    expect(control.of("show_flow")).toEqual([{ type: "show_flow", site: "", id: expect.any(Number) }]);
    await show();
    expect(control.of("get_layout_library")).toHaveLength(1);
    expect(nodes().map((n) => n.getAttribute("aria-label"))).toEqual([
      "input, f32[4,3], feeds blocks/0 and output",
      "blocks/0, Linear, f32[4,3], runs 6 times, feeds head",
      "head, Linear, f32[4,3], feeds output",
      "output, f32[4,3]",
    ]);
    expect(nodes().filter((n) => n.tabIndex === 0)).toHaveLength(1);
    expect(find("nni-flow-absent")!.dataset["site"]).toBe("blocks/1");
  });

  it("selects by a click and stays, goes in by Enter and out by Backspace", async () => {
    await show();
    nodes()[1].click();
    await settle();
    await settle();
    expect(control.of("select").at(-1)).toMatchObject({ site: "blocks/0" });
    expect(find("nni-flow")!.dataset["value"]).toBe("");
    expect(nodes()[1].getAttribute("aria-pressed")).toBe("true");
    press(nodes()[1], "Enter");
    expect(control.of("show_flow")).toHaveLength(1); // a leaf
    stream.emit(layout([site("", -1), site("blocks/0", 0), site("blocks/0/a", 1), site("head", 0)], 2));
    await settle();
    await show(residual("", 2, 2));
    press(nodes()[1], "Enter");
    await settle();
    expect(find("nni-flow")!.dataset["value"]).toBe("blocks/0");
    await show({ ...residual("blocks/0", 3, 2), nodes: [node("blocks/0/a")], edges: [] });
    expect(nodes().map((n) => n.dataset["site"])).toEqual(["blocks/0/a"]);
    press(nodes()[0], "Backspace");
    await settle();
    expect(find("nni-flow")!.dataset["value"]).toBe("");
    expect(find("nni-selected")!.dataset["value"]).toBe("blocks/0");
  });

  it("moves along the edges by arrows, and switches Zero by space", async () => {
    await show();
    nodes()[0].focus();
    press(nodes()[0], "ArrowDown");
    await settle();
    expect(document.activeElement).toBe(nodes()[1]);
    expect(find("nni-selected")!.dataset["value"]).toBe("blocks/0");
    press(nodes()[1], " ");
    expect(control.of("perturb")).toMatchObject([{ site: "blocks/0", kind: "Zero" }]);
    stream.emit(state({ selected: "", perturbations: [perturbation(1, "blocks/0")] }));
    await settle();
    expect(nodes()[1].getAttribute("aria-label")).toContain("perturbed");
  });

  it("colours by a figure, with every digit and a legend", async () => {
    await show();
    enterValue(find("nni-flow-figure"), "activation norm");
    await settle();
    expect(nodes().map((n) => n.dataset["value"])).toEqual([undefined, "4", "1", undefined]);
    expect(nodes()[1].style.getPropertyValue("--nni-share")).toBe("1.000");
    expect([find("nni-flow-low")!.dataset["value"], find("nni-flow-high")!.dataset["value"]]).toEqual(["1", "4"]);
    stream.emit(...frame(2, { value: 3 }));
    await settle();
    expect(nodes()[1].dataset["value"]).toBe("3");
  });

  it("is a list where nothing can be laid out", async () => {
    stream.emit(residual());
    const { id } = control.of("get_layout_library")[0];
    control.emit({ type: "reply", id, ok: false, error: "layout.js is missing" });
    await settle();
    const list = find("nni-flow-list")!;
    expect(list.textContent).toContain("blocks/0 Linear, f32[4,3] → head");
    expect(el.textContent).toContain("The layout library could not be loaded: layout.js is missing");
  });

  it("shows a model's text as text", async () => {
    const evil = `<img src=x onerror="window.hacked=true">`;
    const flow = residual();
    await show({
      ...flow,
      nodes: flow.nodes.map((n) => ({ ...n, name: evil, kind: evil, output: evil })),
      edges: flow.edges.map((e) => ({ ...e, shapes: [evil] })),
      absent: [{ site: evil, why: evil }],
    });
    expect(nodes()).toHaveLength(4);
    expect(nodes()[1].textContent).toContain(evil);
    expect(el.querySelectorAll("img, script")).toHaveLength(0);
  });
});
