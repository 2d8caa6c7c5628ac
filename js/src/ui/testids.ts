// The `data-testid`s, which browser tests rely on. `data-value` always has every digit.
//
// nni-root                          one view                       nni-banner     not connected, closed
// nni-step [value]                  the step on screen             nni-progress [value, data-state]
// nni-pause                         hold the step / follow         nni-menu       in it nni-cost, what inspection
//                                                                  costs, with nni-compilations [value], nni-why, and nni-listening
// nni-open-beside                   docks the view               nni-away  in its cell meanwhile
// nni-training-perturbed            only while training is         nni-notice [data-level]
// nni-time [data-state]             time: follow, held; in it: nni-play, nni-time-menu, nni-speed,
//   nni-step-back, nni-step-forward, nni-scrub [value: the pass's number], nni-pin,
//   nni-behind-<quantity>: its outline in a histogram; nni-stat-pinned-<quantity>-<statistic> [value]
//   nni-pinned [value]              the step of the one it is compared with
// nni-tree-menu, in it nni-column-<id>, nni-filter-<id> (checkboxes),
//   nni-filter-below|above (numbers), nni-clear, nni-matches [value], nni-sort-<id> (a head),
//   nni-cell-<id> [value] in a row, nni-tip [data-site]            the foot's figures of the row under the pointer
// nni-search                        search box of the tree         nni-tree       the grid of its rows
// nni-row [data-site]               one row (only rows in view)    nni-nan, nni-badge-perturbed  in a row
// nni-group-<group>, nni-tab-<panel>  tabs of the detail; nni-split, nni-split-time, nni-site-menu
//                                   nni-more       the menu of a panel
// nni-findings [value: how many]    button that lists the findings: nni-finding [data-rule, data-site]
// nni-flow [value: its site]        the graph                      nni-flow-crumb [data-site]
// nni-flow-node [data-site, data-role, value: the figure that colours it]
// nni-flow-figure (select), nni-flow-legend, nni-flow-low|high [value], nni-flow-in|out|fit (zoom),
// nni-flow-absent [data-site]       a module that is not called    nni-flow-list  where it cannot be laid out
// nni-detail, nni-selected [value]  detail and the path it shows   nni-copy       copies that path
// nni-operations [aria-pressed]     shows the operations within the selected call
// nni-stat-<quantity>-<statistic> [value]                          quantity: output, gradient
// nni-hist-<quantity>, nni-hist-count-<quantity> [value: values binned], nni-axis
// nni-over-<quantity>               over the steps                 nni-over-kind  bands or heatmap
// nni-ratio                         update divided by weight over the steps
// nni-figures                       the table of figures; a row of a parameter: nni-parameter [data-site: its path],
//   in it nni-parameter-<statistic> [value]; its card: nni-hist-weight, chosen by nni-parameter-choice (select)
// nni-strip [value: units]          the strip of units             nni-unit-told [value: the unit under the pointer]
// nni-unit-figure                   mean, std or zeros             nni-dead-units [value], nni-units-off [value]
// nni-edit-mask                     a click switches units         nni-excerpt [value: the line], nni-documentation
// nni-sown [data-site]              a value that the module sows
// nni-sweep [value: done, data-state: running, done, stopped, failed], nni-sweep-kind, nni-sweep-sites,
// nni-sweep-start, nni-sweep-stop, nni-sweep-measure, nni-sweep-row [data-site, value]
// nni-study [data-state: none, running, done, failed], nni-study-start, nni-study-stop, nni-study-problem,
// nni-lens [value: layers], nni-lens-cell [value: the word, data-rank], nni-logit-bar [data-site, value],
// nni-attribution [value: places], nni-excited [data-site: most, least or random, value]
// nni-compare-state [data-state: busy, now, before], nni-compare-again, nni-compare-other (buttons),
// nni-cast [data-site], its shares [value]; nni-cast-dtype, nni-cast-scale (select)   the panel "Precision"
// nni-weight-row [data-site: the parameter, value: relative change, data-distance]
// nni-compare-quantity, nni-compare-by-<measure>, nni-compare-row [data-site, value, data-distance]
// nni-python [value]                the last click as Python; nni-snippet [value] of one part;
//                                   nni-copy-python copies it      nni-add-here   opens the form for a row
// nni-perturb (button), in its menu nni-perturb-at [value], nni-perturb-<kind> (adds one to the selected
// site), nni-add-strength-<kind> (number)                          nni-perturb-bar  the bar of all of them
// nni-listening [value]             how changes reach the loop     nni-compiling [value: programs]
// nni-switch-all                    all off, or all on
// nni-perturbation [data-id, data-site]                            with, inside it: nni-switch,
//                                   nni-expression [value], nni-amount (opens nni-strength, a slider, and nni-strength-number),
//                                   nni-units, nni-pending, nni-row-compiling, nni-not-acting, nni-remove,
//                                   nni-waits (a change without an answer)
// nni-adding [data-site]            a perturbation that was asked for and has had no answer, with nni-waits
// nni-effect-more                   opens nni-effect-full, the table, with nni-switch-all and nni-alone
// nni-effect, nni-effect-<metric>-clean|perturbed [value], nni-output-change [value], nni-kl [value],
// nni-top1 [value], nni-no-effect   nni-downstream [data-site, value]  a site that moved
// nni-values-part|clean|view|component|range|token [value], nni-values-array (select), nni-values-read,
// nni-values-source, nni-values-problem, nni-values-left-out, nni-values-axis-rows|columns|tiles (select),
// nni-values-index-<axis> (number), nni-picture, nni-value-exact [value, data-place], nni-value-block, nni-value-word,
// nni-values-looks                                                  what a query looks at, in it nni-attention-key
//   [value: the key]; nni-attention-head-<n> chooses a head, nni-zero-head perturbs it         nni-batch (select)  the batch of all panels
// nni-legend-low|high [value], nni-values-expression [value]       the panel "Values"
// nni-words [value: how many], in it the words [data-at, value: the text as given]; nni-words-figure [value],
// nni-words-unit (number), nni-words-axis [value], nni-word-told [value: the position], nni-words-problem,
// nni-example-said, nni-inputs-problem, nni-words-python           the panel "Words"
// nni-values-thumbnail, nni-values-share (slider)                   the input's picture beside and under it
// nni-examples [value: the example], nni-example-<n>               the examples of the batch
// nni-nnx [value: the site]         a module as NNX sees it; in it nni-nnx-node [data-path],
// nni-nnx-variable [data-path, data-value: relative change], nni-nnx-kind [data-kind],
// nni-nnx-mode [data-module, data-name], nni-nnx-since [value: the step compared with]
// nni-metric-<name> [value: the last one], in it nni-metric-log-<name>: its axis, and nni-metric-gaps-<name>: how many
// values are not finite
// nni-error                         a view's own failure

