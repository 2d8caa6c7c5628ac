// The `data-testid`s: what browser tests hold on to. `data-value` always has every digit.
//
// nni-root                          one view                       nni-banner     not connected, closed
// nni-step [value]                  the step on screen             nni-progress [value, data-state]
// nni-pause                         hold the step / follow         nni-cost       what inspection costs,
//                                                                  in it nni-compilations [value]
// nni-training-perturbed            only there while it is so      nni-notice [data-level]
// nni-search                        search box of the tree         nni-tree       its rows' scroller
// nni-row [data-site]               one row (only rows in view)    nni-nan, nni-badge-perturbed  in a row
// nni-detail, nni-selected [value]  detail and the path it shows   nni-copy       copies that path
// nni-stat-<quantity>-<statistic> [value]                          quantity: output, gradient
// nni-hist-<quantity>, nni-hist-count-<quantity> [value: values binned], nni-axis
// nni-over-<quantity>               over the steps                 nni-over-kind  bands or heatmap
// nni-perturb-kind (select), nni-perturb-at [value], nni-add-strength (slider), nni-add-strength-number,
// nni-perturb-add                   add one to the selected site
// nni-listening [value]             how changes reach the loop     nni-compiling [value: programs]
// nni-switch-all                    all off, or all on
// nni-perturbation [data-id, data-site]                            with, inside it: nni-switch,
//                                   nni-expression [value], nni-strength (slider), nni-strength-number,
//                                   nni-units, nni-pending, nni-row-compiling, nni-remove
// nni-effect, nni-effect-<metric>-clean|perturbed [value], nni-output-change [value], nni-kl [value],
// nni-top1 [value], nni-no-effect   nni-downstream [data-site, value]  a site that moved
// nni-metric-<name> [value: the last one]                          nni-error      a view's own failure

export const ids = {
  root: "nni-root",
  banner: "nni-banner",
  step: "nni-step",
  progress: "nni-progress",
  pause: "nni-pause",
  cost: "nni-cost",
  compilations: "nni-compilations",
  trainingPerturbed: "nni-training-perturbed",
  notice: "nni-notice",
  search: "nni-search",
  tree: "nni-tree",
  row: "nni-row",
  nan: "nni-nan",
  badgePerturbed: "nni-badge-perturbed",
  detail: "nni-detail",
  selected: "nni-selected",
  copy: "nni-copy",
  stat: (quantity: string, statistic: string) => `nni-stat-${quantity}-${statistic}`,
  hist: (quantity: string) => `nni-hist-${quantity}`,
  histCount: (quantity: string) => `nni-hist-count-${quantity}`,
  axis: "nni-axis",
  over: (quantity: string) => `nni-over-${quantity}`,
  overKind: "nni-over-kind",
  perturbKind: "nni-perturb-kind",
  perturbAt: "nni-perturb-at",
  addStrength: "nni-add-strength",
  addStrengthNumber: "nni-add-strength-number",
  perturbAdd: "nni-perturb-add",
  listening: "nni-listening",
  compiling: "nni-compiling",
  switchAll: "nni-switch-all",
  perturbation: "nni-perturbation",
  switch: "nni-switch",
  expression: "nni-expression",
  units: "nni-units",
  rowCompiling: "nni-row-compiling",
  strength: "nni-strength",
  strengthNumber: "nni-strength-number",
  remove: "nni-remove",
  pending: "nni-pending",
  effect: "nni-effect",
  effectValue: (metric: string, which: "clean" | "perturbed") => `nni-effect-${metric}-${which}`,
  outputChange: "nni-output-change",
  kl: "nni-kl",
  top1: "nni-top1",
  downstream: "nni-downstream",
  noEffect: "nni-no-effect",
  metric: (name: string) => `nni-metric-${name}`,
  error: "nni-error",
} as const;
