/** Sends one request at a time; of the wishes that come meanwhile, the last one follows. */
export class LatestRequest<T> {
  private busy = false;
  private next: T | null = null;

  /** `settled` gets the wish that follows, if there is one, and returns false to leave that out. */
  constructor(
    private readonly send: (wish: T, settle: (error: string | null) => void) => void,
    private readonly settled: (wish: T, error: string | null, next: T | null) => boolean = () => true,
  ) {}

  ask(wish: T): void {
    if (this.busy) {
      this.next = wish;
      return;
    }
    this.busy = true;
    this.send(wish, (error) => {
      const next = this.next;
      this.busy = false;
      this.next = null;
      if (this.settled(wish, error, next) && next) this.ask(next);
    });
  }
}
