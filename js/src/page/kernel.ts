// Plays the kernel on a page without one: answers the screen from the data in the page.
// Invariants: every request gets its messages and then exactly one reply, as from a kernel, never
// within the call itself; a request that needs the model is refused with a text.
import type { Model } from "../kernel/bridge";
import { VERSION, type Positions, type ShowPositions, type ToKernel } from "../kernel/protocol";
import { label } from "../kernel/sites";
import type { SavedRecording, Message } from "./recording";

export const NEEDS_MODEL = "this is a saved page, without the model. Open the notebook and run it.";
const NO_VALUES = "This page keeps only the values that were open when it was saved. Open the notebook and run it to read others.";
const NOT_COMPARED = "This page keeps only the comparisons that were on screen when it was saved.";

type Callback = (content: unknown, buffers: DataView[] | undefined) => void;
type ReplayAnswer = { readonly messages: readonly Message[]; readonly error: string };

/** The two comms of a page: requests on `control` are answered on `stream` and `control`. */
export function replayComms(recorded: SavedRecording): { control: Model; stream: Model } {
  const heard = { control: [] as Callback[], stream: [] as Callback[] };
  const say = (role: "control" | "stream", [header, buffer]: Message): void => {
    for (const callback of heard[role]) callback(header, buffer ? [buffer] : []);
  };
  const replay = new Replay(recorded);
  const comm = (role: "control" | "stream"): Model => ({
    get: (name) => (name === "role" ? role : undefined),
    on: (name, callback) => {
      if (name === "msg:custom") heard[role].push(callback);
    },
    send: (content) => {
      const request = content as ToKernel;
      if (request.type === "ack") return;
      setTimeout(() => {
        const { messages, error } = replay.answer(request);
        for (const message of messages) say("stream", message);
        say("control", [{ type: "reply", id: request.type === "hello" ? 0 : request.id, ok: error === "", error }, undefined]);
      });
    },
  });
  return { control: comm("control"), stream: comm("stream") };
}

export class Replay {
  private seq = 0;
  private states = 0;
  private selected: string;

  constructor(private readonly recorded: SavedRecording) {
    this.selected = recorded.state.selected;
  }

  answer(request: Exclude<ToKernel, { type: "ack" }>): ReplayAnswer {
    const { recorded } = this;
    switch (request.type) {
      case "hello":
        return accept([
          [recorded.layout, undefined],
          ...recorded.kept.map((one): Message => [one, undefined]),
          recorded.passes(),
          recorded.curves(),
          ...this.site(),
        ]);
      case "select":
        if (recorded.row(request.site) === undefined) return refuse(`there is no site ${request.site}.`);
        this.selected = request.site;
        return accept(this.site());
      case "choose_example":
        return accept([]);
      case "show_pass": {
        const at = recorded.indexOf(request.number);
        if (at < 0) return refuse(`Pass ${request.number} is not kept on this page.`);
        return accept([this.frame(at, request.site, true)]);
      }
      case "show_flow":
        return this.kept("flow", request);
      case "show_nnx":
        return this.kept("nnx", request);
      case "look":
        return this.kept(request.what, request);
      case "get_layout_library":
        return accept([[{ type: "layout_library", version: VERSION }, recorded.library()]]);
      case "show_positions":
        return this.positions(request);
      case "show_values":
        return this.answered("values", JSON.stringify([request.site, request.part, request.clean]), { request: request.id }, NO_VALUES);
      case "read_values": {
        if (request.exact) return accept([]);
        const index = request.index.map((n, axis) => (request.axes.includes(axis) ? 0 : n));
        const slice = [request.array, index, request.axes, request.norm_over, request.component];
        return this.answered("values", JSON.stringify(slice), { request: request.id }, NO_VALUES);
      }
      case "compare":
        return this.answered("compare", `${request.number} ${request.pinned}`, { id: request.id }, NOT_COMPARED);
      case "perturb":
      case "adjust":
      case "remove":
      case "switch_all":
      case "set_mask":
      case "switch_mode":
      case "set_every":
      case "measure_next":
      case "read_site":
      case "open_beside":
      case "show_operations":
      case "start_sweep":
      case "stop_sweep":
      case "study":
      case "stop_study":
      case "choose_batch":
        return refuse(NEEDS_MODEL);
    }
  }

  private kept(what: string, { id, site }: { readonly id: number; readonly site: string }): ReplayAnswer {
    return this.answered(what, site, { id }, `This page does not keep the details of ${label(site)}.`);
  }
  /** The kept answer with this key, which the kernel gave it, or why it was none; `otherwise` if there is none. */
  private answered(what: string, key: string, number: object, otherwise: string): ReplayAnswer {
    const found = this.recorded.answer(what, key) ?? otherwise;
    return typeof found === "string" ? refuse(found) : accept([[{ ...(found[0] as object), ...number }, found[1]]]);
  }

  /** The figures of a text, of the example and unit that were on screen. */
  private positions(request: ShowPositions): ReplayAnswer {
    const found = this.kept("positions", request);
    const header = found.messages[0]?.[0] as Positions | undefined;
    if (!header || (header.example === request.example && header.unit === request.unit)) return found;
    return refuse(`This page keeps the figures of example ${header.example} and unit ${header.unit}.`);
  }

  /** The messages that change with the selection. */
  private site(): Message[] {
    const { recorded } = this;
    const state = { ...recorded.state, selected: this.selected, seq: ++this.states };
    const row = recorded.row(this.selected);
    const shown = recorded.count > 0 ? [this.frame(recorded.count - 1, this.selected, false)] : [];
    return [[state, undefined], ...shown, ...(row === undefined ? [] : recorded.histories(row))];
  }

  private frame(at: number, site: string, held: boolean): Message {
    const row = this.recorded.row(site) ?? -1;
    return this.recorded.frame(at, row, { seq: ++this.seq, held, progress: this.recorded.state.progress });
  }
}

const accept = (messages: readonly Message[]): ReplayAnswer => ({ messages, error: "" });
const refuse = (error: string): ReplayAnswer => ({ messages: [], error });
