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

/** What a mask is over: `units` units along an axis of a site's output; or, in rows of `columns`, along
 * this axis and the next one. */
export interface MaskTarget {
  readonly site: string;
  readonly units: number;
  readonly axis: number;
  readonly columns: number;
}

const isSameTarget = (a: MaskTarget, b: MaskTarget): boolean => a.site === b.site && a.units === b.units && a.axis === b.axis && a.columns === b.columns;

/** The perturbation that is edited: the mask over just that. */
export function findMask(all: readonly Perturbation[], over: MaskTarget): Perturbation | undefined {
  return all.find((p) => p.kind === "Mask" && p.at === "output" && p.mask !== "" && isSameTarget(p, over));
}

interface MaskRequest extends MaskTarget {
  readonly mask: string;
  /** Once it is answered, the next State settles it. */
  readonly state: "waiting" | "sent" | "answered";
}

export class MaskRequests {
  readonly wish = signal<MaskRequest | null>(null);
  private next: MaskRequest | null = null;

  constructor(
    private readonly kernel: Kernel,
    private readonly all: () => readonly Perturbation[],
    private readonly failed: (text: string, site: string) => void,
  ) {}

  /** The mask over something, or the requested one. */
  maskOf(over: MaskTarget): Mask {
    const wish = this.wish.value;
    if (wish && isSameTarget(wish, over)) return fromHex(wish.mask, over.units);
    const there = findMask(this.all(), over);
    return there ? fromHex(there.mask, over.units) : new Uint8Array(over.units).fill(1);
  }

  set(over: MaskTarget, mask: Mask): void {
    const wish: MaskRequest = { ...over, mask: toHex(mask), state: "waiting" };
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

  private send(wish: MaskRequest): void {
    const { site, units, axis, columns, mask } = wish;
    this.wish.value = { ...wish, state: "sent" };
    const perturbation = findMask(this.all(), wish)?.id ?? null;
    this.kernel.ask({ type: "set_mask", perturbation, site, units, mask, axis, columns }, (error) => {
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
