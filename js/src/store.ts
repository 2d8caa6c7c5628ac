// Everything that the screen shows, as signals, and the rules by which messages change it.
// Invariants: of several frames only the newest is drawn, once per animation frame, and acknowledged
// after that; a frame of another layout is never drawn; the timeline decides which pass is drawn;
// when a frame is drawn, the progress is that of the last message. Views only read signals and call
// methods of the store.
import type { AxisScale } from "./charts/axis";
import { batch, computed, signal } from "@preact/signals";
import { CompareState } from "./compare/state";
import { FlowState } from "./flow/state";
import { UNREACHABLE, type Kernel, type Receiver, type UpdateMessage } from "./kernel/bridge";
import { decodeChoices, decodeCurves, decodeFrame, decodeHistory, decodeUpdates, parameterKey, siteCount } from "./kernel/decode";
import type { ChoicesData, CurveData, FrameData, HistoryData, UpdatesData } from "./kernel/decode";
import { InputsState } from "./inputs/state";
import { SiteQueries } from "./kernel/queries";
import type { Findings, Layout, Notice, Perturb, Perturbation, Progress, State, Sweep } from "./kernel/protocol";
import { CLEAN, QUANTITIES, STATISTICS } from "./kernel/protocol";
import { ancestors, label, rowKey, indexSites, type Sites } from "./kernel/sites";
import { NnxState } from "./nnx/state";
import { decodePasses } from "./time/passes";
import { Timeline } from "./time/timeline";
import { TreeView } from "./tree/view";
import { initiallyOpen } from "./tree/visible";
import { MaskRequests } from "./masks/requests";
import { ValuesState } from "./values/state";
import { StudiesState } from "./studies/state";
import { WordsState } from "./words/state";

/** A requested change that no State has yet; it is shown at once, so that a switch reacts at once. */
interface PendingChange {
  readonly enabled: boolean;
  readonly strength: number | null;
  readonly answered: boolean;
}

interface PendingPerturbation {
  readonly site: string;
  readonly kind: string;
}

/** Something that takes a while, and since when, on the clock of this page. */
export interface RunningTask {
  readonly what: string;
  readonly since: number;
}

export interface NoticeLine extends Notice {
  readonly id: string;
}

const NOT_FINITE_COLUMNS = (["nan", "posinf", "neginf"] as const).map((name) => STATISTICS.indexOf(name));
const SELECT_MS = 60;
const ADJUST_MS = 50;

export class Store implements Receiver {
  /** What a saved page, or a run that is read from its file, says of itself; "" if the model is here. */
  readonly replayNote = signal("");
  /** The panels that need the model, where it is not here: "units", "nnx", "values". */
  readonly missingPanels = signal<ReadonlySet<string>>(new Set());
  readonly sites = signal<Sites | null>(null);
  readonly frame = signal<FrameData | null>(null);
  readonly state = signal<State | null>(null);
  readonly progress = signal<Progress | null>(null);
  readonly waiting = signal<readonly RunningTask[]>([]);
  readonly curves = signal<readonly CurveData[]>([]);
  readonly histories = signal<ReadonlyMap<number, HistoryData>>(new Map());
  /** Those of the selected site's parameters, by `parameterKey`. */
  readonly parameterHistories = signal<ReadonlyMap<string, HistoryData>>(new Map());
  readonly updates = signal<UpdatesData | null>(null);
  /** Of the selected site's heads and experts. */
  readonly choices = signal<readonly ChoicesData[]>([]);
  readonly selected = signal<string | null>(null);
  readonly flow = new FlowState({ sites: () => this.sites.peek(), ask: (request, settle) => this.kernel.ask(request, settle) });

