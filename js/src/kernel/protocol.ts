// The messages between kernel and browser, as types and constants.
// Generated from nnx_inspector/screen/protocol by generate_protocol.py: never edit by hand.

export const VERSION = 7;
export const QUANTITIES = ["output", "gradient"] as const;
export const PARAMETER_QUANTITIES = ["parameter", "parameter_gradient"] as const;
export const ROW_STATS = ["update_ratio", "update_lost", "parameter_norm", "parameter_gradient_norm"] as const;
export const STATISTICS = ["size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf", "seen"] as const;
export const HISTORY_QUANTILES = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99] as const;
export const UNIT_STATS = ["mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite", "dead"] as const;
export const POSITION_STATS = ["norm", "unit", "gradient", "gradient_times_activation"] as const;
export const CASTS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"] as const;
export const CAST_STATS = ["to_zero", "subnormal", "overflow", "scaled_to_zero", "scaled_subnormal"] as const;
export const SPARK = 32;
export const HISTORY_BINS = 48;
export const MOST_UNITS = 16384;
export const OTHER = -1;
export const CLEAN = -2;

export type Quantity = (typeof QUANTITIES)[number];
export type Statistic = (typeof STATISTICS)[number];

/** One row of the tree. `parent` is the index of another row, -1 for the root. `layer` is the number of a single layer of a stacked module, -1 for a whole site. `note` says what the row leaves out; "" if nothing. `array` is the name of the array whose statistics the row shows, if the call returns several; "" if it returns one. The others have rows of their own (`single`). What follows is of the last `insp.profile`, None if it is not known: the time of the module with those in it, what it keeps for the backward pass, and the share of the FLOPs that are possible. `counted` is whether its figures are only of those positions that `where=` says. */
export interface Site {
  readonly key: string;
  readonly name: string;
  readonly kind: string;
  readonly parent: number;
  readonly depth: number;
  readonly inputs: string;
  readonly output: string;
  readonly parameters: number;
  readonly flops: number | null;
  readonly calls: number;
  readonly stacked: number;
  readonly aliases: readonly string[];
  readonly source: string;
  readonly perturbable: boolean;
  readonly unseen: string;
  readonly layer: number;
  readonly note: string;
  readonly array: string;
  readonly single: boolean;
  readonly step_ms: number | null;
  readonly kept_bytes: number | null;
  readonly of_possible: number | null;
  readonly counted: boolean;
}

/** The sites that later frames refer to by index. Buffer: none. `attending` are the keys of those whose call computes an attention. `sequences` is whether the model reads sequences, which is where a lens can work. `where` says which positions the sites that are `counted` count, as a clause; "" for all. */
export interface Layout {
  readonly type: "layout";
  readonly version: number;
  readonly layout: number;
  readonly model: string;
  readonly sites: readonly Site[];
  readonly attending: readonly string[];
  readonly sequences: boolean;
  readonly where: string;
}

/** The progress of a run. `total` and `rate` (steps per second) are None while unknown. */
export interface Progress {
  readonly kind: string;
  readonly running: boolean;
  readonly step: number;
  readonly total: number | null;
  readonly rate: number | null;
}

/** A full histogram in a frame's buffer: the counts of one site's quantity, in `bytes` bytes as a recording keeps them (`nnx_inspector.stats.encoding`). A bin is the upper 12 bits of the float32 values in it (sign, exponent, three mantissa bits), so the float with those bits gives its edges. The counts of a sample are still to be scaled up. */
export interface Histogram {
  readonly site: number;
  readonly quantity: number;
  readonly bytes: number;
}

/** A parameter that the selected site itself holds, in one pass; `name` is its path below the site. `update_ratio` is the norm of the change that the step made, divided by the norm of the value before: 0 in a step without an update, None if no update was seen (or the value was 0). `bytes` is the length of each of its histograms in the buffer, in the order of PARAMETER_QUANTITIES; -1 for a quantity that was not measured. */
export interface FrameParameter {
  readonly path: string;
  readonly name: string;
  readonly update_ratio: number | null;
  readonly bytes: readonly number[];
}

/** One pass. Buffer: float64 table [site, quantity, statistic], float64 [site, ROW_STATS] (NaN for a row without parameters), float64 [parameter, PARAMETER_QUANTITIES, statistic], then uint8 sparklines [site, quantity, SPARK], then the bytes of each of `histograms`, and of the histograms of each of `parameters`. `parameters` are those of the selected site, and `more` counts the others. `number` is the pass's number in the recording. `held`: a ShowPass asked for this frame; a live frame shows the newest pass. */
export interface Frame {
  readonly type: "frame";
  readonly version: number;
  readonly seq: number;
  readonly layout: number;
  readonly step: number;
  readonly perturbed: boolean;
  readonly metrics: Readonly<Record<string, number | null>>;
  readonly histograms: readonly Histogram[];
  readonly parameters: readonly FrameParameter[];
  readonly more: number;
  readonly progress: Progress;
  readonly number: number;
  readonly held: boolean;
}

/** One site's quantity over the steps so far. Buffer, all float64: steps [steps]; quantiles [steps, len(HISTORY_QUANTILES)]; edges [HISTORY_BINS + 1]; fractions [steps, HISTORY_BINS]. Edges are spaced on a symmetric-log axis; the fractions of one step add up to 1. A step without a finite value is NaN throughout. With `parameter`, the path of one that the site holds, it is that of its value or gradient, and `quantity` is an index into PARAMETER_QUANTITIES. */
export interface History {
  readonly type: "history";
  readonly version: number;
  readonly layout: number;
  readonly site: number;
  readonly quantity: number;
  readonly steps: number;
  readonly parameter: string;
}

