// The messages between kernel and browser, as types, constants and a table of shapes.
// Generated from nnx_inspector/protocol.py by generate_protocol.py: never edit by hand.

export const VERSION = 1;
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

/** One perturbation in force (or switched off), as the browser shows it. `kind` is "Zero" or "Scale"; `strength` is Scale's factor, None where the kind has none. `pending` says that the running loop takes it over at its next step. */
export interface Perturbation {
  readonly id: number;
  readonly site: string;
  readonly kind: string;
  readonly strength: number | null;
  readonly enabled: boolean;
  readonly pending: boolean;
}

/** The perturbed pass beside the clean one. Values by metric name ("loss" first); `output_change` is the relative norm of the difference of the outputs, or None. */
export interface Effect {
  readonly source: string;
  readonly clean: Readonly<Record<string, number | null>>;
  readonly perturbed: Readonly<Record<string, number | null>>;
  readonly output_change: number | null;
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

/** Everything small that the screen shows, whole each time. Buffer: none. `training_perturbed` is True while a watched loop runs with a perturbation that is on. `no_effect` says why there is no effect to show. */
export interface State {
  readonly type: "state";
  readonly version: number;
  readonly seq: number;
  readonly selected: string;
  readonly perturbations: readonly Perturbation[];
  readonly training_perturbed: boolean;
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

/** Browser to kernel: add a perturbation ("Zero" or "Scale") on one site, switched on. */
export interface Perturb {
  readonly type: "perturb";
  readonly id: number;
  readonly site: string;
  readonly kind: string;
  readonly strength: number | null;
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

export type ToBrowser = Layout | Frame | History | Curves | State | Reply;

export type ToKernel = Hello | Ack | Select | Perturb | Adjust | Remove;

/** The fields of every struct: a scalar or struct, then `?` or null, `[]` list, `{}` map. */
export const SHAPES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  Site: { key: "str", name: "str", kind: "str", parent: "int", depth: "int", inputs: "str", output: "str", parameters: "int", flops: "float?", calls: "int", stacked: "int", aliases: "str[]", source: "str", perturbable: "bool", unseen: "str" },
  Layout: { version: "int", layout: "int", model: "str", sites: "Site[]" },
  Progress: { kind: "str", running: "bool", step: "int", total: "int?", rate: "float?" },
  Histogram: { site: "int", quantity: "int", bins: "int" },
  Frame: { version: "int", seq: "int", layout: "int", step: "int", perturbed: "bool", metrics: "float?{}", histograms: "Histogram[]", progress: "Progress" },
  History: { version: "int", layout: "int", site: "int", quantity: "int", steps: "int" },
  Curves: { version: "int", names: "str[]", points: "int[]" },
  Perturbation: { id: "int", site: "str", kind: "str", strength: "float?", enabled: "bool", pending: "bool" },
  Effect: { source: "str", clean: "float?{}", perturbed: "float?{}", output_change: "float?" },
  Cost: { plain_seconds: "float?", inspected_seconds: "float?", compilations: "int", bytes_sent: "int", frames_dropped: "int", errors: "int" },
  Notice: { level: "str", text: "str", site: "str?" },
  State: { version: "int", seq: "int", selected: "str", perturbations: "Perturbation[]", training_perturbed: "bool", effect: "Effect?", no_effect: "str", progress: "Progress", cost: "Cost", notices: "Notice[]", closed: "bool" },
  Reply: { id: "int", ok: "bool", error: "str" },
  Hello: { version: "int" },
  Ack: { seq: "int" },
  Select: { id: "int", site: "str" },
  Perturb: { id: "int", site: "str", kind: "str", strength: "float?" },
  Adjust: { id: "int", perturbation: "int", enabled: "bool", strength: "float?" },
  Remove: { id: "int", perturbation: "int" },
};

/** The struct of every message type. */
export const TO_BROWSER: Readonly<Record<string, string>> = { layout: "Layout", frame: "Frame", history: "History", curves: "Curves", state: "State", reply: "Reply" };

/** The struct of every message type. */
export const TO_KERNEL: Readonly<Record<string, string>> = { hello: "Hello", ack: "Ack", select: "Select", perturb: "Perturb", adjust: "Adjust", remove: "Remove" };