  /** The panel that the detail shows; "" for the first. */
  readonly panel = signal("");
  readonly words = new WordsState((request, settle) => this.kernel.ask(request, settle));
  readonly inputs: InputsState = new InputsState(
    (request) => this.kernel.ask(request),
    (): [string, string] => [this.selected.value ?? "", this.values.part.value],
  );
  readonly studies = new StudiesState((request, settle) => this.kernel.ask(request, settle), this.inputs);
  readonly values: ValuesState = new ValuesState((request, settle) => this.kernel.ask(request, settle), this.inputs);
  readonly axis = signal<AxisScale>("auto");
  readonly queries: SiteQueries;
  readonly masks: MaskRequests;
  readonly sweep = signal<Sweep | null>(null);
  /** What the next sweep does: the kind, its strengths, and whether only below the selected site. */
  readonly sweepOptions = signal<{ readonly kind: string; readonly strengths: Readonly<Record<string, number>>; readonly below: boolean }>({ kind: "", strengths: {}, below: false });
  readonly findings = signal<Findings | null>(null);
  /** The axis along which the units of a site are shown, once it was chosen. */
  readonly unitsAxis = signal({ site: "", axis: -1 });
  /** The figure that the strip of units shows, and whether a click on the strip switches units. */
  readonly unitFigure = signal("mean");
  readonly editingMask = signal(false);
  /** Counts up when the form that adds a perturbation should open. */
  readonly openMenuCount = signal(0);
  readonly historyChart = signal<"bands" | "heatmap">("bands");
  /** The panel that each group of tabs showed last. */
  readonly lastPanels = signal<ReadonlyMap<string, string>>(new Map());
  /** The sizes of the parts of the screen that were chosen, by part and width class. */
  readonly sizes = signal<Readonly<Record<string, number>>>({});
  /** How many views are beside the notebook: those in cells then only say so. */
  readonly docked = signal(0);
  /** The row of the tree under the pointer, -1 for none: the foot shows its figures. */
  readonly pointed = signal(-1);
  /** Counts up when a row should be brought into view: by a key, a link or the kernel. */
  readonly revealCount = signal(0);

  /** Whether no perturbation can be switched: the model is not here, and its run takes no requests. */
  readonly isReadOnly = computed(() => this.replayNote.value !== "" && !this.state.value?.recorded?.steers);
  /** Whether what is on screen can change no more: it was saved, or the run has come to its end. */
  readonly isSaved = computed(() => this.replayNote.value !== "" && !this.progress.value?.running);
  readonly selectedIndex = computed(() => {
    const key = this.selected.value;
    return (key === null ? undefined : this.sites.value?.byKey.get(key)) ?? -1;
  });
  readonly perturbations = computed<readonly Perturbation[]>(() => {
    const changes = this.pendingChanges.value;
    return (this.state.value?.perturbations ?? []).map((p) => {
      const wish = changes.get(p.id);
      return wish ? { ...p, enabled: wish.enabled, strength: wish.strength ?? p.strength } : p;
    });
  });
  /** Whether the State lacks a requested change; then its effect is older than the change. */
  readonly hasPendingChange = computed(() =>
    (this.state.value?.perturbations ?? []).some((p) => {
      const wish = this.pendingChanges.value.get(p.id);
      return wish !== undefined && (wish.enabled !== p.enabled || (wish.strength !== null && wish.strength !== p.strength));
    }),
  );
  /** When a click acts that has had no answer for a while; "" if there is none, or it cannot be said. */
  readonly pendingNote = computed(() => {
    const state = this.state.value;
    if (!state || (this.kernel.unanswered?.value ?? 0) === 0 || state.listening === "during") return "";
    return state.listening === "steps" && this.progress.value?.running ? "acts at the next step" : "acts when the cell ends";
  });
  /** The perturbations of which a change has had no answer. */
  readonly unanswered = computed(() => new Set([...this.pendingRemovals.value, ...[...this.pendingChanges.value].flatMap(([id, wish]) => (wish.answered ? [] : [id]))]));
  /** The perturbations that were asked for and have had no answer. */
  readonly pendingPerturbations = signal<readonly PendingPerturbation[]>([]);
  /** Site key -> whether one of its perturbations is on; missing if it has none. */
  readonly perturbed = computed(() => {
    const on = new Map<string, boolean>();
    const sites = this.sites.value;
    if (!sites) return on;
    for (const p of this.perturbations.value) {
      for (const site of p.sites) {
        const row = rowKey(sites, site);
        if (row !== undefined) on.set(row, (on.get(row) ?? false) || p.enabled);
      }
    }
    return on;
  });
  /** Per site: bit 1, it has NaN or Inf values itself; bit 2, something below it has. */
  readonly notFinite = computed(() => notFiniteMarks(this.sites.value, this.frame.value));
  /** The sites at which, as a rule has found, values stop being finite. */
  readonly notFiniteOrigins = computed<ReadonlySet<string>>(
    () => new Set((this.findings.value?.findings ?? []).filter((one) => one.rule === "nonfinite").map((one) => one.site)),
  );
  readonly notices = computed<readonly NoticeLine[]>(() => {
    const away = this.dismissed.value;
    const fromKernel = (this.state.value?.notices ?? []).map((n) => ({ ...n, id: `${n.level}\n${n.site}\n${n.text}` }));
    return [...this.problems.value, ...fromKernel].filter((n) => !away.has(n.id));
  });