/** The update ratios of the parameters of one site over the steps; see `FrameParameter`. Buffer, float64: steps [steps], then ratios [parameters, steps], then the shares of updates that round to nothing, alike; NaN where it is unknown. `inside`: the site holds none itself, and these are the ones within it that moved most. */
export interface Updates {
  readonly type: "updates";
  readonly version: number;
  readonly layout: number;
  readonly site: number;
  readonly parameters: readonly string[];
  readonly steps: number;
  readonly inside: boolean;
}

/** What each head of an attention, or each expert of a router, of one site did over the steps; `key` is as in `Recording.heads_frame` or `experts_frame`, and so are `figures`, but for "router_entropy", the "evenness" that all experts share. Buffer, float64: steps [steps], then [figures, rows, steps], NaN where it is unknown. `more` counts the rows that are left out. */
export interface Choices {
  readonly type: "choices";
  readonly version: number;
  readonly layout: number;
  readonly site: number;
  readonly key: string;
  readonly experts: boolean;
  readonly figures: readonly string[];
  readonly rows: number;
  readonly steps: number;
  readonly more: number;
}

/** The metrics over the steps so far. Buffer: for each of `names`, float64 [points, 2]: step and value (NaN if it was not finite), with `points[i]` rows for `names[i]`. The recording has `recorded[i]` values of it, and `not_finite[i]` of these are NaN or Inf. */
export interface Curves {
  readonly type: "curves";
  readonly version: number;
  readonly names: readonly string[];
  readonly points: readonly number[];
  readonly recorded: readonly number[];
  readonly not_finite: readonly number[];
}

/** The passes that the recording still has, oldest first. Buffer: float64 [passes, 5]: number, step, whether something was perturbed (0 or 1), index into `kinds`, and the setting's number. That number differs from the one before if the perturbations changed; 0 means that nothing was perturbed, or that the perturbations are unknown. `thinned` older passes are gone. */
export interface Passes {
  readonly type: "passes";
  readonly version: number;
  readonly passes: number;
  readonly kinds: readonly string[];
  readonly thinned: number;
}

/** One perturbation in force (or switched off), as the browser shows it. `site` is the pattern it was made with; `sites` are the keys it acts on, the first MOST_SITES of `reach`. `kind` is its class and `expression` the Python text that makes it. `strength` is the one number that can be tuned, and `strength_name` its name (None and "": there is none); `low` and `high` are the slider's range, which is not a limit. `units` is the length of a boolean mask along its axis (0: it is not a mask) and `units_off` the number of units switched off. `mask` is its bits in hexadecimal: unit 0 is the highest bit of the first byte, 1 is on ("" if it cannot be edited), and `axis` the axis of the units; `columns` is the length of the second axis of a mask over two, 0 for one. `python` is the text that adds it in a cell, "" if it holds a user's array. `pending`: the running loop applies it from its next step on. `compiling`: a program with a place for it is being compiled while the old one runs. `not_acting` says why it does nothing in the last pass ("" if it acts, or if that is unknown). */
export interface Perturbation {
  readonly id: number;
  readonly site: string;
  readonly sites: readonly string[];
  readonly reach: number;
  readonly kind: string;
  readonly at: "output" | "input" | "parameter";
  readonly acts_on: "value" | "gradient" | "parameter";
  readonly expression: string;
  readonly strength: number | null;
  readonly strength_name: string;
  readonly low: number;
  readonly high: number;
  readonly units: number;
  readonly units_off: number;
  readonly mask: string;
  readonly python: string;
  readonly enabled: boolean;
  readonly pending: boolean;
  readonly compiling: boolean;
  readonly not_acting: string;
  readonly axis: number;
  readonly columns: number;
}

/** The change of one site's output, `|perturbed - clean| / |clean|`; None if not finite. */
export interface SiteEffect {
  readonly site: string;
  readonly change: number | null;
}

/** The effect of one of several perturbations by itself; see `Effect`. */
export interface EffectAlone {
  readonly perturbation: number;
  readonly loss_change: number | null;
  readonly output_change: number | null;
  readonly kl: number | null;
  readonly top1_changed: number | null;
}

/** The perturbed pass beside the clean one. Values by metric name ("loss" first). `output_change` is the relative norm of the difference of the outputs. If they are logits, `kl` is the mean divergence of the perturbed from the clean distribution in nats, and `top1_changed` the fraction of predictions that changed. None: not measured, or meaningless. `sites` are the downstream sites that changed most, at most MOST_EFFECTS, largest first. `alone` is the effect of each of several perturbations by itself; () until it is measured. `moved` is, by site, the relative norm of the change of its output, None if that is not finite: of all sites, or of the MOST_MOVED that changed most. */
export interface Effect {
  readonly source: string;
  readonly clean: Readonly<Record<string, number | null>>;
  readonly perturbed: Readonly<Record<string, number | null>>;
  readonly output_change: number | null;
  readonly kl: number | null;
  readonly top1_changed: number | null;
  readonly sites: readonly SiteEffect[];
  readonly alone: readonly EffectAlone[];
  readonly moved: Readonly<Record<string, number | null>>;
}

