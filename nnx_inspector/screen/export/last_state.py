"""The output that a saved notebook keeps of an inspector: its last state, and a screen over it.

Every notebook has the state as HTML (snapshot.py). In a trusted notebook a script beside it
replaces it by the screen, with as many passes as fit; hosts remove scripts from other notebooks.
Invariants: at most MOST_BYTES, whatever the model; it says what is left out; no text of a model
is markup in it. Knows no jax, no model and no widget.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from typing import Final

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.assets import asset
from nnx_inspector.screen.export.page import page_shell
from nnx_inspector.screen.export.replay import PageContent, deflated_text, pack_passes
from nnx_inspector.screen.export.snapshot import MOST_BYTES as MOST_PLAIN
from nnx_inspector.screen.export.snapshot import snapshot
from nnx_inspector.screen.frames import metrics_at

MOST_RECORDED: Final = 200_000
"""The most bytes of the recording in the notebook."""
MOST_BYTES: Final = MOST_PLAIN + MOST_RECORDED + 120_000
"""The most bytes of the whole output; the rest is the front end."""
MOST_PASSES, FEW_PASSES = 24, 6
"""The output has fewer than MOST_PASSES only if the details of all modules do not fit, and fewer
than FEW_PASSES only if those of one module do not fit."""
COLUMNS: Final = 12
POINTS: Final = 120
MOST_CELLS: Final = 3000
"""The most rows times passes, which bounds the time that making the output takes."""
MOST_SITES: Final = 60
"""The most modules whose histograms, histories, flow and code are kept."""
LEFT_OUT: Final = ("units", "nnx", "values", "compare")
"""Answers that need a pass or every array, which is too slow after each change."""
_LEFT_OUT_TEXT: Final = "Units, state and values are left out (insp.to_html keeps more)."
_TRIES: Final = 4

Stop = Callable[[], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastState:
    """The state of an inspector at one moment.

    Attributes:
        inspector: the id by which the live view finds the output, to hide it.
        state: the small state as if nothing ran.
        kept: the findings and a sweep.
        recording: the recording; its newest passes may be slightly newer than the rest.
        content_of: returns the rest of what the screen replays, or None if the inspector is gone.
    """

    inspector: str
    layout: protocol.Layout
    state: protocol.State
    kept: tuple[protocol.Message, ...]
    recording: Recording
    content_of: Callable[
        [protocol.Layout, protocol.State, tuple[protocol.Message, ...]], PageContent | None
    ]

    def key(self) -> object:
        """A key that is equal for two moments if the same would be saved."""
        passes = self.recording.passes
        newest = passes[-1] if passes else None
        return (
            self.layout,
            dataclasses.replace(self.state, seq=0, cost=None),  # type: ignore[arg-type]
            self.kept,
            (len(passes), newest and newest.number),
            {} if newest is None else metrics_at(self.recording, newest.step),
        )

    def html(self, stop: Stop = lambda: False) -> str | None:
        """The present output of a cell, or None if `stop` returned true."""
        saved = time.strftime("%Y-%m-%d %H:%M:%S")
        findings = next((one for one in self.kept if isinstance(one, protocol.Findings)), None)
        plain = snapshot(
            layout=self.layout,
            state=self.state,
            recording=self.recording,
            findings=() if findings is None else findings.findings,
            saved=saved,
        )
        packed = None
        if not stop() and self.recording.passes and len(self.layout.sites) * 2 <= MOST_CELLS:
            kept = tuple(map(_without_pictures, self.kept))
            content = self.content_of(self.layout, self.state, kept)
            if content is not None:
                note = f"Saved {saved}, with {{passes}}. {_LEFT_OUT_TEXT}"
                missing = tuple(dict.fromkeys((*content.missing, *LEFT_OUT)))
                content = dataclasses.replace(content, note=note, missing=missing)
                packed = fit_recording(self.recording, content, stop=stop)
        if stop():
            return None
        return _output(self.inspector, plain, packed)


def _without_pictures(message: protocol.Message) -> protocol.Message:
    """A message without pictures, which would leave no room for passes."""
    pictures = message.pictures if isinstance(message, protocol.Inputs) else None
    if pictures is not None and len(pictures.pixels) > MOST_RECORDED // 8:
        return dataclasses.replace(message, pictures=None)
    return message


def fit_recording(
    recording: Recording,
    content: PageContent,
    *,
    max_bytes: int = MOST_RECORDED,
    stop: Stop = lambda: False,
) -> str | None:
    """The recording that the screen replays, in base64, with as many passes and details as fit.

    None if not even two passes with the details of one module fit, or once `stop` returns true. The
    details of the first sites of `content` are kept first.
    """
    most, details = _first_guess(len(content.layout.sites), len(content.detailed), max_bytes)
    for _ in range(_TRIES):
        if stop():
            return None
        kept = with_details(content, details)
        text, _, shown = pack_passes(recording, kept, most, columns=COLUMNS, points=POINTS)
        over = len(text) / max_bytes
        if over <= 1:
            return text
        if details <= 1 and shown <= 2:
            return None
        most = max(2, int(shown / over))
        if shown <= FEW_PASSES or over > 2:
            details = max(1, int(details / over))
    return None


def _first_guess(rows: int, detailed: int, max_bytes: int) -> tuple[int, int]:
    """A first guess at how many passes fit, and the details of how many modules."""
    room = max(0, max_bytes - _FIXED - _ROW * rows) / 2  # for activations and gradients
    passes = min(MOST_PASSES, max(2, MOST_CELLS // max(1, rows)))
    details = min(detailed, int(room / (_COLUMN * COLUMNS + _PASS * min(FEW_PASSES, passes))))
    details = max(1, details)
    return max(2, min(passes, int((room / details - _COLUMN * COLUMNS) / _PASS))), details


_FIXED, _ROW, _COLUMN, _PASS = 25_000, 250, 80, 200
"""Measured bytes: fixed, per row, per step of a history, per pass with its histogram."""


def with_details(content: PageContent, most: int) -> PageContent:
    """A copy with the details of the first `most` sites only."""
    detailed = content.detailed[:most]
    answers = {
        what: {site: one for site, one in by_site.items() if site in detailed}
        for what, by_site in content.answers.items()
    }
    return dataclasses.replace(content, detailed=detailed, answers=answers)


# ------------------------------------------------------------------- as markup

_BREAKERS: Final = ("</script", "<!--", "<script")
_PACKED: Final = '<script type="application/octet-stream" class="nni-saved-{name}">{text}</script>'
_TITLE: Final = "nnx_inspector"


@dataclasses.dataclass(frozen=True)
class _FrontEnd:
    """A packed page without its recording, and the script that puts both into a frame."""

    name: str
    markup: str
    loader: str


@functools.cache
def _front_end() -> _FrontEnd:
    loader, shell = asset("saved.js"), "\0".join(page_shell(_TITLE))
    if shell.count("\0") != 1 or any(breaker in loader.lower() for breaker in _BREAKERS):
        raise InspectorError("The built front end cannot be put into a notebook. Build it again.")
    return _FrontEnd(
        name=hashlib.sha256(shell.encode()).hexdigest()[:16],
        markup=_PACKED.format(name="page", text=deflated_text(shell.encode(), level=9)),
        loader=f"<script>{loader}</script>",
    )


def _output(inspector: str, plain: str, packed: str | None) -> str:
    """The markup of an output. Apart from `plain` it holds only our own text and base64."""
    if packed is None:
        return f'<div class="nni-saved nni-of-{inspector}">{plain}</div>'
    front = _front_end()
    recorded = _PACKED.format(name="recording", text=packed)
    return (
        f'<div class="nni-saved nni-of-{inspector}" data-nni-page="{front.name}">'
        f"{plain}{front.markup}{recorded}{front.loader}</div>"
    )