  /** The newest step of all that is here: every chart over the steps goes from 0 to it. */
  readonly lastStep = computed(() => {
    const passes = this.timeline.passes.value;
    let last = Math.max(0, this.frame.value?.header.step ?? 0);
    for (let i = 0; i < passes.count; i++) last = Math.max(last, passes.step(i));
    for (const { points } of this.curves.value) if (points.length > 0) last = Math.max(last, points[points.length - 2]);
    return last;
  });

  readonly timeline: Timeline = new Timeline({
    frame: this.frame,
    selected: this.selected,
    showPass: (number, site, settle) => this.kernel.ask({ type: "show_pass", number, site }, settle),
    showNewest: () => {
      this.liveFrame ??= this.newestFrame; // drawn before, and perhaps the last one
      this.schedule();
    },
    reportProblem: (text) => this.addProblem("warning", text, null),
  });
  /** What the pass on screen is compared with: the pinned pass, or else itself without its perturbations. */
  readonly comparison = computed<FrameData | null>(() => {
    const { pinned, clean } = this.timeline;
    return pinned.value ?? (clean.value && CLEAN - clean.value.header.number === this.frame.value?.header.number ? clean.value : null);
  });
  readonly compare = new CompareState({
    frame: this.frame,
    timeline: this.timeline,
    panel: this.panel,
    ask: (request, settle) => this.kernel.ask(request, settle),
  });
  readonly tree = new TreeView({
    sites: this.sites,
    frame: this.frame,
    pinned: this.timeline.pinned,
    held: this.timeline.held,
    bad: this.notFinite,
    perturbed: this.perturbed,
    effects: computed(() => !this.state.value?.recorded?.steers),
    moved: computed(() => new Map(Object.entries(this.state.value?.effect?.moved ?? {}).map(([site, change]) => [site, change ?? Infinity]))),
  });

  private readonly pendingRemovals = signal<readonly number[]>([]);
  private readonly pendingChanges = signal<ReadonlyMap<number, PendingChange>>(new Map());
  private readonly problems = signal<readonly NoticeLine[]>([]);
  private readonly dismissed = signal<ReadonlySet<string>>(new Set());
  /** Not drawn yet: the newest live frame, and the newest requested frame. */
  private liveFrame: FrameData | null = null;
  private newestFrame: FrameData | null = null;
  private requestedFrame: FrameData | null = null;
  /** The progress in the last message. */
  private lastProgress: Progress | null = null;
  private drawing = 0;
  private selecting = 0;
  private stateSelected: string | null = null;
  private selectTimer: ReturnType<typeof setTimeout> | undefined;
  private readonly adjusting = new Map<number, { timer: ReturnType<typeof setTimeout>; wish: PendingChange | null }>();
  private problemCount = 0;

  readonly nnx: NnxState;

  constructor(private readonly kernel: Kernel & { ack(seq: number): void }) {
    this.queries = new SiteQueries(kernel);
    this.nnx = new NnxState(kernel, this.queries);
    this.masks = new MaskRequests(
      kernel,
      () => this.perturbations.value,
      (text, site) => this.addProblem("error", `Could not set the mask of ${label(site)}: ${text}`, site),
    );
  }

  // ---- messages ----