/** The cost of inspection. Seconds are medians of recent steps, by their ends on the device: of plain steps, and of measured steps that are otherwise like them (both perturbed, or neither). None if there are no such steps. Three say how long the user waited: for the tree, for the first pass, and for the first measured step of a loop, with its compilation; None while unknown. The last has the CPU seconds that writing a pass to the user's tracker takes a thread. */
export interface Cost {
  readonly plain_seconds: number | null;
  readonly inspected_seconds: number | null;
  readonly compilations: number;
  readonly bytes_sent: number;
  readonly frames_dropped: number;
  readonly errors: number;
  readonly tree_seconds: number | null;
  readonly pass_seconds: number | null;
  readonly step_seconds: number | null;
  readonly tracker_seconds: number | null;
}

/** Something the user should know; `level` is "info", "warning" or "error". */
export interface Notice {
  readonly level: string;
  readonly text: string;
  readonly site: string | null;
}

/** Something that takes a while, such as "compiling the first pass", and the time so far. */
export interface Waiting {
  readonly what: string;
  readonly seconds: number;
}

/** A run that is read from its file. `text` says in a sentence how it is; `missing` names the panels that need the model. `steers` is whether it takes requests: then it measures every `every`-th step. */
export interface Recorded {
  readonly run: "running" | "stalled" | "ended" | "gone";
  readonly text: string;
  readonly missing: readonly string[];
  readonly steers: boolean;
  readonly every: number;
}

/** Everything small that the screen shows; each message has all of it. Buffer: none. `training_perturbed` is True while a watched loop runs with a perturbation on. `no_effect` says why there is no effect to show. `listening` says how a change reaches a running loop: "during" a cell (messages are handled while any cell runs), at the "steps" of a loop of ours (in another cell, after its end), "thread" (the loop runs in a thread), or "after" the cell has ended. `compiling` counts the perturbations for which a program is being compiled. `python` is the Python equivalent of the last request from the screen. `waiting` names what the screen waits for. `recorded` is None if the model is here; otherwise there is no `cost`. */
export interface State {
  readonly type: "state";
  readonly version: number;
  readonly seq: number;
  readonly selected: string;
  readonly perturbations: readonly Perturbation[];
  readonly training_perturbed: boolean;
  readonly listening: "during" | "steps" | "thread" | "after";
  readonly compiling: number;
  readonly effect: Effect | null;
  readonly no_effect: string;
  readonly progress: Progress;
  readonly cost: Cost | null;
  readonly notices: readonly Notice[];
  readonly python: string;
  readonly closed: boolean;
  readonly waiting: readonly Waiting[];
  readonly recorded: Recorded | null;
}

/** One thing that is or may be wrong; see `findings.Finding`. `effects` says what follows from it, a clause each, and `gone` since which step it is over. */
export interface FindingRow {
  readonly rule: string;
  readonly site: string;
  readonly step: number;
  readonly severity: "error" | "warning" | "info";
  readonly what: string;
  readonly advice: string;
  readonly effects: readonly string[];
  readonly gone: number | null;
}

/** The findings of the rules, worst first. Buffer: none. `more` counts those left out. */
export interface Findings {
  readonly type: "findings";
  readonly version: number;
  readonly findings: readonly FindingRow[];
  readonly more: number;
}

/** The one answer to a request. `error` is "" if the request succeeded. */
export interface Reply {
  readonly type: "reply";
  readonly id: number;
  readonly ok: boolean;
  readonly error: string;
}

/** A node of a `Flow`. `role` is a "module" called in it; its "input" or "output"; a "join", which is one value made of several; or "outside", a module elsewhere whose value enters or leaves by another way than arguments and results. `name` is the key relative to the flow's site. `output` describes the value that it returns (for an "output", the value that it receives). `calls` counts the calls in one call of the site; `times` includes the loops around them (None: a while loop). `conditional`: it is called in a branch that may not be taken. */
export interface FlowNode {
  readonly role: "module" | "input" | "output" | "join" | "outside";
  readonly site: string;
  readonly name: string;
  readonly kind: string;
  readonly output: string;
  readonly calls: number;
  readonly times: number | null;
  readonly conditional: boolean;
}

/** Values that go from one node to another, both given by number. `shapes` holds their dtypes and shapes, if known. `loop`: they go from one iteration of a loop to a later one. */
export interface FlowEdge {
  readonly producer: number;
  readonly consumer: number;
  readonly shapes: readonly string[];
  readonly loop: boolean;
}

/** A module below a flow's site that is not called in it, and why. */
export interface FlowAbsent {
  readonly site: string;
  readonly why: string;
}

/** The flow between the modules that a site calls. `id` is the request's. Buffer: none. */
export interface Flow {
  readonly type: "flow";
  readonly version: number;
  readonly layout: number;
  readonly site: string;
  readonly id: number;
  readonly nodes: readonly FlowNode[];
  readonly edges: readonly FlowEdge[];
  readonly absent: readonly FlowAbsent[];
}

/** The script that lays out a flow. Buffer: a JavaScript module in UTF-8, `static/layout.js`. */
export interface LayoutLibrary {
  readonly type: "layout_library";
  readonly version: number;
}

/** A static attribute of a node. It is part of the graphdef, hence of a program's cache key. */
export interface NnxAttribute {
  readonly name: string;
  readonly text: string;
}

/** One node of the graphdef, under one of its paths. `module` is the site key of a module, None for other nodes. `reference` is a number shared by all paths to one object, 0 if there is only one path. `first` is the path of an earlier node with the same object, whose content is not repeated, or None. `also` lists its paths elsewhere in the model. */
export interface NnxNode {
  readonly path: string;
  readonly name: string;
  readonly type: string;
  readonly depth: number;
  readonly module: string | null;
  readonly reference: number;
  readonly first: string | null;
  readonly also: readonly string[];
  readonly attributes: readonly NnxAttribute[];
  readonly attributes_total: number;
}

