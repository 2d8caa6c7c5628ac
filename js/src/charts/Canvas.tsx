// A canvas as wide and as high as its place, or of given sizes, painted by a function in CSS pixels.
// Invariant: it is repainted when the function, the size, the pixel ratio or the theme changes, and
// the painting never affects the layout: streaming data moves nothing on the page.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { observeSize } from "../ui/observeSize";
import { paletteOf, repaint, type Palette } from "../ui/theme";

export interface Area {
  readonly context: CanvasRenderingContext2D;
  readonly width: number;
  readonly height: number;
  readonly palette: Palette;
}

interface Props {
  /** By default those of the parent, whose height must not depend on the canvas. */
  height?: number;
  width?: number;
  /** "" if its surroundings describe it. */
  label: string;
  testid?: string;
  paint: (area: Area) => void;
}

export function Canvas({ height: tall, width: wide, label, testid, paint }: Props) {
  const ref = useRef<HTMLCanvasElement>(null);
  const [measured, setMeasured] = useState<readonly [number, number]>([0, 0]);
  const [width, height] = [wide ?? measured[0], tall ?? measured[1]];
  const theme = repaint.value;

  useLayoutEffect(() => {
    if (wide !== undefined && tall !== undefined) return;
    const parent = ref.current!.parentElement!;
    const measure = (): void => {
      const [w, h] = [Math.floor(parent.clientWidth), tall === undefined ? Math.floor(parent.clientHeight) : 0];
      setMeasured((old) => (old[0] === w && old[1] === h ? old : [w, h]));
    };
    return observeSize(parent, measure);
  }, [wide, tall]);

  useLayoutEffect(() => {
    const canvas = ref.current!;
    const context = canvas.getContext("2d");
    if (!context || width <= 0 || height <= 0) return;
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    paint({ context, width, height, palette: paletteOf(canvas) });
  }, [paint, width, height, theme]);

  const style = { width: wide === undefined ? "100%" : `${wide}px`, height: `${height}px` };
  const said = label ? { role: "img", "aria-label": label } as const : { "aria-hidden": true } as const;
  return <canvas ref={ref} class="nni-canvas" {...said} data-testid={testid} style={style} />;
}