  receive(message: UpdateMessage, buffer: DataView | undefined): void {
    switch (message.type) {
      case "layout":
        return this.takeLayout(message);
      case "state":
        return this.takeState(message);
      case "frame": {
        const sites = this.sites.value;
        if (!sites || message.layout !== sites.id) return;
        const frame = decodeFrame(message, buffer);
        this.lastProgress = message.progress;
        if (siteCount(frame) !== sites.list.length) {
          return this.refuse(`Frame ${message.seq} has ${siteCount(frame)} sites, its layout ${sites.list.length}.`);
        }
        if (!frame.header.held) this.liveFrame = this.newestFrame = frame;
        else {
          this.timeline.takeFrame(frame);
          if (this.timeline.admits(frame)) this.requestedFrame = frame;
        }
        return this.schedule();
      }
      case "history": {
        if (message.layout !== this.sites.value?.id) return;
        const data = decodeHistory(message, buffer);
        if (message.parameter === "") this.histories.value = new Map([...this.histories.value, [message.quantity, data]]);
        else this.parameterHistories.value = new Map([...this.parameterHistories.value, [parameterKey(message.parameter, message.quantity), data]]);
        return;
      }
      case "updates":
        if (message.layout === this.sites.value?.id) this.updates.value = decodeUpdates(message, buffer);
        return;
      case "choices":
        if (message.layout === this.sites.value?.id) this.choices.value = [...this.choices.value.filter((one) => one.header.key !== message.key), decodeChoices(message, buffer)];
        return;
      case "arrays":
      case "values":
        return this.values.receive(message, buffer);
      case "positions":
        return this.words.receive(message, buffer);
      case "curves":
        this.curves.value = decodeCurves(message, buffer);
        return;
      case "flow":
        return this.flow.takeFlow(message);
      case "layout_library":
        return this.flow.takeLibrary(message, buffer);
      case "passes":
        this.timeline.passes.value = decodePasses(message, buffer);
        return;
      case "nnx":
        this.nnx.error.value = null;
        return this.queries.receive(message, buffer);
      case "units":
      case "code":
      case "compilations":
      case "casts":
        return this.queries.receive(message, buffer);
      case "inputs":
        return this.inputs.take(message);
      case "findings":
        this.findings.value = message;
        return;
      case "sweep":
        this.sweep.value = message;
        this.studies.noteProgress("sweep", message.running);
        return;
      case "lens":
      case "logits":
      case "attribution":
      case "examples":
        return this.studies.receive(message);
      case "other":
        return this.compare.takeOther(message);
      case "weights":
        return this.compare.takeWeights(message);
      case "compared":
        return this.compare.take(message);
    }
  }

  /** End the store when its last view is gone. */
  close(): void {
    this.flow.close();
    this.timeline.close();
    this.tree.close();
  }

  refuse(text: string): void {
    this.addProblem("error", text, null);
  }

  private takeLayout(message: Layout): void {
    const sites = indexSites(message);
    batch(() => {
      const first = this.sites.value === null;
      if (this.sites.value?.id !== sites.id) {
        this.liveFrame = this.newestFrame = this.requestedFrame = null;
        this.frame.value = null;
        this.forgetHistories();
        if (!first) this.timeline.layoutChanged();
      }
      this.sites.value = sites;
      if (first) this.tree.open.value = initiallyOpen(sites);
      this.openTo(this.selected.value);
    });
  }

  private takeState(message: State): void {
    batch(() => {
      if (message.python !== this.state.value?.python) this.inputs.clicked.value = false;
      this.state.value = message;
      this.progress.value = this.lastProgress = message.progress;
      if (message.recorded) {
        this.replayNote.value = message.recorded.text;
        this.missingPanels.value = new Set(message.recorded.missing);
      }
      const now = performance.now();
      if (message.waiting.length + this.waiting.value.length > 0) {
        this.waiting.value = message.waiting.map(({ what, seconds }) => ({ what, since: now - 1000 * seconds }));
      }
      this.masks.settle();
      // A State is the truth: it ends a wish, once the kernel has answered the wish.
      for (const [id, wish] of this.pendingChanges.value) if (wish.answered) this.setPendingChange(id, null);
      const moved = message.selected !== this.stateSelected;
      this.stateSelected = message.selected;
      if (this.selected.value === null || (moved && this.selecting === 0)) this.show(message.selected);
    });
  }