/** The change of a Variable's value. `distance` is the norm of the difference, `relative` its ratio to the norm of the value before; None if undefined (a PRNG key, a norm of 0, another shape). `before` and `after` are the values of a scalar, else "". */
export interface NnxChange {
  readonly same: boolean;
  readonly distance: number | null;
  readonly relative: number | null;
  readonly before: string;
  readonly after: string;
}

/** One leaf of the state: a Variable, or a plain array (`type` is ""). `path`, `reference`, `first` and `also` are as in `NnxNode`; `module` is the innermost module around the leaf. `value` is the value of a scalar, else "". `committed` is None if no array on a device is held. `change` is the change between two looks at the model, `passed` the change that the inspector's last pass made in its own copy; None if there is nothing to compare. */
export interface NnxVariable {
  readonly path: string;
  readonly module: string;
  readonly type: string;
  readonly shape: string;
  readonly dtype: string;
  readonly bytes: number;
  readonly sharding: string;
  readonly held: "array" | "traced" | "deleted" | "shape" | "reference" | "other";
  readonly committed: boolean | null;
  readonly metadata: string;
  readonly value: string;
  readonly reference: number;
  readonly first: string | null;
  readonly also: readonly string[];
  readonly change: NnxChange | null;
  readonly passed: NnxChange | null;
}

/** The Variables of one type in a module; a shared Variable counts once. */
export interface NnxKind {
  readonly type: string;
  readonly variables: number;
  readonly elements: number;
  readonly bytes: number;
}

/** A mode of a module. `value` is the value in force if that is True or False, else None; `flag`: it can only be True or False; `switched`: the value is not the model's own. */
export interface NnxMode {
  readonly module: string;
  readonly type: string;
  readonly name: string;
  readonly own: string;
  readonly in_force: string;
  readonly value: boolean | null;
  readonly flag: boolean;
  readonly switched: boolean;
  readonly documentation: string;
}

/** The module at a site as NNX sees it, in answer to the ShowNnx with this id. Buffer: none. `nodes` have parents first; `variables` are in the order of their paths. `since` is the step of the look that `change` compares with, None without one; `passed` is the kind of pass behind `NnxVariable.passed`: "run", "step" or "". `uncompared` says why Variables have no `change`. */
export interface Nnx {
  readonly type: "nnx";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly nodes: readonly NnxNode[];
  readonly nodes_total: number;
  readonly variables: readonly NnxVariable[];
  readonly variables_total: number;
  readonly kinds: readonly NnxKind[];
  readonly modes: readonly NnxMode[];
  readonly modes_total: number;
  readonly step: number;
  readonly since: number | null;
  readonly passed: string;
  readonly uncompared: string;
}

/** Figures for each unit along `axis` of a site's output, for a `Look`. Buffer: float64 [UNIT_STATS, units], NaN if no finite value was seen. `each` is the number of values per unit in that pass, `source` names the pass, `more` counts the units left out, and `why` says why there are none. `axes` are all axes in words, () if they are unknown. `behind` is the activation function that the values go into, as far as it decides which units are dead. */
export interface UnitStats {
  readonly type: "units";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly each: number;
  readonly source: string;
  readonly units: number;
  readonly more: number;
  readonly why: string;
  readonly axis: number;
  readonly axes: readonly string[];
  readonly behind: string;
}

/** One compilation of a function of the user, with its lines; see `Compilation`. `step` is None outside a loop. */
export interface CompilationRow {
  readonly function: string;
  readonly defined: string;
  readonly called: string;
  readonly seconds: number;
  readonly step: number | null;
  readonly why: string;
}

/** What was compiled since the inspector was made, for a `Look`. Buffer: none. The rows are of functions of the user, newest first, `more` were left out. `operations` are those outside a jitted function, and `inspector` those that the inspector made for itself: how many, and their seconds. */
export interface Compilations {
  readonly type: "compilations";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly rows: readonly CompilationRow[];
  readonly more: number;
  readonly operations: number;
  readonly operation_seconds: number;
  readonly inspector: number;
  readonly inspector_seconds: number;
}

/** What a pass measured: a site's output or gradient, or a parameter that the site holds, or its gradient, in words. */
export interface CastRow {
  readonly site: string;
  readonly name: string;
}

/** What lower precision would make of all that the newest pass measured, for a `Look`. Buffer: float64 [rows, CASTS, CAST_STATS], NaN if it is unknown. The rows are the first MOST_CASTS of `total`, those first that would lose most in any dtype. */
export interface Casts {
  readonly type: "casts";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly step: number;
  readonly rows: readonly CastRow[];
  readonly total: number;
}

/** Lines of a file from `first` on; `line` is the line of a call, in `function`. */
export interface Excerpt {
  readonly file: string;
  readonly function: string;
  readonly first: number;
  readonly line: number;
  readonly text: string;
}

/** The calls of a module and the docstring of its type, for a `Look`. Buffer: none. `sown` lists the sites of the values that the module passes to `sow` or `perturb`. */
export interface Code {
  readonly type: "code";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly kind: string;
  readonly documentation: string;
  readonly excerpts: readonly Excerpt[];
  readonly sown: readonly string[];
  readonly why: string;
}

/** The effect of perturbing one site alone; `why_not` says why it could not be measured. None: the figure is not finite, or not among the `measures`. */
export interface SweepRow {
  readonly site: string;
  readonly loss_change: number | null;
  readonly output_change: number | null;
  readonly kl: number | null;
  readonly top1_changed: number | null;
  readonly why_not: string;
}