export const ids = {
  root: "nni-root",
  banner: "nni-banner",
  every: "nni-every",
  measureNext: "nni-measure-next",
  step: "nni-step",
  progress: "nni-progress",
  waiting: "nni-waiting",
  pause: "nni-pause",
  openBeside: "nni-open-beside",
  away: "nni-away",
  menu: "nni-menu",
  why: "nni-why",
  timeMenu: "nni-time-menu",
  cost: "nni-cost",
  compilations: "nni-compilations",
  compiled: "nni-compiled",
  trainingPerturbed: "nni-training-perturbed",
  notice: "nni-notice",
  time: "nni-time",
  play: "nni-play",
  speed: "nni-speed",
  stepBack: "nni-step-back",
  stepForward: "nni-step-forward",
  scrub: "nni-scrub",
  pin: "nni-pin",
  pinned: "nni-pinned",
  treeMenu: "nni-tree-menu",
  column: (id: string) => `nni-column-${id}`,
  filter: (id: string) => `nni-filter-${id}`,
  bound: (id: string) => `nni-filter-${id}-number`,
  clear: "nni-clear",
  matches: "nni-matches",
  sort: (id: string) => `nni-sort-${id}`,
  cell: (id: string) => `nni-cell-${id}`,
  tip: "nni-tip",
  search: "nni-search",
  tree: "nni-tree",
  row: "nni-row",
  nan: "nni-nan",
  badgePerturbed: "nni-badge-perturbed",
  detail: "nni-detail",
  selected: "nni-selected",
  copy: "nni-copy",
  operations: "nni-operations",
  flow: "nni-flow",
  flowCrumb: "nni-flow-crumb",
  flowNode: "nni-flow-node",
  flowFigure: "nni-flow-figure",
  flowLegend: "nni-flow-legend",
  flowEnd: (which: "low" | "high") => `nni-flow-${which}`,
  flowZoom: (which: "in" | "out" | "fit") => `nni-flow-${which}`,
  flowAbsent: "nni-flow-absent",
  flowList: "nni-flow-list",
  split: "nni-split",
  splitTime: "nni-split-time",
  siteMenu: "nni-site-menu",
  group: (group: string) => `nni-group-${group}`,
  tab: (panel: string) => `nni-tab-${panel}`,
  more: "nni-more",
  figures: "nni-figures",
  ratio: "nni-ratio",
  stat: (quantity: string, statistic: string) => `nni-stat-${quantity}-${statistic}`,
  hist: (quantity: string) => `nni-hist-${quantity}`,
  behind: (quantity: string) => `nni-behind-${quantity}`,
  histCount: (quantity: string) => `nni-hist-count-${quantity}`,
  axis: "nni-axis",
  over: (quantity: string) => `nni-over-${quantity}`,
  overKind: "nni-over-kind",
  parameter: "nni-parameter",
  parameterChoice: "nni-parameter-choice",
  parameterStat: (statistic: string) => `nni-parameter-${statistic}`,
  strip: "nni-strip",
  unitTold: "nni-unit-told",
  unitFigure: "nni-unit-figure",
  unitsAxis: "nni-units-axis",
  unitsOff: "nni-units-off",
  deadUnits: "nni-dead-units",
  editMask: "nni-edit-mask",
  excerpt: "nni-excerpt",
  documentation: "nni-documentation",
  sown: "nni-sown",
  findings: "nni-findings",
  finding: "nni-finding",
  sweep: "nni-sweep",
  sweepKind: "nni-sweep-kind",
  sweepSites: "nni-sweep-sites",
  sweepStart: "nni-sweep-start",
  sweepStop: "nni-sweep-stop",
  sweepMeasure: "nni-sweep-measure",
  sweepRow: "nni-sweep-row",
  compareState: "nni-compare-state",
  compareAgain: "nni-compare-again",
  compareOther: "nni-compare-other",
  compareQuantity: "nni-compare-quantity",
  compareBy: (measure: string) => `nni-compare-by-${measure}`,
  compareRow: "nni-compare-row",
  weightRow: "nni-weight-row",
  cast: "nni-cast",
  castDtype: "nni-cast-dtype",
  choice: "nni-choice",
  castScale: "nni-cast-scale",
  python: "nni-python",
  snippet: "nni-snippet",
  copyPython: "nni-copy-python",
  addHere: "nni-add-here",
  perturb: "nni-perturb",
  perturbKind: (kind: string) => `nni-perturb-${kind}`,
  perturbAt: "nni-perturb-at",
  addStrengthNumber: (kind: string) => `nni-add-strength-${kind}`,
  listening: "nni-listening",
  compiling: "nni-compiling",
  switchAll: "nni-switch-all",
  perturbBar: "nni-perturb-bar",
  perturbation: "nni-perturbation",
  amount: "nni-amount",
  switch: "nni-switch",
  expression: "nni-expression",
  units: "nni-units",
  rowCompiling: "nni-row-compiling",
  notActing: "nni-not-acting",
  alone: "nni-alone",
  strength: "nni-strength",
  strengthNumber: "nni-strength-number",
  remove: "nni-remove",
  pending: "nni-pending",
  waits: "nni-waits",
  adding: "nni-adding",
  effect: "nni-effect",
  effectFull: "nni-effect-full",
  effectMore: "nni-effect-more",
  effectValue: (metric: string, which: "clean" | "perturbed") => `nni-effect-${metric}-${which}`,
  outputChange: "nni-output-change",
  kl: "nni-kl",
  top1: "nni-top1",
  downstream: "nni-downstream",
  noEffect: "nni-no-effect",
  metric: (name: string) => `nni-metric-${name}`,
  metricLog: (name: string) => `nni-metric-log-${name}`,
  metricGaps: (name: string) => `nni-metric-gaps-${name}`,
  valuesPart: "nni-values-part",
  valuesClean: "nni-values-clean",
  valuesView: "nni-values-view",
  valuesComponent: "nni-values-component",
  valuesRange: "nni-values-range",
  valuesToken: "nni-values-token",
  valuesArray: "nni-values-array",
  valuesRead: "nni-values-read",
  valuesSource: "nni-values-source",
  valuesProblem: "nni-values-problem",
  valuesLeftOut: "nni-values-left-out",
  valuesAxis: (place: string) => `nni-values-axis-${place}`,
  valuesIndex: (axis: string) => `nni-values-index-${axis}`,
  valuesExpression: "nni-values-expression",
  picture: "nni-picture",
  valuesLooks: "nni-values-looks",
  valuesShare: "nni-values-share",
  valuesThumbnail: "nni-values-thumbnail",
  attentionHead: (head: number) => `nni-attention-head-${head}`,
  attentionKey: "nni-attention-key",
  zeroHead: "nni-zero-head",
  batch: "nni-batch",
  examples: "nni-examples",
  example: (number: number) => `nni-example-${number}`,
  valueExact: "nni-value-exact",
  valueBlock: "nni-value-block",
  valueWord: "nni-value-word",
  unitsScale: "nni-units-scale",
  exampleSaid: "nni-example-said",
  inputsProblem: "nni-inputs-problem",
  words: "nni-words",
  wordsFigure: "nni-words-figure",
  wordsUnit: "nni-words-unit",
  wordsAxis: "nni-words-axis",
  wordsProblem: "nni-words-problem",
  wordTold: "nni-word-told",
  wordsPython: "nni-words-python",
  study: "nni-study",
  studyStart: "nni-study-start",
  studyStop: "nni-study-stop",
  studyProblem: "nni-study-problem",
  studyToken: "nni-study-token",
  studyExample: "nni-study-example",
  lens: "nni-lens",
  lensCell: "nni-lens-cell",
  lensTold: "nni-lens-told",
  lensWhere: (which: string) => `nni-lens-${which}`,
  lensPython: "nni-lens-python",
  logitBar: "nni-logit-bar",
  attribution: "nni-attribution",
  attributionMethod: "nni-attribution-method",
  attributionPosition: "nni-attribution-position",
  attributionTold: "nni-attribution-told",
  attributionPython: "nni-attribution-python",
  examplesUnit: "nni-examples-unit",
  examplesAxis: "nni-examples-axis",
  examplesConstant: "nni-examples-constant",
  examplesPython: "nni-examples-python",
  excited: "nni-excited",
  legendLow: "nni-legend-low",
  legendHigh: "nni-legend-high",
  error: "nni-error",
  nnx: "nni-nnx",
  nnxNode: "nni-nnx-node",
  nnxVariable: "nni-nnx-variable",
  nnxKind: "nni-nnx-kind",
  nnxMode: "nni-nnx-mode",
  nnxSince: "nni-nnx-since",
} as const;
