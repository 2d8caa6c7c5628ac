// The other end: a comm that keeps what is sent on it, and a kernel whose answers a test gives.
import type { KernelRequest, Kernel, Model } from "../../src/kernel/bridge";

export class MockModel implements Model {
  readonly sent: { type: string; [field: string]: unknown }[] = [];
  private readonly handlers = new Map<string, ((content: unknown, buffers?: DataView[]) => void)[]>();

  constructor(private readonly traits: Record<string, unknown> = {}) {}

  get(name: string): unknown {
    return this.traits[name];
  }
  on(name: string, callback: (content: unknown, buffers: DataView[] | undefined) => void): void {
    this.handlers.set(name, [...(this.handlers.get(name) ?? []), callback as never]);
  }
  send(content: unknown): void {
    this.sent.push(content as { type: string });
  }
  emit(content: unknown, buffer?: DataView): void {
    for (const handler of this.handlers.get("msg:custom") ?? []) handler(content, buffer ? [buffer] : []);
  }
  trigger(name: string): void {
    for (const handler of this.handlers.get(name) ?? []) handler(undefined);
  }
  of(type: string): { type: string; [field: string]: unknown }[] {
    return this.sent.filter((message) => message.type === type);
  }
}

export class MockKernel implements Kernel {
  readonly asked: KernelRequest[] = [];
  readonly settles: ((error: string | null) => void)[] = [];
  ask = (request: KernelRequest, settle: (error: string | null) => void = () => undefined): number => {
    this.settles.push(settle);
    return this.asked.push(request);
  };
}

/** What the browser's own frames and timers do, made to happen now. */
export async function settle(): Promise<void> {
  for (let i = 0; i < 4; i++) await new Promise((resolve) => setTimeout(resolve, 20));
}
