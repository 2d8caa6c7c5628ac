// The messages between kernel and browser, as types, constants and a table of shapes.
// Generated from nnx_inspector/protocol.py by generate_protocol.py: never edit by hand.

export const VERSION = 2;
export const QUANTITIES = ["output", "gradient"] as const;
export const STATISTICS = ["size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf"] as const;
export const HISTORY_QUANTILES = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99] as const;
export const SPARK = 32;
export const HISTORY_BINS = 48;

export type Quantity = (typeof QUANTITIES)[number];
export type Statistic = (typeof STATISTICS)[number];

/** One row of the tree. `parent` is an index into the layout's sites, -1 for the root. */
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
}

/** The sites that later frames refer to by index. Buffer: none. */
export interface Layout {
  readonly type: "layout";
  readonly version: number;
  readonly layout: number;
  readonly model: string;
  readonly sites: readonly Site[];
}

/** Where a run stands. `total` and `rate` (steps a second) are None while unknown. */
export interface Progress {
  readonly kind: string;
  readonly running: boolean;
  readonly step: number;
  readonly total: number | null;
  readonly rate: number | null;
}

/** A full histogram in a frame's buffer: `bins` pairs (bin, count) of one site's quantity. A bin is the upper 12 bits of the float32 values it holds (sign, exponent, three mantissa bits), so its edges are read from the float with those bits. See `nnx_inspector.summary`. */
export interface Histogram {
  readonly site: number;
  readonly quantity: number;
  readonly bins: number;
}

/** One pass. Buffer: float64 table [site, quantity, statistic], then for each of `histograms` float64 [bins, 2], then uint8 sparklines [site, quantity, SPARK]. */
export interface Frame {
  readonly type: "frame";
  readonly version: number;
  readonly seq: number;
  readonly layout: number;
  readonly step: number;
  readonly perturbed: boolean;
  readonly metrics: Readonly<Record<string, number | null>>;
  readonly histograms: readonly Histogram[];
  readonly progress: Progress;
}

/** One site's quantity over the steps so far. Buffer, all float64: steps [steps]; quantiles [steps, len(HISTORY_QUANTILES)]; edges [HISTORY_BINS + 1]; fractions [steps, HISTORY_BINS]. Edges are spaced on a symmetric-log axis; fractions of one step add up to 1. A step in which nothing finite was measured is NaN throughout. */
export interface History {
  readonly type: "history";
  readonly version: number;
  readonly layout: number;
  readonly site: number;
  readonly quantity: number;
  readonly steps: number;
}

/** The metrics over the steps so far. Buffer: for each of `names`, float64 [points, 2]: step and value (NaN where it was not finite), `points[i]` rows for `names[i]`. */
export interface Curves {
  readonly type: "curves";
  readonly version: number;
  readonly names: readonly string[];
  readonly points: readonly number[];
}

/** One perturbation in force (or switched off), as the browser shows it. `site` is the pattern it was made with; `sites` are the keys it acts on, the first MOST_SITES of `reach`. `kind` is its class and `expression` the Python text that makes it. `strength` is the one number that can be tuned, called `strength_name` (None and "": there is none); `low` and `high` are its slider's range, and restrict nothing. `units` is the length of a boolean mask along its axis (0: it is none), `units_off` how many of them it switches off. `pending` says that the running loop takes it over at its next step; `compiling`, that the running program has no place for it yet and another one is being made, while the old one goes on. */
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
  readonly enabled: boolean;
  readonly pending: boolean;
  readonly compiling: boolean;
}

/** How far one site's output moved: `|perturbed - clean| / |clean|`, a fraction; None where that is not finite. */
export interface SiteEffect {
  readonly site: string;
  readonly change: number | null;
}

/** The perturbed pass beside the clean one. Values by metric name ("loss" first). `output_change` is the relative norm of the difference of the outputs; where those are logits, `kl` is the mean divergence of the perturbed from the clean distribution in nats, and `top1_changed` the fraction of predictions that are others. None: not measured, or without meaning. `sites` are those downstream that moved most, at most MOST_EFFECTS, largest first. */
export interface Effect {
  readonly source: string;
  readonly clean: Readonly<Record<string, number | null>>;
  readonly perturbed: Readonly<Record<string, number | null>>;
  readonly output_change: number | null;
  readonly kl: number | null;
  readonly top1_changed: number | null;
  readonly sites: readonly SiteEffect[];
}

