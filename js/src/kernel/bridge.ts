// The two comms: control (hello, requests, acks; replies come back) and stream (the data to show).
// Invariant: every request gets one outcome: the kernel's reply, or UNREACHABLE if it could not be
// sent. Silence is only reported as "not yet", because a busy kernel answers late. Hello is sent
// until anything arrives, and once more at the end: JupyterLab starts its subshell a little after
// the comm, and the kernel learns from a hello that came through it that clicks act at any time.
import { signal, type ReadonlySignal, type Signal } from "@preact/signals";
import { VERSION, type Arrays, type ToBrowser, type ToKernel, type Values } from "./protocol";
import { checkVersion } from "./version";

/** The part of anywidget's `model` that is used here. */
export interface Model {
  get(name: string): unknown;
  set?(name: string, value: unknown, options?: { readonly silent: boolean }): void;
  on(name: string, callback: (content: unknown, buffers: DataView[] | undefined) => void): void;
  send(content: unknown): void;
  /** The host's own manager of widgets, which may know its kernel. */
  readonly widget_manager?: unknown;
}

/** Any message to the kernel with a number, and so with a reply; the bridge adds the number. */
export type KernelRequest = WithoutId<ToKernel>;
type WithoutId<T> = T extends { readonly id: number } ? Omit<T, "id"> : never;
/** Takes requests: returns the number of each, and calls `settle` once, with a text if it failed. */
export interface Kernel {
  ask(request: KernelRequest, settle?: (error: string | null) => void): number;
  /** How many requests have been without an answer for a while. */
  readonly unanswered?: ReadonlySignal<number>;
}
export type ValueMessage = Arrays | Values;
export type UpdateMessage = Exclude<ToBrowser, { type: "reply" }>;

export interface Receiver {
  receive(message: UpdateMessage, buffer: DataView | undefined): void;
  /** Report a message that cannot be used; `text` is for the user. */
  refuse(text: string): void;
}

const HELLO_MS = [0, 300, 1000];
/** When hello is sent again if nothing has arrived, or changes are heard only after a cell: the subshell may be late. */
export const RETRY_MS = [4000, 15_000];
export const ABSENT_MS = 3000;
/** The time after control by which the stream is there, unless the host makes no model for it. */
export const STREAM_WAIT_MS = 1000;
/** After how long without an answer a request looks as if it waits, and after how long it is late. */
export const UNANSWERED_MS = 600;
export const LATE_MS = 10_000;
const QUICK_REQUESTS: ReadonlySet<KernelRequest["type"]> = new Set(["select", "perturb", "set_mask", "adjust", "switch_all", "remove"]);
/** How many frames one message acknowledges, and how long one frame waits for another. */
const ACK_EVERY = 2;
export const ACK_MS = 50;
/** The same where a loop reads messages between its steps, ten times a second. */
export const POLLED_ACK_MS = 100;
export const UNREACHABLE = "this view is not connected to a kernel.";

export class Bridge {
  readonly connection = signal<"waiting" | "connected" | "absent">("waiting");
  /** Whether the kernel has answered over the final route, or is too busy to answer. */
  readonly settled = signal(false);
  /** How many requests that a kernel answers at once have had no answer for longer than SOON_MS. */
  readonly unanswered = signal(0);
  /** How many requests have had none for longer than LATE_MS. */
  readonly late = signal(0);
  /** Whether nothing at all has arrived since a request that is late. */
  readonly silent = signal(false);

  /** The page's own name; randomUUID exists only on secure pages. */
  private readonly page = Math.random().toString(36).slice(2);
  private readonly waiting = new Map<number, PendingRequest>();
  private readonly models: Record<"control" | "stream", Model | null> = { control: null, stream: null };
  private timers: Timer[] = [];
  private drawn = 0;
  private acknowledged = 0;
  private acknowledging: Timer | undefined;
  private lastId = 0;
  private messagesReceived = 0;
  private hellosDue = 0;
  private hellosSent = 0;
  private listening = "";
  private lastHelloAnswered = false;

  /** Set before a model is attached. */
  receiver!: Receiver;

  constructor() {
    this.timers.push(setTimeout(() => this.giveUp(), ABSENT_MS));
  }

  attach(role: "control" | "stream", model: Model): void {
    this.models[role] = model;
    model.on("msg:custom", this.handleMessage);
    // ipywidgets triggers this when the comm closes, on a kernel restart or when the cell is cleared.
    model.on("comm_live_update", () => this.hello());
    if (this.models.control && this.models.stream) this.hello();
    else if (role === "control") this.timers.push(setTimeout(() => this.hello(), STREAM_WAIT_MS));
  }

