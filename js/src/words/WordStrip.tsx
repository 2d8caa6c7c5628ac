// A strip of text, each word coloured by its value. Invariants: a word is one text node and never
// markup, isolated from the direction of its neighbours; pointing at a word renders nothing again; the
// beginning of a long text is there at once, and most of the rest before one scrolls there.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { areWholeWords, visibleText } from "../inputs/state";
import { memo } from "../ui/memo";
import { dark } from "../ui/theme";
import type { ColourRange } from "../values/cells";
import { colours, css, NOT_FINITE, shade } from "../charts/colour";

/** How many words are added at a time. */
const CHUNK_WORDS = 128;
/** Up to so many are added when the browser is idle, for adding makes a frame late; more would make other colours late. */
const IDLE_WORDS = 4096;

interface Props {
  words: readonly string[];
  values: Float64Array | null;
  range: ColourRange;
  at: number | null;
  point: (at: number | null) => void;
  label: string;
}

export function WordStrip({ words, values, range, at, point, label }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const keyed = useRef(false);
  const [shown, setShown] = useState(CHUNK_WORDS);
  const chunks = Math.ceil(Math.min(shown, words.length) / CHUNK_WORDS);
  const night = dark.value;
  const apart = useMemo(() => areWholeWords(words), [words]);

  const more = (): void => {
    const { scrollTop, clientHeight, scrollHeight } = box.current!;
    if (scrollTop + 2 * clientHeight > scrollHeight - clientHeight) setShown((n) => (n < words.length ? n + CHUNK_WORDS : n));
  };
  useEffect(more, [shown, words]);
  useEffect(() => {
    if (shown >= Math.min(words.length, IDLE_WORDS)) return;
    return whenIdle(() => setShown((n) => n + CHUNK_WORDS));
  }, [shown, words]);
  useLayoutEffect(() => {
    const word = at === null ? null : box.current!.querySelector<HTMLElement>(`[data-at="${at}"]`);
    word?.setAttribute("data-pointed", "");
    return () => word?.removeAttribute("data-pointed");
  });

  const under = (event: Event): number | null => {
    const word = event.target instanceof Element ? event.target.closest("[data-at]") : null;
    return word ? Number(word.getAttribute("data-at")) : null;
  };
  const key = (event: KeyboardEvent): void => {
    const here = at ?? -1;
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: words.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(Math.max(to, 0), words.length - 1);
    if (next >= shown) setShown(next + CHUNK_WORDS);
    keyed.current = true;
    point(next);
    requestAnimationFrame(() => box.current?.querySelector(`[data-at="${next}"]`)?.scrollIntoView({ block: "nearest" }));
  };

  return (
    <div
      ref={box}
      class="nni-words"
      data-apart={apart ? "" : undefined}
      role="application"
      tabIndex={0}
      aria-label={label}
      data-testid="nni-words"
      data-value={words.length}
      onPointerMove={(event) => {
        // not pointerover: a browser sends that also when the page moves under a pointer that rests, and
        // the word that came to lie there would take the place of the keys
        const at = under(event);
        if (at !== null) keyed.current = false;
        if (!keyed.current) point(at); // the place of the keys stays while the pointer is between words
      }}
      onPointerLeave={() => !keyed.current && point(null)}
      onPointerDown={(event) => point(under(event))}
      onKeyDown={key}
      onScroll={more}
    >
      {Array.from({ length: chunks }, (_, i) => (
        <WordChunk key={i} from={i * CHUNK_WORDS} words={words} values={values} range={range} night={night} />
      ))}
    </div>
  );
}

/** Calls between frames, unless what is returned is called before; a browser that cannot say when calls soon. */
function whenIdle(act: () => void): () => void {
  if (typeof requestIdleCallback === "undefined") {
    const timer = setTimeout(act);
    return () => clearTimeout(timer);
  }
  const number = requestIdleCallback(act);
  return () => cancelIdleCallback(number);
}

interface ChunkProps {
  from: number;
  words: readonly string[];
  values: Float64Array | null;
  range: ColourRange;
  night: boolean;
}

const WordChunk = memo(function Chunk({ from, words, values, range, night }: ChunkProps) {
  const table = colours(range, night);
  return (
    <>
      {words.slice(from, from + CHUNK_WORDS).flatMap((word, i) => {
        const at = from + i;
        const style = values && at < values.length ? wordStyle(values[at]!, range, table) : undefined;
        const text = (
          <bdi key={at} class="nni-word" data-at={at} data-value={word} style={style}>
            {visibleText(word)}
          </bdi>
        );
        return word.endsWith("\n") ? [text, <br key={`${at}n`} />] : [text];
      })}
    </>
  );
});

/** The colours of a word: its value's behind it, and black or white, whichever is read better. */
export function wordStyle(value: number, range: ColourRange, table: Uint8ClampedArray): string {
  const at = shade(value, range) * 3;
  const [r, g, b] = Number.isFinite(value) ? [table[at]!, table[at + 1]!, table[at + 2]!] : NOT_FINITE;
  const light = 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2;
  return `background:${css([r, g, b])};color:${light > 0.18 ? "#000" : "#fff"}`;
}