/** The sweep that runs or ran last. Buffer: none. `sites` is the selection and `perturbation` the Python text of the perturbation; `source` names the pass. `total` is 0 until it is known; a program is compiled while `done` is 0. `measures` names the fields of `rows` that have figures. `rows` come at the end: the first MOST_RANKED of `measured`, largest change first. `error` says why the sweep failed. */
export interface Sweep {
  readonly type: "sweep";
  readonly version: number;
  readonly running: boolean;
  readonly stopped: boolean;
  readonly done: number;
  readonly total: number;
  readonly sites: string;
  readonly perturbation: string;
  readonly source: string;
  readonly measures: readonly string[];
  readonly loss: number | null;
  readonly rows: readonly SweepRow[];
  readonly measured: number;
  readonly error: string;
}

/** A layer's likeliest words at a position, with probabilities, and the answer's rank. */
export interface LensCell {
  readonly words: readonly string[];
  readonly probabilities: readonly (number | null)[];
  readonly probability: number | null;
  readonly rank: number;
}

/** One layer of a lens. */
export interface LensRow {
  readonly site: string;
  readonly cells: readonly LensCell[];
}

/** The logit lens over one example. Buffer: none. `words` are those of the positions, or empty; `answers` are the words that are followed. `gap` is as in `nni.Lens`; `more` counts the positions left out. */
export interface Lens {
  readonly type: "lens";
  readonly version: number;
  readonly running: boolean;
  readonly error: string;
  readonly source: string;
  readonly batch: number;
  readonly example: number;
  readonly unembed: string;
  readonly norm: string;
  readonly words: readonly string[];
  readonly answers: readonly string[];
  readonly tokens: readonly number[];
  readonly gap: number | null;
  readonly rows: readonly LensRow[];
  readonly more: number;
}

/** What a site adds to a logit. */
export interface LogitBar {
  readonly site: string;
  readonly value: number | null;
}

/** What each site adds to the logit of a word at one position. Buffer: none. */
export interface Logits {
  readonly type: "logits";
  readonly version: number;
  readonly running: boolean;
  readonly error: string;
  readonly source: string;
  readonly batch: number;
  readonly example: number;
  readonly position: number;
  readonly token: number;
  readonly word: string;
  readonly logit: number | null;
  readonly bars: readonly LogitBar[];
}

/** The attribution of an output to one example's input. Buffer: none. `scores` has the `shape` of the tokens or of the picture; `of` is the site or "" for an argument. `word` names the class or token; `difference` is output minus baseline, for integrated gradients. */
export interface Attributed {
  readonly type: "attribution";
  readonly version: number;
  readonly running: boolean;
  readonly error: string;
  readonly source: string;
  readonly batch: number;
  readonly example: number;
  readonly of: string;
  readonly method: string;
  readonly word: string;
  readonly output: number | null;
  readonly difference: number | null;
  readonly shape: readonly number[];
  readonly blocks: number;
  readonly scores: readonly (number | null)[];
  readonly words: readonly string[];
}

/** One example of a unit. `place` is where its value is; `words` is the text around it, whose word `at` is the place (-1: none). */
export interface ExciteRow {
  readonly which: "most" | "least" | "random";
  readonly rank: number;
  readonly example: number;
  readonly place: readonly number[];
  readonly value: number | null;
  readonly words: readonly string[];
  readonly at: number;
}

/** The examples that excite one unit of a site. Buffer: none. `total` is 0 while it is unknown; `count` is the number of examples seen; `extent` holds the lengths of the axes of `place`; `constant` says that all have one value. `pictures` has one for each of the rows, if they are of other data than a batch that the screen has. */
export interface UnitExamples {
  readonly type: "examples";
  readonly version: number;
  readonly running: boolean;
  readonly error: string;
  readonly source: string;
  readonly batch: number;
  readonly stopped: boolean;
  readonly done: number;
  readonly total: number;
  readonly site: string;
  readonly axis: number;
  readonly unit: number;
  readonly units: number;
  readonly count: number;
  readonly nan: number;
  readonly constant: boolean;
  readonly notes: readonly string[];
  readonly extent: readonly number[];
  readonly rows: readonly ExciteRow[];
  readonly pictures: Pictures | null;
}

/** The pass of another run that `insp.compare` offers; a ShowPass of OTHER sends it. Buffer: none. `name` is that run's name, "" if there is no other run. `step` is None if the pass belongs to no step. `number` counts the passes offered, so that the browser pins each one once. */
export interface Other {
  readonly type: "other";
  readonly version: number;
  readonly name: string;
  readonly step: number | null;
  readonly number: number;
}

/** The distance between one site's quantity in two passes; see `nni.compare`, whose `b` is the pass on screen. None: unknown. `constant`: both are constant and differ, so the quantile distance has no unit. `nan` and `nan_pinned` count NaNs. */
export interface ComparedRow {
  readonly site: string;
  readonly quantity: string;
  readonly where: "both" | "here" | "pinned";
  readonly total_variation: number | null;
  readonly quantile_distance: number | null;
  readonly constant: boolean;
  readonly mean_difference: number | null;
  readonly std_difference: number | null;
  readonly rms_difference: number | null;
  readonly nan: number | null;
  readonly nan_pinned: number | null;
  readonly shapes: string;
}

/** Two passes, site by site, in answer to the Compare with this id. Buffer: none. `number` is the pass on screen and `pinned` the pass that it is compared with, by their numbers in the recording (or OTHER). `rows` are the first MOST_RANKED of `total`, largest difference first. */
export interface Compared {
  readonly type: "compared";
  readonly version: number;
  readonly id: number;
  readonly number: number;
  readonly pinned: number;
  readonly rows: readonly ComparedRow[];
  readonly total: number;
}

