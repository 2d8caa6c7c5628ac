// The input's picture beside what is drawn of it, and how much of the picture shows through that.
import type { Signal } from "@preact/signals";
import type { Pictures } from "../kernel/protocol";
import { argumentName } from "./pictures";
import { Thumbnail } from "./Thumbnail";

const HEIGHT = 112;

interface Props {
  pictures: Pictures;
  example: number;
  /** The place that is looked at: top, bottom, left and right, as shares. */
  mark: readonly [number, number, number, number] | null;
  /** How much of the picture shows through, from 0 to 1. */
  share: Signal<number>;
}

export function InputPicture({ pictures, example, mark, share }: Props) {
  const height = Math.min(HEIGHT, Math.floor((HEIGHT * pictures.rows) / pictures.columns));
  return (
    <div class="nni-beside-input">
      <Thumbnail pictures={pictures} example={example} height={height} testid="nni-values-thumbnail" mark={mark} />
      <span>
        {argumentName(pictures)}, example {example}
      </span>
      <label>
        laid over it
        <OpacitySlider share={share} />
      </label>
    </div>
  );
}

/** The slider of how much of the picture shows through. */
export function OpacitySlider({ share }: { share: Signal<number> }) {
  return (
    <input
      type="range"
      min={0}
      max={1}
      step={0.05}
      value={share.value}
      aria-label="How much of the picture shows through"
      data-testid="nni-values-share"
      onInput={(event) => (share.value = Number(event.currentTarget.value))}
    />
  );
}
