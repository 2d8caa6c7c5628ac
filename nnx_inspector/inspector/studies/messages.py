"""What the panels show of a lens, of a logit's parts, of an attribution and of a unit's examples.

Each function takes the whole result and returns the message for one example, position or unit.
Invariant: each figure is one of the result's, or a sum over blocks of stated size. Knows no model,
and imports no jax: the results are only read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nnx_inspector.screen import protocol
from nnx_inspector.typing import Value

if TYPE_CHECKING:
    from nnx_inspector.lenses.attribution import Attribution
    from nnx_inspector.lenses.examples import TopExamples
    from nnx_inspector.lenses.lens import Lens
    from nnx_inspector.lenses.logits import LogitAttribution

Words = Callable[[int], list[str]]
"""An example's number -> the words of its positions; [] where they are not known."""
Name = Callable[[int], str]
"""A token's or class's number -> its text."""

MOST_POSITIONS = 128
"""The most positions of a lens in a message."""
MOST_PIXELS = 96
"""The most rows and columns of an attribution's picture in a message."""
MOST_TOKENS = 4096
MOST_WORDS_NEAR = 8
"""How many words are shown on each side of an example's place."""


def lens_message(
    found: Lens, request: protocol.Study, source: str, words: Words, name: Name
) -> protocol.Lens:
    at = _example_index(found.answer, request.example)
    answer = np.atleast_1d(found.answer[at])
    most = min(answer.size, MOST_POSITIONS)

    def of(x: Iterable[np.ndarray], *tail: int) -> np.ndarray:
        """[layers, positions, ...] of the example."""
        return np.asarray([one[at] for one in x]).reshape(len(found.sites), answer.size, *tail)

    tokens, likely = (of(x, -1) for x in (found.tokens, found.probabilities))
    probability, rank = of(found.answer_probability), of(found.answer_rank)
    texts = words(request.example)
    return protocol.Lens(
        running=False,
        error="",
        source=source,
        example=request.example,
        unembed=found.unembed,
        norm=found.norm,
        words=tuple(texts[:most]) if len(texts) == answer.size else (),
        answers=tuple(name(int(i)) for i in answer[:most]),
        tokens=tuple(int(i) for i in answer[:most]),
        gap=protocol.finite(found.gap),
        rows=tuple(
            protocol.LensRow(
                site=site,
                cells=tuple(
                    protocol.LensCell(
                        words=tuple(name(int(i)) for i in tokens[row, p]),
                        probabilities=tuple(protocol.finite(x) for x in likely[row, p]),
                        probability=protocol.finite(probability[row, p]),
                        rank=int(rank[row, p]),
                    )
                    for p in range(most)
                ),
            )
            for row, site in enumerate(found.sites)
        ),
        more=answer.size - most,
    )


def logits_message(
    found: LogitAttribution, request: protocol.Study, source: str, words: Words, name: Name
) -> protocol.Logits:
    at = _example_index(found.token, request.example)
    tokens = np.atleast_1d(found.token[at])
    position = _require_index(request.position, tokens.size, "position")
    parts = [np.atleast_1d(one[at])[position] for one in found.contributions]
    return protocol.Logits(
        running=False,
        error="",
        source=source,
        example=request.example,
        position=position,
        token=int(tokens[position]),
        word=name(int(tokens[position])),
        logit=protocol.finite(np.atleast_1d(found.logit[at])[position]),
        bars=tuple(
            protocol.LogitBar(site=site, value=protocol.finite(x))
            for site, x in zip(found.sites, parts, strict=True)
        ),
    )