  private schedule(): void {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      const frame = [this.requestedFrame, this.liveFrame].find((f) => f !== null && this.timeline.admits(f));
      if (!frame) return;
      if (frame === this.liveFrame) this.liveFrame = null; // a frame that is not admitted waits
      this.requestedFrame = null;
      batch(() => {
        this.frame.value = frame;
        this.progress.value = this.lastProgress;
      });
      setTimeout(() => this.kernel.ack(frame.header.seq)); // after the views' microtasks
    });
  }

  // ---- actions of the user ----

  select(key: string, reveal = true): void {
    if (reveal) this.openTo(key);
    if (key === this.selected.value) {
      if (reveal) this.revealCount.value += 1;
      return;
    }
    this.show(key, reveal);
    if (this.selectTimer === undefined) this.selecting += 1;
    clearTimeout(this.selectTimer); // a held key passes many rows: request the last
    this.selectTimer = setTimeout(() => {
      this.selectTimer = undefined;
      this.kernel.ask({ type: "select", site: key }, (error) => {
        this.selecting -= 1;
        // The data that is here can be viewed without a kernel, and the banner reports a missing one.
        if (error && error !== UNREACHABLE) this.addProblem("error", `Could not select ${label(key)}: ${error}`, key);
      });
    }, SELECT_MS);
  }

  /** The action of the space key: add Zero if there is no perturbation, else switch those there. */
  togglePerturbation(key: string): void {
    if (this.isReadOnly.value) return;
    const here = this.perturbations.value.filter((p) => p.site === key);
    if (here.length === 0) this.perturb(key, "Zero", null, "output");
    const enabled = !here.some((p) => p.enabled);
    for (const p of here) this.adjust(p.id, enabled, null);
  }

  /** Add a perturbation: of these units along an axis, or of all. */
  perturb(site: string, kind: string, strength: number | null, at: Perturb["at"], units: readonly number[] = [], axis = -1): void {
    const one = { site, kind };
    this.pendingPerturbations.value = [...this.pendingPerturbations.value, one];
    this.kernel.ask({ type: "perturb", site, kind, strength, at, units, axis }, (error) => {
      this.pendingPerturbations.value = this.pendingPerturbations.value.filter((other) => other !== one);
      if (error) this.addProblem("error", `Could not perturb ${label(site)}: ${error}`, site);
    });
  }

  /** Send at most one request per perturbation in ADJUST_MS; the last wish is always sent. */
  adjust(id: number, enabled: boolean, strength: number | null): void {
    const wish = { enabled, strength: strength ?? this.pendingChanges.value.get(id)?.strength ?? null, answered: false };
    this.setPendingChange(id, wish);
    const running = this.adjusting.get(id);
    if (running) {
      running.wish = wish;
      return;
    }
    const timer = setTimeout(() => {
      const next = this.adjusting.get(id)?.wish ?? null;
      this.adjusting.delete(id);
      if (next) this.adjust(id, next.enabled, next.strength);
    }, ADJUST_MS);
    this.adjusting.set(id, { timer, wish: null });
    this.kernel.ask({ type: "adjust", perturbation: id, enabled: wish.enabled, strength: wish.strength }, (error) => {
      if (error) this.addProblem("error", `Could not change the perturbation: ${error}`, null);
      if (this.pendingChanges.value.get(id) === wish) this.setPendingChange(id, error ? null : { ...wish, answered: true });
    });
  }

  switchAll(enabled: boolean): void {
    const wishes = new Map(this.pendingChanges.value);
    for (const { id } of this.perturbations.value) {
      const wish = { enabled, strength: this.pendingChanges.value.get(id)?.strength ?? null, answered: false };
      wishes.set(id, wish);
      const running = this.adjusting.get(id);
      if (running?.wish) running.wish = wish; // a drag that is not sent yet
    }
    this.pendingChanges.value = wishes;
    this.kernel.ask({ type: "switch_all", enabled }, (error) => {
      if (error) this.addProblem("error", `Could not switch ${enabled ? "on" : "off"} the perturbations: ${error}`, null);
      for (const [id, wish] of wishes) {
        if (this.pendingChanges.value.get(id) === wish) this.setPendingChange(id, error ? null : { ...wish, answered: true });
      }
    });
  }

  /** Show the operations within a site's call as rows below it, or hide them; then call `settle`. */
  showOperations(site: string, shown: boolean, settle: () => void): void {
    this.kernel.ask({ type: "show_operations", site, shown }, (error) => {
      if (error) this.addProblem("error", `Could not ${shown ? "show" : "hide"} the operations of ${label(site)}: ${error}`, site);
      else if (shown) this.setOpen(site, true);
      settle();
    });
  }

  /** Let a run that happens elsewhere measure every so many steps. */
  setEvery(every: number): void {
    this.kernel.ask({ type: "set_every", every }, (error) => {
      if (error) this.addProblem("error", `Could not change what is measured: ${error}`, null);
    });
  }

  /** Show the view in a pane beside the notebook; where that is not possible, say how to. */
  openBeside(): void {
    this.kernel.ask({ type: "open_beside" }, (error) => {
      if (error) this.addProblem("info", error, null);
    });
  }

  measureNext(): void {
    this.kernel.ask({ type: "measure_next" }, (error) => {
      if (error) this.addProblem("error", `Could not measure the next step: ${error}`, null);
    });
  }

  startSweep(sites: string, kind: string, strength: number | null): void {
    this.kernel.ask({ type: "start_sweep", sites, kind, strength, at: "output" }, this.studies.settle("sweep"));
  }

  stopSweep(): void {
    this.kernel.ask({ type: "stop_sweep" });
  }

  remove(id: number): void {
    this.pendingRemovals.value = [...this.pendingRemovals.value, id];
    this.kernel.ask({ type: "remove", perturbation: id }, (error) => {
      this.pendingRemovals.value = this.pendingRemovals.value.filter((other) => other !== id);
      if (error) this.addProblem("error", `Could not remove the perturbation: ${error}`, null);
    });
  }

  setOpen(key: string, open: boolean): void {
    const next = new Set(this.tree.open.value);
    if (open) next.add(key);
    else next.delete(key);
    this.tree.open.value = next;
  }

  openAll(open: boolean): void {
    const sites = this.sites.value;
    if (!sites) return;
    this.tree.open.value = new Set(open ? sites.list.filter((_, i) => sites.children[i].length > 0).map((s) => s.key) : []);
  }

  dismiss(id: string): void {
    batch(() => {
      if (this.problems.value.some((n) => n.id === id)) {
        this.problems.value = this.problems.value.filter((n) => n.id !== id);
      } else {
        this.dismissed.value = new Set(this.dismissed.value).add(id);
      }
    });
  }

  // ---- internals ----

  private show(key: string, reveal = true): void {
    batch(() => {
      if (key !== this.selected.value) this.forgetHistories();
      this.selected.value = key;
      if (reveal) {
        this.openTo(key);
        this.revealCount.value += 1;
      }
    });
  }

  private openTo(key: string | null): void {
    const sites = this.sites.value;
    const index = key === null ? undefined : sites?.byKey.get(key);
    if (!sites || index === undefined) return;
    const above = ancestors(sites, index).filter((k) => !this.tree.open.value.has(k));
    if (above.length > 0) this.tree.open.value = new Set([...this.tree.open.value, ...above]);
  }

  private forgetHistories(): void {
    this.histories.value = new Map();
    this.parameterHistories.value = new Map();
    this.updates.value = null;
    this.choices.value = [];
  }

  private setPendingChange(id: number, wish: PendingChange | null): void {
    const next = new Map(this.pendingChanges.value);
    if (wish) next.set(id, wish);
    else next.delete(id);
    this.pendingChanges.value = next;
  }

  private addProblem(level: string, text: string, site: string | null): void {
    if (this.problems.value.some((n) => n.text === text)) return;
    const line = { id: `local-${++this.problemCount}`, level, text, site };
    this.problems.value = [line, ...this.problems.value].slice(0, 5);
  }
}

function notFiniteMarks(sites: Sites | null, frame: FrameData | null): Uint8Array {
  const bad = new Uint8Array(sites?.list.length ?? 0);
  if (!sites || !frame) return bad;
  const [{ table }, [nan, posinf, neginf]] = [frame, NOT_FINITE_COLUMNS];
  const width = QUANTITIES.length * STATISTICS.length;
  for (let i = 0; i < bad.length; i++) {
    for (let at = i * width; at < (i + 1) * width; at += STATISTICS.length) {
      if (table[at + nan] > 0) bad[i] |= 5;
      if (table[at + posinf] > 0 || table[at + neginf] > 0) bad[i] |= 1;
    }
    if (bad[i] & 1) {
      for (let at = sites.list[i].parent; at >= 0 && !(bad[at] & 2); at = sites.list[at].parent) bad[at] |= 2;
    }
  }
  return bad;
}