/** How far one array of weights is from the other side's; see `nni.compare_weights`, whose `b` is the model on screen. None: unknown. `change` holds the heights of the histogram of the difference, SPARK bytes in hexadecimal; "" if there is none. */
export interface WeightRow {
  readonly parameter: string;
  readonly array: string;
  readonly where: "both" | "here" | "pinned";
  readonly distance: number | null;
  readonly relative_change: number | null;
  readonly total_variation: number | null;
  readonly change: string;
}

/** The weights of the model against those of `name`, when they were compared. Buffer: none. `name` is "" if there is no comparison. `rows` are the first MOST_RANKED of `total`, largest relative change first. */
export interface Weights {
  readonly type: "weights";
  readonly version: number;
  readonly name: string;
  readonly rows: readonly WeightRow[];
  readonly total: number;
}

/** One array that can be read. `number` names it in `ReadValues`, `call` counts the calls of the site, and `name` distinguishes the arrays of one call ("" for a single array). */
export interface HeldArray {
  readonly number: number;
  readonly call: number;
  readonly name: string;
  readonly shape: readonly number[];
  readonly dtype: string;
  readonly axes: readonly string[];
  readonly bytes: number;
}

/** The arrays of a part of a site, which `ShowValues` opened. `parts` are the parts that the site has; `perturbed`: a perturbation is on in this pass; `source` names the pass and the parameters in words; `notes` are further notes for the user. */
export interface Arrays {
  readonly type: "arrays";
  readonly version: number;
  readonly request: number;
  readonly site: string;
  readonly part: "output" | "input" | "gradient" | "parameter" | "attention";
  readonly clean: boolean;
  readonly parts: readonly string[];
  readonly arrays: readonly HeldArray[];
  readonly perturbed: boolean;
  readonly source: string;
  readonly notes: readonly string[];
}

/** A window of an array in blocks, in answer to `ReadValues`. Buffer: for each of `planes` an array [tiles, rows, columns] of `encoding`, each padded to a multiple of 8 bytes. Blocks of one element have the plane "value" (for exact complex values "real" and "imag"). Others have "mean", "low" and "high" of their finite values (NaN if there are none) and, if any value is not finite, "nan", "posinf" and "neginf", which count such values in each block. `starts`, `ends` and `block` are for tiles, rows and columns, in elements. */
export interface Values {
  readonly type: "values";
  readonly version: number;
  readonly request: number;
  readonly array: number;
  readonly index: readonly number[];
  readonly axes: readonly number[];
  readonly norm_over: number;
  readonly component: "value" | "real" | "imag" | "abs";
  readonly exact: boolean;
  readonly starts: readonly number[];
  readonly ends: readonly number[];
  readonly block: readonly number[];
  readonly counts: readonly number[];
  readonly planes: readonly string[];
  readonly encoding: "float32" | "float64" | "int64" | "uint64";
}

/** One example of the batch. `words` are the texts of its positions (() without a decoder, and cut off after MOST_WORDS of all examples); `label` and `prediction` are names of classes, "" if unknown. */
export interface Example {
  readonly words: readonly string[];
  readonly label: string;
  readonly prediction: string;
}

/** Thumbnails of the first `count` examples. `path` names the argument with the pictures, which have `rows` and `columns` of pixels. `pixels` is uint8 [count, height, width, channels] in base64, with 1 channel (grey) or 3. `shown` says in words how numbers became bytes. */
export interface Pictures {
  readonly path: string;
  readonly count: number;
  readonly rows: number;
  readonly columns: number;
  readonly height: number;
  readonly width: number;
  readonly channels: number;
  readonly shown: string;
  readonly pixels: string;
}

/** The batch of the pass on screen. Buffer: none. `batch` counts its examples, of which `examples` are the first. `tokens` is the path of the argument that holds the ids, "" if there is none, and `positions` the number of ids of each example. `pictures` are None if the batch has none. `problem` says what could not be read; "" if nothing. `number` tells batches apart; all panels look at this one. A new view looks at `example`. `apart` are the sites without words: their positions may be those of another argument of this length, `"encoder input"` for what a site receives; ("*",) are all of them. `kind` is whether it is the batch of a forward pass or of a step, and `other` the kind of the other batch that can be looked at, "" if there is none. */
export interface Inputs {
  readonly type: "inputs";
  readonly version: number;
  readonly number: number;
  readonly example: number;
  readonly batch: number;
  readonly tokens: string;
  readonly positions: number;
  readonly examples: readonly Example[];
  readonly problem: string;
  readonly pictures: Pictures | null;
  readonly apart: readonly string[];
  readonly kind: "run" | "step";
  readonly other: "run" | "step" | "";
}

/** The figures of a site at each position of an example, in answer to `ShowPositions`. Buffer: float64 [len(figures), positions]. `figures` are those of POSITION_STATS that there are; `units` is the number of units at each position. `along` is the number of the axis of the positions, None if that is not known: there are no figures, and `source` says so. `axes` has the names of those that could be it, "" for the others. Otherwise `source` names the pass in words. */
export interface Positions {
  readonly type: "positions";
  readonly version: number;
  readonly id: number;
  readonly site: string;
  readonly example: number;
  readonly unit: number;
  readonly axis: number | null;
  readonly along: number | null;
  readonly axes: readonly string[];
  readonly units: number;
  readonly positions: number;
  readonly figures: readonly string[];
  readonly source: string;
}

