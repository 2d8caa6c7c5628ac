// How far each step moves the parameters of the selected site, or of those inside it the ones that moved
// most: the norm of the update divided by that of the weight, over the steps, one line a parameter, on a
// logarithmic axis with the usual range shaded.
// Invariants: a ratio of 0 and one that is unknown have no place on the axis, and the title says both.
import { useCallback, useState } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import { paintMarks, stepPointer, stepX, type StepAxis } from "../charts/history";
import { lastAtMost } from "../kernel/bisect";
import type { UpdatesData } from "../kernel/decode";
import type { Site } from "../kernel/protocol";
import type { Store } from "../store";
import { NOT_MEASURED, percent, tick } from "../ui/format";

/** The ratios with which most networks learn. */
const USUAL_RATIOS = [3e-4, 3e-3] as const;
const DASHES: readonly (readonly number[])[] = [[], [4, 3], [1, 3], [8, 3, 2, 3], [8, 3]];
const GUTTER = 34;

interface Props {
  store: Store;
  site: Site;
  index: number;
  steps: StepAxis;
  hold: (step: number) => void;
}

export function UpdateRatio({ store, site, index, steps, hold }: Props) {
  const updates = store.updates.value;
  const [at, point] = useState<number | null>(null);
  if (!updates || updates.header.site !== index || !updates.ratios.some((one) => one.some((ratio) => !Number.isNaN(ratio)))) return null;
  const shown = at ?? steps.shown ?? steps.newest;
  const place = Math.max(lastAtMost(updates.steps.length, (i) => updates.steps[i]!, shown), 0);
  const figures = updates.header.parameters.map((path, i) => `${relativePath(path, site.key)} ${ratioText(updates.ratios[i]![place] ?? NaN)}${roundingText(updates.lost[i]![place])}`);
  return (
    <figure class="nni-ratio" data-testid="nni-ratio">
      <h4 class="nni-q-weight" title={`The norm of the change that a step makes, divided by the norm of the weights${updates.header.inside ? ", where it is largest inside this module" : ""}`}>
        <span class="nni-card-title">update ÷ weight{updates.header.inside && " inside"}</span>
        <span class="nni-card-figure">
          {at === null && updates.steps[place] === steps.shown ? "" : `step ${updates.steps[place] ?? ""} · `}
          usual: {tick(USUAL_RATIOS[0])} … {tick(USUAL_RATIOS[1])}
        </span>
      </h4>
      <div class="nni-ratio-chart" {...stepPointer(steps, hold, point, GUTTER)}>
        <RatioLines updates={updates} steps={steps} label={`Update divided by weight over the steps: ${figures.join(" · ")}`} />
      </div>
      <p class="nni-key">
        {figures.map((figure, i) => (
          <span key={updates.header.parameters[i]} title={updates.header.parameters[i]}>
            <svg width="20" height="8" aria-hidden="true">
              <line x1="0" x2="20" y1="4" y2="4" stroke="var(--nni-weight)" stroke-width="2" stroke-dasharray={DASHES[i % DASHES.length]!.join(" ")} />
            </svg>{" "}
            {figure}
          </span>
        ))}
      </p>
    </figure>
  );
}

/** The name of a parameter as it is seen from a module: "0/conv/kernel" of "blocks". */
function relativePath(path: string, site: string): string {
  return site && path.startsWith(`${site}/`) ? path.slice(site.length + 1) : path;
}

function ratioText(ratio: number): string {
  return Number.isNaN(ratio) ? NOT_MEASURED : tick(ratio);
}

/** How much of an update the parameter's dtype rounds to nothing. */
function roundingText(lost: number | undefined): string {
  return lost! > 0 ? `, ${percent(lost)} of it lost in rounding` : "";
}

/** The whole decades that hold all ratios and the usual range. */
export function decadeRange(ratios: readonly Float64Array[]): [low: number, high: number] {
  let [low, high] = [Math.log10(USUAL_RATIOS[0]), Math.log10(USUAL_RATIOS[1])];
  for (const one of ratios)
    for (const ratio of one) {
      if (!(ratio > 0) || !Number.isFinite(ratio)) continue;
      low = Math.min(low, Math.log10(ratio));
      high = Math.max(high, Math.log10(ratio));
    }
  return [Math.floor(low), Math.ceil(high)];
}

function RatioLines({ updates, steps, label }: { updates: UpdatesData; steps: StepAxis; label: string }) {
  const paint = useCallback(
    (area: Area) => {
      const { context, palette, height } = area;
      const [low, high] = decadeRange(updates.ratios);
      const y = (ratio: number): number => 6 + ((high - Math.log10(ratio)) / (high - low)) * (height - 12);
      const every = Math.max(1, Math.ceil(((high - low) * 14) / (height - 12)));
      context.font = `11px ${getComputedStyle(context.canvas).fontFamily}`;
      context.textBaseline = "middle";
      for (let power = low; power <= high; power += every) {
        context.fillStyle = palette.line;
        context.fillRect(GUTTER, Math.round(y(10 ** power)), area.width - GUTTER, 1);
        context.fillStyle = palette["text-faint"];
        context.fillText(`1e${power}`.replace("-", "−"), 0, y(10 ** power));
      }
      context.globalAlpha = 0.18;
      context.fillStyle = palette.weight;
      context.fillRect(GUTTER, y(USUAL_RATIOS[1]), area.width - GUTTER, y(USUAL_RATIOS[0]) - y(USUAL_RATIOS[1]));
      context.globalAlpha = 1;
      context.save();
      context.translate(GUTTER, 0);
      const inner = { ...area, width: area.width - GUTTER };
      context.strokeStyle = palette.weight;
      context.lineWidth = 1.5;
      updates.ratios.forEach((ratios, i) => {
        context.setLineDash([...DASHES[i % DASHES.length]!]);
        context.beginPath();
        let pen = false;
        ratios.forEach((ratio, k) => {
          const has = ratio > 0 && Number.isFinite(ratio);
          if (has) context[pen ? "lineTo" : "moveTo"](stepX(steps, inner.width, updates.steps[k]!), y(ratio));
          if (has && !pen && !(ratios[k + 1]! > 0)) context.lineTo(stepX(steps, inner.width, updates.steps[k]!) + 2, y(ratio));
          pen = has;
        });
        context.stroke();
      });
      context.setLineDash([]);
      paintMarks(inner, steps, []);
      context.restore();
    },
    [updates, steps],
  );
  return <Canvas label={label} paint={paint} />;
}