/** What inspection costs. Seconds are medians of recent steps, None until measured. */
export interface Cost {
  readonly plain_seconds: number | null;
  readonly inspected_seconds: number | null;
  readonly compilations: number;
  readonly bytes_sent: number;
  readonly frames_dropped: number;
  readonly errors: number;
}

/** Something the person should know: `level` is "info", "warning" or "error". */
export interface Notice {
  readonly level: string;
  readonly text: string;
  readonly site: string | null;
}

/** Everything small that the screen shows, whole each time. Buffer: none. `training_perturbed` is True while a watched loop runs with a perturbation that is on. `no_effect` says why there is no effect to show. `listening` says how a change reaches a running loop: "during" a cell (the kernel handles messages beside it), because the loop runs in a "thread", or "after" the cell has ended. `compiling` counts the perturbations for which a program is being compiled. */
export interface State {
  readonly type: "state";
  readonly version: number;
  readonly seq: number;
  readonly selected: string;
  readonly perturbations: readonly Perturbation[];
  readonly training_perturbed: boolean;
  readonly listening: "during" | "thread" | "after";
  readonly compiling: number;
  readonly effect: Effect | null;
  readonly no_effect: string;
  readonly progress: Progress;
  readonly cost: Cost;
  readonly notices: readonly Notice[];
  readonly closed: boolean;
}

/** The one answer to a request. `error` is "" when it succeeded. */
export interface Reply {
  readonly type: "reply";
  readonly id: number;
  readonly ok: boolean;
  readonly error: string;
}

/** Browser to kernel, on the control comm: a view is there; answer with everything. */
export interface Hello {
  readonly type: "hello";
  readonly version: number;
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

/** Browser to kernel: add one of OFFERS on one site, switched on. Without a strength it has the offer's own. */
export interface Perturb {
  readonly type: "perturb";
  readonly id: number;
  readonly site: string;
  readonly kind: string;
  readonly strength: number | null;
  readonly at: "output" | "input";
}

/** Browser to kernel: switch a perturbation and set its strength (None leaves it). */
export interface Adjust {
  readonly type: "adjust";
  readonly id: number;
  readonly perturbation: number;
  readonly enabled: boolean;
  readonly strength: number | null;
}

/** Browser to kernel: take a perturbation away. */
export interface Remove {
  readonly type: "remove";
  readonly id: number;
  readonly perturbation: number;
}

/** Browser to kernel: switch all perturbations on, or off. */
export interface SwitchAll {
  readonly type: "switch_all";
  readonly id: number;
  readonly enabled: boolean;
}

/** A kind that the screen may add: no message, but a row of OFFERS. `does` ends the sentence "This will ...". `strength` is what it is added with at first (None: it has none); `low` and `high` are the slider's range; `least` is the least it may be. */
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

export type ToBrowser = Layout | Frame | History | Curves | State | Reply;

export type ToKernel = Hello | Ack | Select | Perturb | Adjust | SwitchAll | Remove;

/** The fields of every struct: a scalar, struct or a|b, then `?` null, `[]` list, `{}` map. */
export const SHAPES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  Site: { key: "str", name: "str", kind: "str", parent: "int", depth: "int", inputs: "str", output: "str", parameters: "int", flops: "float?", calls: "int", stacked: "int", aliases: "str[]", source: "str", perturbable: "bool", unseen: "str" },
  Layout: { version: "int", layout: "int", model: "str", sites: "Site[]" },
  Progress: { kind: "str", running: "bool", step: "int", total: "int?", rate: "float?" },
  Histogram: { site: "int", quantity: "int", bins: "int" },
  Frame: { version: "int", seq: "int", layout: "int", step: "int", perturbed: "bool", metrics: "float?{}", histograms: "Histogram[]", progress: "Progress" },
  History: { version: "int", layout: "int", site: "int", quantity: "int", steps: "int" },
  Curves: { version: "int", names: "str[]", points: "int[]" },
  Perturbation: { id: "int", site: "str", sites: "str[]", reach: "int", kind: "str", at: "output|input|parameter", acts_on: "value|gradient|parameter", expression: "str", strength: "float?", strength_name: "str", low: "float", high: "float", units: "int", units_off: "int", enabled: "bool", pending: "bool", compiling: "bool" },
  SiteEffect: { site: "str", change: "float?" },
  Effect: { source: "str", clean: "float?{}", perturbed: "float?{}", output_change: "float?", kl: "float?", top1_changed: "float?", sites: "SiteEffect[]" },
  Cost: { plain_seconds: "float?", inspected_seconds: "float?", compilations: "int", bytes_sent: "int", frames_dropped: "int", errors: "int" },
  Notice: { level: "str", text: "str", site: "str?" },
  State: { version: "int", seq: "int", selected: "str", perturbations: "Perturbation[]", training_perturbed: "bool", listening: "during|thread|after", compiling: "int", effect: "Effect?", no_effect: "str", progress: "Progress", cost: "Cost", notices: "Notice[]", closed: "bool" },
  Reply: { id: "int", ok: "bool", error: "str" },
  Hello: { version: "int" },
  Ack: { seq: "int" },
  Select: { id: "int", site: "str" },
  Perturb: { id: "int", site: "str", kind: "str", strength: "float?", at: "output|input" },
  Adjust: { id: "int", perturbation: "int", enabled: "bool", strength: "float?" },
  Remove: { id: "int", perturbation: "int" },
  SwitchAll: { id: "int", enabled: "bool" },
  Offer: { kind: "str", group: "value|gradient", does: "str", strength_name: "str", strength: "float?", low: "float", high: "float", least: "float?" },
};