/** Browser to kernel, on the control comm: a view has opened; send it everything. `streams` is False if the page has no stream comm, because its front end makes a widget's model only when the widget is displayed (marimo): then everything goes over control. `page` is new each time the notebook is loaded; `said` counts the hellos of a page. */
export interface Hello {
  readonly type: "hello";
  readonly version: number;
  readonly streams: boolean;
  readonly page: string;
  readonly said: number;
}

/** Browser to kernel: the frame with this number has been drawn. */
export interface Ack {
  readonly type: "ack";
  readonly seq: number;
}

/** Browser to kernel: show this site's histogram and history. */
export interface Select {
  readonly type: "select";
  readonly id: number;
  readonly site: string;
}

/** Browser to kernel: later views and saved pages begin with this example. */
export interface ChooseExample {
  readonly type: "choose_example";
  readonly id: number;
  readonly example: number;
}

/** Browser to kernel: all panels look at the batch of the last forward pass ("run"), or of the last step; that pass is made again. */
export interface ChooseBatch {
  readonly type: "choose_batch";
  readonly id: number;
  readonly which: "run" | "step";
}

/** Browser to kernel: add a perturbation of the menu to one site, switched on. A `strength` of None means the offer's default. `units` along `axis` are those that change; () for all. */
export interface Perturb {
  readonly type: "perturb";
  readonly id: number;
  readonly site: string;
  readonly kind: string;
  readonly strength: number | null;
  readonly at: "output" | "input";
  readonly units: readonly number[];
  readonly axis: number;
}

/** Browser to kernel: switch a perturbation on or off and set its strength (None keeps it). */
export interface Adjust {
  readonly type: "adjust";
  readonly id: number;
  readonly perturbation: number;
  readonly enabled: boolean;
  readonly strength: number | null;
}

/** Browser to kernel: remove a perturbation. */
export interface Remove {
  readonly type: "remove";
  readonly id: number;
  readonly perturbation: number;
}

/** Browser to kernel: switch all perturbations on or off. */
export interface SwitchAll {
  readonly type: "switch_all";
  readonly id: number;
  readonly enabled: boolean;
}

/** Browser to kernel: let a run that happens elsewhere measure every `every`-th step. */
export interface SetEvery {
  readonly type: "set_every";
  readonly id: number;
  readonly every: number;
}

/** Browser to kernel: let a run that happens elsewhere measure its next step too. */
export interface MeasureNext {
  readonly type: "measure_next";
  readonly id: number;
}

/** Browser to kernel: let a run that happens elsewhere send what a site returns in its next step; of an `example`, its entry of the first axis alone. */
export interface ReadSite {
  readonly type: "read_site";
  readonly id: number;
  readonly site: string;
  readonly example: number | null;
}

/** Browser to kernel: send the `Nnx` of the module at this site, before the reply. */
export interface ShowNnx {
  readonly type: "show_nnx";
  readonly id: number;
  readonly site: string;
}

/** Browser to kernel: set a mode of one module for inspected passes, as `insp.modes.set` does; None restores the model's own mode. */
export interface SwitchMode {
  readonly type: "switch_mode";
  readonly id: number;
  readonly module: string;
  readonly name: string;
  readonly value: boolean | null;
}

/** Browser to kernel: set the mask of a perturbation (None: of a new one on `site`), `units` bits as in `Perturbation.mask`, along `axis` or, in rows of `columns`, from `axis` on. */
export interface SetMask {
  readonly type: "set_mask";
  readonly id: number;
  readonly perturbation: number | null;
  readonly site: string;
  readonly units: number;
  readonly mask: string;
  readonly axis: number;
  readonly columns: number;
}

/** Browser to kernel: show the view beside the notebook, in a pane of its own. */
export interface OpenBeside {
  readonly type: "open_beside";
  readonly id: number;
}

/** Browser to kernel: send the units or code of a site, or (of no site) what was compiled, or what lower precision would make of the newest pass. They come before the reply, with the number of this request. Units are those along `axis`. */
export interface Look {
  readonly type: "look";
  readonly id: number;
  readonly what: "units" | "code" | "compilations" | "casts";
  readonly site: string;
  readonly axis: number;
}

/** Browser to kernel: perturb each of some sites alone, in a thread. `sites` is a glob; the other fields are as in `Perturb`. A `kind` of "" means the default of `nni.sweep`. */
export interface StartSweep {
  readonly type: "start_sweep";
  readonly id: number;
  readonly sites: string;
  readonly kind: string;
  readonly strength: number | null;
  readonly at: "output" | "input";
}

/** Browser to kernel: stop the running sweep after the pass that is being computed. */
export interface StopSweep {
  readonly type: "stop_sweep";
  readonly id: number;
}

/** Browser to kernel: send the frame of the recording's pass `number`, with the histograms of `site`. Live frames continue. */
export interface ShowPass {
  readonly type: "show_pass";
  readonly id: number;
  readonly number: number;
  readonly site: string;
}

/** Browser to kernel: compare the recording's pass `number` with `pinned`, site by site. Either may be OTHER. A `Compared` comes before the reply. */
export interface Compare {
  readonly type: "compare";
  readonly id: number;
  readonly number: number;
  readonly pinned: number;
}

/** Browser to kernel: make the arrays of a part of a site readable. `clean`: those of a pass without perturbations. An `Arrays` comes before the reply. */
export interface ShowValues {
  readonly type: "show_values";
  readonly id: number;
  readonly site: string;
  readonly part: "output" | "input" | "gradient" | "parameter" | "attention";
  readonly clean: boolean;
}

