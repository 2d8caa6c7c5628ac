// Masks of units as bits, and requests for them. Bits travel as hexadecimal; unit 0 is the highest
// bit of the first byte. Invariants: at most one request for a site is under way, and the newest wish
// follows it; a requested mask is shown at once, until a State confirms or corrects it.
import { signal } from "@preact/signals";
import type { Kernel } from "../kernel/bridge";
import type { Perturbation } from "../kernel/protocol";

/** One byte per unit: 1 is on, 0 is off. */
export type Mask = Uint8Array;

export function toHex(mask: Mask): string {
  let text = "";
  for (let at = 0; at < mask.length; at += 8) {
    let byte = 0;
    for (let i = 0; i < 8; i++) byte = (byte << 1) | (mask[at + i] ?? 0);
    text += byte.toString(16).padStart(2, "0");
  }
  return text;
}

export function fromHex(text: string, units: number): Mask {
  const mask = new Uint8Array(units);
  for (let i = 0; i < units; i++) {
    mask[i] = (parseInt(text.slice((i >> 3) * 2, (i >> 3) * 2 + 2), 16) >> (7 - (i & 7))) & 1;
  }
  return mask;
}

/** The perturbation that the strip of a site edits: a mask of `units` units along an axis of its output. */
export function editable(all: readonly Perturbation[], site: string, units: number, axis = -1): Perturbation | undefined {
  return all.find((p) => p.kind === "Mask" && p.site === site && p.at === "output" && p.units === units && p.axis === axis && p.mask !== "");
}

interface Wish {
  readonly site: string;
  readonly units: number;
  readonly axis: number;
  readonly mask: string;
  /** Once it is answered, the next State settles it. */
  readonly state: "waiting" | "sent" | "answered";
}

export class Masks {
  readonly wish = signal<Wish | null>(null);
  private next: Wish | null = null;

  constructor(
    private readonly kernel: Kernel,
    private readonly all: () => readonly Perturbation[],
    private readonly failed: (text: string, site: string) => void,
  ) {}

  /** The mask of a site, or the requested one. */
  of(site: string, units: number, axis = -1): Mask {
    const wish = this.wish.value;
    if (wish?.site === site && wish.units === units && wish.axis === axis) return fromHex(wish.mask, units);
    const there = editable(this.all(), site, units, axis);
    return there ? fromHex(there.mask, units) : new Uint8Array(units).fill(1);
  }

  set(site: string, mask: Mask, axis = -1): void {
    const wish: Wish = { site, units: mask.length, axis, mask: toHex(mask), state: "waiting" };
    const busy = this.wish.value?.state === "sent" || this.wish.value?.state === "answered";
    this.next = busy ? wish : null;
    this.wish.value = busy ? { ...wish, state: this.wish.value!.state } : wish;
    if (!busy) this.send(wish);
  }

  /** Settle a wish when a State has come. */
  settle(): void {
    if (this.wish.peek()?.state !== "answered") return;
    const next = this.next;
    this.next = null;
    this.wish.value = next;
    if (next) this.send(next);
  }

  private send(wish: Wish): void {
    const { site, units, axis, mask } = wish;
    this.wish.value = { ...wish, state: "sent" };
    const perturbation = editable(this.all(), site, units, axis)?.id ?? null;
    this.kernel.ask({ type: "set_mask", perturbation, site, units, mask, axis }, (error) => {
      if (error !== null) {
        this.next = null;
        this.wish.value = null;
        this.failed(error, site);
      } else if (this.wish.value) {
        this.wish.value = { ...this.wish.value, state: "answered" };
      }
    });
  }
}