def attribution_message(
    found: Attribution, request: protocol.Study, source: str, words: Words, name: Name
) -> protocol.Attributed:
    batched = found.output.ndim > 0
    example = _require_index(request.example, len(found.output), "example") if batched else 0
    scores: Value = np.atleast_1d(found.scores[example] if batched else found.scores)
    if scores.ndim > 2:  # [rows, columns, ...]: the channels of a pixel count together
        scores = scores.reshape(*scores.shape[:2], -1).sum(-1)
    blocks = 1
    if scores.ndim == 2:
        blocks = max(1, math.ceil(max(scores.shape) / MOST_PIXELS))
        for axis in (0, 1):
            scores = np.add.reduceat(scores, np.arange(0, scores.shape[axis], blocks), axis)
    size, scores = len(scores), scores[:MOST_TOKENS]
    output: Value = found.output
    baseline = found.baseline_output
    apart: Value = None if baseline is None else output - baseline
    if batched:
        output, apart = output[example], None if apart is None else apart[example]
    texts = words(request.example) if scores.ndim == 1 else []
    return protocol.Attributed(
        running=False,
        error="",
        source=source,
        example=request.example,
        of=found.of,
        method=found.method,
        word=_word_of(found, request, example, name),
        output=protocol.finite(output),
        difference=protocol.finite(apart),
        shape=tuple(scores.shape),
        blocks=blocks,
        scores=tuple(protocol.finite(x) for x in scores.ravel()),
        words=tuple(texts[: len(scores)]) if len(texts) == size else (),
    )


def _word_of(found: Attribution, request: protocol.Study, example: int, name: Name) -> str:
    """The word or class whose logit is attributed; "" for an output that a function chose."""
    if found.classes is None:
        return "" if request.token is None else name(request.token)
    return name(int(found.classes[example] if found.classes.ndim else found.classes))


def examples_message(
    found: TopExamples,
    request: protocol.Study,
    source: str,
    words: Words,
    name: Name,
    *,
    placed: bool,
) -> protocol.UnitExamples:
    """The examples of a unit; `placed`: the places of the site are those of the words."""
    unit = _require_index(request.unit, found.units, "unit")
    rows: list[protocol.ExciteRow] = []
    for which in ("most", "least", "random"):
        for rank, (example, place, value) in enumerate(getattr(found, which).rows(unit)):
            if example < 0:
                continue
            spot = tuple(map(int, place))
            text = words(example)
            one_length = len(text) in found.shape or found.notes  # batches of several have notes
            near, at = _words_near(text, spot if one_length and placed else ())
            rows.append(
                protocol.ExciteRow(
                    which=which,
                    rank=rank + 1,
                    example=example,
                    place=spot,
                    value=protocol.finite(value),
                    words=near,
                    at=at,
                )
            )
    return protocol.UnitExamples(
        running=False,
        stopped=found.stopped,
        done=0,
        total=0,
        error="",
        source=source,
        site=found.site,
        axis=found.axis,
        unit=unit,
        units=found.units,
        count=found.count,
        nan=int(found.nan[unit]),
        constant=bool(found.constant[unit]),
        notes=found.notes,
        extent=found.shape,
        rows=tuple(rows),
    )


def _words_near(words: Sequence[str], place: Sequence[int]) -> tuple[tuple[str, ...], int]:
    """The words near a place, and the index of its word; all of them, cut off, if it has none."""
    if len(place) != 1 or not 0 <= place[0] < len(words):
        return tuple(words[: 2 * MOST_WORDS_NEAR]), -1
    first = max(0, place[0] - MOST_WORDS_NEAR)
    return tuple(words[first : place[0] + MOST_WORDS_NEAR + 1]), place[0] - first


def _example_index(x: np.ndarray, example: int) -> tuple[int | slice, ...]:
    """The index of one example in an array of positions, whose first axis is the examples."""
    if x.ndim == 0:
        return ()
    return (_require_index(example, len(x), "example"), *[slice(None)] * min(x.ndim - 1, 1),
            *[0] * (x.ndim - 2))  # fmt: skip


def _require_index(number: int, count: int, what: str) -> int:
    if not -count <= number < count:
        raise IndexError(f"There are {count} {what}s: there is no {what} {number}.")
    return number % count