/** Browser to kernel: read a window of an array. A `Values` comes before the reply. `axes` are the axes shown as tiles, rows and columns (-1: none). `starts` and `ends` are the window along them, `most` is the largest number of blocks along them. `index` has a number for every axis; those of the shown axes are ignored. `norm_over` is an axis whose norms are read instead of values, or -1; `axes` and `index` then refer to the remaining axes. `exact`: read the values of a small window with every digit. */
export interface ReadValues {
  readonly type: "read_values";
  readonly id: number;
  readonly array: number;
  readonly index: readonly number[];
  readonly axes: readonly number[];
  readonly starts: readonly number[];
  readonly ends: readonly number[];
  readonly most: readonly number[];
  readonly norm_over: number;
  readonly component: "value" | "real" | "imag" | "abs";
  readonly exact: boolean;
}

/** Browser to kernel: send the `Flow` between the modules that a site calls. */
export interface ShowFlow {
  readonly type: "show_flow";
  readonly id: number;
  readonly site: string;
}

/** Browser to kernel: show (or hide) the operations within a site's call as rows. */
export interface ShowOperations {
  readonly type: "show_operations";
  readonly id: number;
  readonly site: string;
  readonly shown: boolean;
}

/** Browser to kernel: send the `LayoutLibrary`; it is not part of the widget. */
export interface GetLayoutLibrary {
  readonly type: "get_layout_library";
  readonly id: number;
}

/** A kind of perturbation that the screen can add: a row of its menu, not a message. `does` completes the sentence "This will ...". `strength` is the default strength (None: it has none); `low` and `high` are the slider's range; `least` is the lowest allowed strength. */
export interface Offer {
  readonly kind: string;
  readonly group: "value" | "gradient";
  readonly does: string;
  readonly strength_name: string;
  readonly strength: number | null;
  readonly low: number;
  readonly high: number;
  readonly least: number | null;
}

/** Browser to kernel: read the figures of a site at each position of an example's tokens, along `axis`; None to find it. */
export interface ShowPositions {
  readonly type: "show_positions";
  readonly id: number;
  readonly site: string;
  readonly example: number;
  readonly unit: number;
  readonly axis: number | null;
}

/** Browser to kernel: study the examined batch, in a thread. `example`, `position` and `unit` say what is shown of the result; `again` is False to show another part of the last result. `unembed` and `norm` are sites, "" for a proposal; `token` is a class or token, None for the model's own answer; `method` and `axis` are as in `nni.attribute` and `nni.top_examples`. */
export interface Study {
  readonly type: "study";
  readonly id: number;
  readonly what: "lens" | "logits" | "attribution" | "examples";
  readonly again: boolean;
  readonly site: string;
  readonly example: number;
  readonly position: number;
  readonly unit: number;
  readonly axis: number;
  readonly token: number | null;
  readonly unembed: string;
  readonly norm: string;
  readonly method: "gradient" | "gradient_times_input" | "integrated_gradients";
}

/** Browser to kernel: stop the study that runs and keep what it found. */
export interface StopStudy {
  readonly type: "stop_study";
  readonly id: number;
}

export type ToBrowser = Other | Compared | Weights | Flow | LayoutLibrary | Inputs | Positions | Nnx | UnitStats | Compilations | Casts | Code | Sweep | Lens | Logits | Attributed | UnitExamples | Layout | Frame | History | Updates | Choices | Curves | Passes | State | Findings | Reply | Arrays | Values;

export type ToKernel = Hello | Ack | Select | ChooseExample | ChooseBatch | Perturb | Adjust | Remove | SwitchAll | SetEvery | MeasureNext | ReadSite | ShowNnx | SwitchMode | SetMask | OpenBeside | Look | StartSweep | StopSweep | ShowPass | Compare | ShowValues | ReadValues | ShowFlow | ShowOperations | GetLayoutLibrary | ShowPositions | Study | StopStudy;

/** What a click can add, in the order of the menu. Python can do more. */
export const OFFERS: readonly Offer[] = [
  { kind: "Zero", group: "value", does: "replace it by zeros", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "Mean", group: "value", does: "replace it by its mean over the batch", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "Scale", group: "value", does: "multiply it by the factor", strength_name: "factor", strength: 0.5, low: 0.0, high: 2.0, least: null },
  { kind: "Shift", group: "value", does: "add the strength to every number", strength_name: "strength", strength: 1.0, low: -2.0, high: 2.0, least: null },
  { kind: "Noise", group: "value", does: "add Gaussian noise of this std", strength_name: "std", strength: 0.1, low: 0.0, high: 1.0, least: 0.0 },
  { kind: "Clamp", group: "value", does: "cut it off at \u00b1 the limit", strength_name: "limit", strength: 1.0, low: 0.0, high: 4.0, least: 0.0 },
  { kind: "Cast", group: "value", does: "round it to bfloat16 and back", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "ScaleGradient", group: "gradient", does: "multiply its gradient by the factor", strength_name: "factor", strength: 0.5, low: 0.0, high: 2.0, least: null },
  { kind: "StopGradient", group: "gradient", does: "let no gradient back through it", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "ReverseGradient", group: "gradient", does: "multiply its gradient by \u2212factor", strength_name: "factor", strength: 1.0, low: 0.0, high: 2.0, least: null },
  { kind: "ClipGradient", group: "gradient", does: "limit its gradient to this norm", strength_name: "norm", strength: 1.0, low: 0.0, high: 10.0, least: 0.0 },
];