  /** Stops all timers. */
  close(): void {
    this.timers.forEach(clearTimeout);
    clearTimeout(this.acknowledging);
    for (const { timers } of this.waiting.values()) timers.forEach(clearTimeout);
    this.waiting.clear();
  }

  /** Sends a request and returns its id, which the answer will contain. */
  ask(request: KernelRequest, settle: (error: string | null) => void = () => undefined): number {
    const id = ++this.lastId;
    const entry: PendingRequest = { settle, counted: [], timers: [], arrivals: this.messagesReceived };
    if (QUICK_REQUESTS.has(request.type)) entry.timers.push(setTimeout(() => this.countOverdue(entry, this.unanswered), UNANSWERED_MS));
    entry.timers.push(setTimeout(() => this.countOverdue(entry, this.late), LATE_MS));
    this.waiting.set(id, entry);
    try {
      this.models.control?.send({ ...request, id });
    } catch {
      this.connection.value = "absent";
      this.settleRequest(id, UNREACHABLE);
    }
    return id;
  }

  /** Acknowledge a drawn frame, every other one only: each message makes the kernel look busy. */
  ack(seq: number): void {
    this.drawn = seq;
    const rare = this.listening === "steps";
    if (!rare && seq - this.acknowledged >= ACK_EVERY) return this.acknowledge();
    this.acknowledging ??= setTimeout(() => this.acknowledge(), rare ? POLLED_ACK_MS : ACK_MS);
  }

  /** How the kernel is, as the host of this view says: "busy", "idle", "dead", ...; "" if it does not. */
  get kernelStatus(): string {
    const manager = this.models.control?.widget_manager as { kernel?: { status?: unknown } } | undefined;
    const status = manager?.kernel?.status;
    return typeof status === "string" ? status : "";
  }

  private acknowledge(): void {
    clearTimeout(this.acknowledging);
    this.acknowledging = undefined;
    this.acknowledged = this.drawn;
    this.send({ type: "ack", seq: this.drawn });
  }

  /** Send what has no reply. A comm whose kernel was restarted throws. */
  private send(message: ToKernel): void {
    try {
      this.models.control?.send(message);
    } catch {
      this.connection.value = "absent";
    }
  }

  private hello(): void {
    this.timers.forEach(clearTimeout);
    this.connection.value = "waiting";
    this.settled.value = false;
    this.hellosDue = 0;
    this.lastHelloAnswered = false;
    const last = HELLO_MS.length - 1;
    this.timers = HELLO_MS.map((ms, i) =>
      setTimeout(() => {
        this.hellosDue = i + 1;
        if (i === last || this.connection.value !== "connected") this.sendHello();
      }, ms),
    );
    for (const ms of RETRY_MS) {
      const again = (): void => {
        if (this.listening === "after" || this.connection.value !== "connected") this.sendHello();
      };
      this.timers.push(setTimeout(again, ms));
    }
    this.timers.push(setTimeout(() => this.giveUp(), ABSENT_MS));
  }

  private sendHello(): void {
    this.send({ type: "hello", version: VERSION, streams: this.models.stream !== null, page: this.page, said: ++this.hellosSent });
  }

  private giveUp(): void {
    if (this.connection.value === "waiting") this.connection.value = "absent";
    this.settled.value = true;
  }

  private readonly handleMessage = (content: unknown, buffers: DataView[] | undefined): void => {
    this.connection.value = "connected";
    this.messagesReceived += 1;
    this.silent.value = false;
    try {
      const message = checkVersion(content);
      if (message.type === "reply") {
        this.lastHelloAnswered ||= message.id === 0 && this.hellosDue === HELLO_MS.length;
        return this.settleRequest(message.id, message.ok ? null : message.error || "It failed.");
      }
      this.receiver.receive(message, buffers?.[0]);
      if (message.type === "state") {
        this.listening = message.listening;
        if (this.lastHelloAnswered) this.settled.value = true;
      }
    } catch (error) {
      this.receiver.refuse(error instanceof Error ? error.message : String(error));
    }
  };

  private settleRequest(id: number, error: string | null): void {
    const entry = this.waiting.get(id);
    if (!entry) return; // sent by another view of the same page, or before a reload
    this.waiting.delete(id);
    entry.timers.forEach(clearTimeout);
    for (const count of entry.counted) count.value -= 1;
    entry.settle(error);
  }

  private countOverdue(entry: PendingRequest, count: Signal<number>): void {
    entry.counted.push(count);
    count.value += 1;
    if (count === this.late) this.silent.value = this.messagesReceived === entry.arrivals;
  }
}

type Timer = ReturnType<typeof setTimeout>;

/** A request without an answer: how many messages had arrived before it, and what counts it by now. */
interface PendingRequest {
  readonly settle: (error: string | null) => void;
  readonly arrivals: number;
  readonly timers: Timer[];
  readonly counted: Signal<number>[];
}
