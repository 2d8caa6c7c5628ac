"""What the screen of an inspector can tell at this moment, collected for a page without a kernel.

Each answer is the very one that the screen would get; one that fails is the text of what is wrong.
Invariant: nothing of the model changes, nor of what its screen remembers. Writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nnx_inspector.errors import reply_text
from nnx_inspector.inspector.panels import look
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.screen import protocol
from nnx_inspector.screen.assets import asset
from nnx_inspector.screen.export.last_state import MOST_SITES
from nnx_inspector.screen.export.replay import Answer, Told
from nnx_inspector.screen.flow import flow_of

MOST_DETAILED = 300
"""Sites of which a page keeps histograms, histories, flows, parameters, units, code and state."""


class Telling(Protocol):
    """What is asked of an inspector."""

    @property
    def trace(self) -> Trace: ...
    def units(self, site: str) -> Any: ...
    def source_of_pass(self) -> str: ...


def told_by(
    inspector: Telling,
    *,
    layout: protocol.Layout,
    state: protocol.State,
    kept: Sequence[Any],
    nnx: Callable[[str], protocol.Nnx],
    units: Callable[[Sequence[str]], Mapping[str, Answer]],
) -> Told:
    """Everything but the recording.

    Args:
        inspector: whose screen it is.
        layout: its rows.
        state: its state; on the page nothing runs.
        kept: its findings, its sweep.
        nnx: gives the page of a module as NNX sees it.
        units: gives the figures of the units of some sites.
    """
    detailed = detailed_of(layout, state.selected)
    answers = {
        "flow": _each(
            detailed, lambda site: (flow_of(inspector.trace, layout, site, number=0), None)
        ),
        "nnx": _each(detailed, lambda site: (nnx(site), None)),
        "units": units(detailed),
    }
    for what in ("code", "parameters"):
        answers[what] = _each(
            detailed,
            lambda site, what=what: look(protocol.Look(id=0, what=what, site=site), inspector),
        )
    return Told(
        layout=layout,
        state=state,
        kept=tuple(kept),
        answers=answers,
        detailed=detailed,
        library=asset("layout.js").encode(),
        note=_note(),
    )


class Brief:
    """What a saved notebook tells: nothing that takes a pass or reads an array.

    Flows and code are made once for a layout.
    """

    def __init__(self) -> None:
        self._layout: protocol.Layout | None = None
        self._made: dict[str, dict[str, Answer]] = {}

    def told(
        self,
        inspector: Telling,
        layout: protocol.Layout,
        state: protocol.State,
        kept: Sequence[Any],
    ) -> Told:
        """As `told_by`, with the details of at most MOST_SITES sites."""
        if layout is not self._layout:
            self._layout, self._made = layout, {"flow": {}, "code": {}}
        detailed = detailed_of(layout, state.selected)[:MOST_SITES]
        made: dict[str, Callable[[str], Answer]] = {
            "flow": lambda site: (flow_of(inspector.trace, layout, site, number=0), None),
            "code": lambda site: look(protocol.Look(id=0, what="code", site=site), inspector),
        }
        for what, make in made.items():
            new = [site for site in detailed if site not in self._made[what]]
            self._made[what].update(_each(new, make))
        return Told(
            layout=layout,
            state=state,
            kept=tuple(kept),
            answers={what: {s: self._made[what][s] for s in detailed} for what in made},
            detailed=detailed,
            library=asset("layout.js").encode(),
            note=_note(),
        )


def detailed_of(layout: protocol.Layout, selected: str) -> tuple[str, ...]:
    """The sites that are kept in detail: the selected one, then those nearest to the root."""
    keys = [site.key for site in sorted(layout.sites, key=lambda site: site.depth)]
    first = [selected] if selected in keys else []
    return tuple(dict.fromkeys([*first, *keys]))[:MOST_DETAILED]


def _each(sites: Sequence[str], made: Callable[[str], Answer]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for site in sites:
        try:
            found[site] = made(site)
        except Exception as error:  # noqa: BLE001 - it is the answer
            found[site] = reply_text(error)
    return found


def _note() -> str:
    return f"Saved {time.strftime('%Y-%m-%d %H:%M')}, with {{passes}}."
