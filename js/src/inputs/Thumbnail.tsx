// One thumbnail on a canvas, as high as asked for or as its place is; nothing where there is none.
import { useCallback } from "preact/hooks";
import { Canvas, type Area } from "../charts/Canvas";
import type { Pictures } from "../kernel/protocol";
import { thumbnail } from "./pictures";

interface Props {
  pictures: Pictures | null | undefined;
  example: number;
  /** By default it fills its place. */
  height?: number;
  testid?: string;
  /** The place that is looked at, as shares of height and width: from, to. */
  mark?: readonly [top: number, bottom: number, left: number, right: number] | null;
}

export function Thumbnail({ pictures, example, height, testid, mark }: Props) {
  const paint = useCallback(
    ({ context, width, height, palette }: Area) => {
      const picture = thumbnail(pictures, example);
      if (!picture) return;
      context.imageSmoothingEnabled = picture.width > width;
      context.drawImage(picture, 0, 0, width, height);
      if (!mark) return;
      const [top, bottom, left, right] = mark;
      const [w, h] = [Math.max((right - left) * width, 3), Math.max((bottom - top) * height, 3)];
      for (const [color, line] of [[palette.background, 3], [palette.text, 1.25]] as const) {
        context.strokeStyle = color;
        context.lineWidth = line;
        context.strokeRect(((left + right) * width - w) / 2, ((top + bottom) * height - h) / 2, w, h);
      }
    },
    [pictures, example, mark && String(mark)],
  );
  if (!pictures || example < 0 || example >= pictures.count) return null;
  if (height === undefined) return <Canvas label="" testid={testid} paint={paint} />;
  const width = Math.min(Math.max(Math.round((height * pictures.columns) / pictures.rows), 8), 4 * height);
  return <Canvas height={height} width={width} label="" testid={testid} paint={paint} />;
}
