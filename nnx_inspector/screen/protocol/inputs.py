"""Messages to the browser with the examined batch, as people read it."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.headers import Struct, ToBrowser


class Example(Struct):
    """One example of the batch. `words` are the texts of its positions (() without a decoder, and
    cut off after MOST_WORDS of all examples); `label` and `prediction` are names of classes, ""
    if unknown.
    """

    words: tuple[str, ...]
    label: str
    prediction: str


class Pictures(Struct):
    """Thumbnails of the first `count` examples. `path` names the argument with the pictures, which
    have `rows` and `columns` of pixels. `pixels` is uint8 [count, height, width, channels] in
    base64, with 1 channel (grey) or 3. `shown` says in words how numbers became bytes.
    """

    path: str
    count: int
    rows: int
    columns: int
    height: int
    width: int
    channels: int
    shown: str
    pixels: str


class Inputs(ToBrowser, type="inputs"):
    """The batch of the pass on screen. Buffer: none. `batch` counts its examples, of which
    `examples` are the first. `tokens` is the path of the argument that holds the ids, "" if there
    is none, and `positions` the number of ids of each example. `pictures` are None if the batch has
    none. `problem` says what could not be read; "" if nothing. `number` tells batches apart; all
    panels look at this one. A new view looks at `example`. `apart` are the sites without words:
    their positions may be those of another argument of this length, `"encoder input"` for what a
    site receives; ("*",) are all of them. `kind` is whether it is the batch of a forward pass or of
    a step, and `other` the kind of the other batch that can be looked at, "" if there is none.
    """

    number: int = -1
    example: int = 0
    batch: int
    tokens: str
    positions: int
    examples: tuple[Example, ...]
    problem: str
    pictures: Pictures | None = None
    apart: tuple[str, ...] = ()
    kind: Literal["run", "step"] = "run"
    other: Literal["run", "step", ""] = ""


class Positions(ToBrowser, type="positions"):
    """The figures of a site at each position of an example, in answer to `ShowPositions`. Buffer:
    float64 [len(figures), positions]. `figures` are those of POSITION_STATS that there are;
    `units` is the number of units at each position. `along` is the number of the axis of the
    positions, None if that is not known: there are no figures, and `source` says so. `axes` has the
    names of those that could be it, "" for the others. Otherwise `source` names the pass in words.
    """

    id: int
    site: str
    example: int
    unit: int
    axis: int | None
    along: int | None
    axes: tuple[str, ...]
    units: int
    positions: int
    figures: tuple[str, ...]
    source: str
