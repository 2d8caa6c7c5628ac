"""The present content of an inspector's screen, collected for a page without a kernel.

Each answer is the one that the screen would get; an answer that fails is the text of its error.
Invariant: neither the model nor the state of its screen changes. Writes no file itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from nnx_inspector.background import weak_method
from nnx_inspector.errors import reply_text
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.nnx.page import ModelContent, Pages
from nnx_inspector.inspector.panels import answer_look, units_messages
from nnx_inspector.inspector.values.page_values import MOST_BYTES
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.assets import asset
from nnx_inspector.screen.export.last_state import MOST_SITES
from nnx_inspector.screen.export.replay import PageContent, SavedAnswer, detailed_sites
from nnx_inspector.screen.flow import flow_of

KEPT_MESSAGES = ("sweep", "inputs", "lens", "logits", "attribution", "examples", "weights")
"""The messages that a page keeps as the screen has them, besides its own."""
_NOT_SHOWN = "The words had no figures of this module when the page was saved."


def content_of(core: Core, kept: Sequence[protocol.Message | None]) -> PageContent:
    """Everything on a page except the recording. `core` is at rest; `kept` are its messages."""
    layout, state = core.view.layout, core.view.state_at_rest()
    assert layout is not None  # both exist from the beginning
    assert state is not None
    detailed = detailed_sites(layout, state.selected)
    pages, model = Pages(core), ModelContent(core)  # not the screen's: that remembers what it shows
    answers = {
        "flow": _answers(detailed, _flow_maker(core, layout)),
        "nnx": _answers(detailed, lambda site: (pages.page(site, 0, model), None)),
        "units": units_messages(core, detailed),
        "positions": {site: core.position_answers.get(site, _NOT_SHOWN) for site in detailed},
        "values": core.page_values.answers(),
        "compare": dict(core.comparisons),
    }
    answers |= {
        "code": _answers(detailed, _look_maker(core, "code")),
        "casts": _answers([""], _look_maker(core, "casts")),
    }
    those = [one for one in kept if one is not None]
    if any(isinstance(one, protocol.Weights) and one.name for one in those):
        shown = ["values"]
    else:
        shown = ["values", "compare"]
    missing = tuple(what for what in shown if not answers[what])
    left_out = core.page_values.left_out()
    more = (
        f" Left out: {left_out:,} of the slices of values that were opened, because a page keeps "
        f"at most {MOST_BYTES // 10**6} MB of them."
    )
    return _content(layout, state, those, answers, detailed, missing, more if left_out else "")


def _content(
    layout: protocol.Layout,
    state: protocol.State,
    kept: Sequence[protocol.Message],
    answers: dict[str, dict[str, SavedAnswer]],
    detailed: tuple[str, ...],
    missing: tuple[str, ...] = (),
    more: str = "",
) -> PageContent:
    return PageContent(
        layout=layout,
        state=state,
        kept=tuple(kept),
        answers=answers,
        detailed=detailed,
        missing=missing,
        library=asset("layout.js").encode(),
        note=f"Saved {time.strftime('%Y-%m-%d %H:%M')}, with {{passes}}.{more}",
    )


class NotebookContent:
    """The content of a saved notebook, without anything that needs a pass or reads an array.

    Flows and code are made once per layout.
    """

    def __init__(self, core: Core):
        self._core = core
        core.view.page_content = weak_method(self.content)
        self._layout: protocol.Layout | None = None
        self._made: dict[str, dict[str, SavedAnswer]] = {}

    def content(
        self, layout: protocol.Layout, state: protocol.State, kept: Sequence[protocol.Message]
    ) -> PageContent:
        """Like `content_of`, with the details of at most MOST_SITES sites."""
        core = self._core
        if layout is not self._layout:
            self._layout, self._made = layout, {"flow": {}, "code": {}}
        detailed = detailed_sites(layout, state.selected)[:MOST_SITES]
        made: dict[str, Callable[[str], SavedAnswer]] = {
            "flow": _flow_maker(core, layout),
            "code": _look_maker(core, "code"),
        }
        for what, make in made.items():
            new = [site for site in detailed if site not in self._made[what]]
            self._made[what].update(_answers(new, make))
        answers = {what: {s: self._made[what][s] for s in detailed} for what in made}
        answers["casts"] = _answers([""], _look_maker(core, "casts"))
        return _content(layout, state, kept, answers, detailed)


def _flow_maker(core: Core, layout: protocol.Layout) -> Callable[[str], SavedAnswer]:
    return lambda site: (flow_of(core.trace, layout, site, number=0), None)


def _look_maker(core: Core, what: Literal["code", "casts"]) -> Callable[[str], SavedAnswer]:
    return lambda site: answer_look(core, protocol.Look(id=0, what=what, site=site))


def _answers(sites: Sequence[str], made: Callable[[str], SavedAnswer]) -> dict[str, SavedAnswer]:
    found: dict[str, SavedAnswer] = {}
    for site in sites:
        try:
            found[site] = made(site)
        except Exception as error:  # noqa: BLE001 - it is the answer
            found[site] = reply_text(error)
    return found
