// The two comms: control (hello, requests, acks; replies come back) and stream (what to show).
// ipykernel answers a click while a cell runs only if nothing is streamed on the comm of the click.
// Invariant: every request gets one outcome, the kernel's reply, or UNREACHABLE where it could not
// be sent; silence is only ever reported as "not yet", because a busy kernel answers late. Hello is
// said until anything arrives, and once more at the end: ipykernel routes a comm by the shell that
// last *sent* on it, JupyterLab starts its subshell a little after the comm, and only an answer (on
// control) to a hello that came through the subshell moves the route there.
import { signal } from "@preact/signals";
import { VERSION, type Arrays, type ToBrowser, type ToKernel, type Values } from "./protocol";
import { toBrowser } from "./validate";

/** What anywidget gives as `model`, as far as it is used here. */
export interface Model {
  get(name: string): unknown;
  set?(name: string, value: unknown, options?: { readonly silent: boolean }): void;
  on(name: string, callback: (content: unknown, buffers: DataView[] | undefined) => void): void;
  send(content: unknown): void;
}

/** Every message to the kernel that has a number, and so a reply; the bridge gives the number. */
export type Ask = Request<ToKernel>;
type Request<T> = T extends { readonly id: number } ? Omit<T, "id"> : never;
/** Takes requests: gives the number of each, and says once how it ended, with a text where it failed. */
export interface Kernel {
  ask(request: Ask, settle?: (error: string | null) => void): number;
}
export type ValueMessage = Arrays | Values;
export type Update = Exclude<ToBrowser, { type: "reply" }>;

export interface Receiver {
  receive(message: Update, buffer: DataView | undefined): void;
  /** A message that cannot be used; `text` is for the person. */
  refuse(text: string): void;
}

const HELLO_MS = [0, 300, 1000];
/** Said again where changes are still heard after a cell only: the subshell may be late. */
export const AGAIN_MS = [4000, 15_000];
export const ABSENT_MS = 3000;
/** So long after control the stream is there, or its front end makes no model of it. */
export const ALONE_MS = 1000;
const LATE_MS = 10_000;
/** Frames that are acknowledged by one message, and how long one waits for another. */
const ACK_EVERY = 2;
export const ACK_MS = 50;
export const UNREACHABLE = "this view is not connected to a kernel.";

export class Bridge {
  readonly connection = signal<"waiting" | "connected" | "absent">("waiting");
  /** Whether the kernel has answered on the comm as it will stay, or is too busy to. */
  readonly settled = signal(false);
  /** How many requests the kernel has not answered for longer than LATE_MS. */
  readonly late = signal(0);

  /** A name of its own; randomUUID is there on secure pages alone. */
  private readonly page = Math.random().toString(36).slice(2);
  private readonly waiting = new Map<number, { settle: (error: string | null) => void; timer: Timer; late: boolean }>();
  private readonly models: Record<"control" | "stream", Model | null> = { control: null, stream: null };
  private timers: Timer[] = [];
  private drawn = 0;
  private acknowledged = 0;
  private acknowledging: Timer | undefined;
  private lastId = 0;
  private said = 0;
  private greetings = 0;
  private listening = "";
  private heard = false;

  constructor(private readonly receiver: Receiver) {
    this.timers.push(setTimeout(() => this.missing(), ABSENT_MS));
  }

  attach(role: "control" | "stream", model: Model): void {
    this.models[role] = model;
    model.on("msg:custom", (content, buffers) => this.arrived(content, buffers?.[0]));
    // ipywidgets triggers this when the comm closes: the kernel was restarted or the cell cleared.
    model.on("comm_live_update", () => this.hello());
    if (this.models.control && this.models.stream) this.hello();
    else if (role === "control") this.timers.push(setTimeout(() => this.hello(), ALONE_MS));
  }

  /** Stops all timers: nobody listens any more. */
  close(): void {
    this.timers.forEach(clearTimeout);
    clearTimeout(this.acknowledging);
    for (const { timer } of this.waiting.values()) clearTimeout(timer);
    this.waiting.clear();
  }

  /** Gives the request's id, which what it asks for will name. */
  ask(request: Ask, settle: (error: string | null) => void = () => undefined): number {
    const id = ++this.lastId;
    const entry = { settle, late: false, timer: setTimeout(() => this.overdue(id), LATE_MS) };
    this.waiting.set(id, entry);
    if (!this.send({ ...request, id } as ToKernel)) this.replied(id, UNREACHABLE);
    return id;
  }

  /** A frame was drawn. Every other one is told: the page shows that a kernel is busy with a message. */
  ack(seq: number): void {
    this.drawn = seq;
    if (seq - this.acknowledged >= ACK_EVERY) return this.acknowledge();
    this.acknowledging ??= setTimeout(() => this.acknowledge(), ACK_MS);
  }

  private acknowledge(): void {
    clearTimeout(this.acknowledging);
    this.acknowledging = undefined;
    this.acknowledged = this.drawn;
    this.send({ type: "ack", seq: this.drawn });
  }

  /** Whether there was a comm to send on: one whose kernel was restarted throws. */
  private send(message: ToKernel): boolean {
    try {
      this.models.control?.send(message);
      return true;
    } catch {
      this.connection.value = "absent";
      return false;
    }
  }

  private hello(): void {
    this.timers.forEach(clearTimeout);
    this.connection.value = "waiting";
    this.settled.value = false;
    this.said = 0;
    this.heard = false;
    const last = HELLO_MS.length - 1;
    this.timers = HELLO_MS.map((ms, i) =>
      setTimeout(() => {
        this.said = i + 1;
        if (i === last || this.connection.value !== "connected") this.greet();
      }, ms),
    );
    for (const ms of AGAIN_MS) {
      const again = (): void => {
        if (this.listening === "after") this.greet();
      };
      this.timers.push(setTimeout(again, ms));
    }
    this.timers.push(setTimeout(() => this.missing(), ABSENT_MS));
  }

  private greet(): void {
    this.send({ type: "hello", version: VERSION, streams: this.models.stream !== null, page: this.page, said: ++this.greetings });
  }

  private missing(): void {
    if (this.connection.value === "waiting") this.connection.value = "absent";
    this.settled.value = true;
  }

  private arrived(content: unknown, buffer: DataView | undefined): void {
    this.connection.value = "connected";
    try {
      const message = toBrowser(content);
      if (message.type === "reply") {
        this.heard ||= message.id === 0 && this.said === HELLO_MS.length;
        return this.replied(message.id, message.ok ? null : message.error || "It failed.");
      }
      this.receiver.receive(message, buffer);
      if (message.type === "state") {
        this.listening = message.listening;
        if (this.heard) this.settled.value = true;
      }
    } catch (error) {
      this.receiver.refuse(error instanceof Error ? error.message : String(error));
    }
  }

  private replied(id: number, error: string | null): void {
    const entry = this.waiting.get(id);
    if (!entry) return; // asked by another view of the same page, or before a reload
    this.waiting.delete(id);
    clearTimeout(entry.timer);
    if (entry.late) this.late.value -= 1;
    entry.settle(error);
  }

  private overdue(id: number): void {
    const entry = this.waiting.get(id);
    if (!entry) return;
    entry.late = true;
    this.late.value += 1;
  }
}

type Timer = ReturnType<typeof setTimeout>;