/** The struct of every message type. */
export const TO_BROWSER: Readonly<Record<string, string>> = { layout: "Layout", frame: "Frame", history: "History", curves: "Curves", state: "State", reply: "Reply" };

/** The struct of every message type. */
export const TO_KERNEL: Readonly<Record<string, string>> = { hello: "Hello", ack: "Ack", select: "Select", perturb: "Perturb", adjust: "Adjust", switch_all: "SwitchAll", remove: "Remove" };

/** What a click can add, in the order of the menu. Python can do more. */
export const OFFERS: readonly Offer[] = [
  { kind: "Zero", group: "value", does: "replace it by zeros", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "Mean", group: "value", does: "replace it by its mean over the batch", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "Scale", group: "value", does: "multiply it by the factor", strength_name: "factor", strength: 1.0, low: 0.0, high: 2.0, least: null },
  { kind: "Shift", group: "value", does: "add the strength to every number", strength_name: "strength", strength: 1.0, low: -2.0, high: 2.0, least: null },
  { kind: "Noise", group: "value", does: "add Gaussian noise of this std", strength_name: "std", strength: 0.1, low: 0.0, high: 1.0, least: 0.0 },
  { kind: "Clamp", group: "value", does: "cut it off at \u00b1 the limit", strength_name: "limit", strength: 1.0, low: 0.0, high: 4.0, least: 0.0 },
  { kind: "Cast", group: "value", does: "round it to bfloat16 and back", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "ScaleGradient", group: "gradient", does: "multiply its gradient by the factor", strength_name: "factor", strength: 1.0, low: 0.0, high: 2.0, least: null },
  { kind: "StopGradient", group: "gradient", does: "let no gradient back through it", strength_name: "", strength: null, low: 0.0, high: 0.0, least: null },
  { kind: "ReverseGradient", group: "gradient", does: "multiply its gradient by \u2212factor", strength_name: "factor", strength: 1.0, low: 0.0, high: 2.0, least: null },
  { kind: "ClipGradient", group: "gradient", does: "limit its gradient to this norm", strength_name: "norm", strength: 1.0, low: 0.0, high: 10.0, least: 0.0 },
];
