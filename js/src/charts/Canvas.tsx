// A canvas as wide as its place and `height` high, painted by a function in CSS pixels.
// Invariant: it is repainted when the function, the size, the pixel ratio or the theme changes, and
// the painting never affects the layout: streaming data moves nothing on the page.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { paletteOf, repaint, type Palette } from "../ui/theme";

export interface Area {
  readonly context: CanvasRenderingContext2D;
  readonly width: number;
  readonly height: number;
  readonly palette: Palette;
}

interface Props {
  height: number;
  /** By default the width of the parent. */
  width?: number;
  /** "" if its surroundings describe it. */
  label: string;
  testid?: string;
  paint: (area: Area) => void;
}

export function Canvas({ height, width: fixed, label, testid, paint }: Props) {
  const ref = useRef<HTMLCanvasElement>(null);
  const [measured, setMeasured] = useState(0);
  const width = fixed ?? measured;
  const theme = repaint.value;

  useLayoutEffect(() => {
    if (fixed !== undefined) return;
    const parent = ref.current!.parentElement!;
    const measure = (): void => setMeasured(Math.floor(parent.clientWidth));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(parent);
    return () => observer.disconnect();
  }, [fixed]);

  useLayoutEffect(() => {
    const canvas = ref.current!;
    const context = canvas.getContext("2d");
    if (!context || width <= 0) return;
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

  const style = { width: fixed === undefined ? "100%" : `${fixed}px`, height: `${height}px` };
  const said = label ? { role: "img", "aria-label": label } as const : { "aria-hidden": true } as const;
  return <canvas ref={ref} class="nni-canvas" {...said} data-testid={testid} style={style} />;
}
