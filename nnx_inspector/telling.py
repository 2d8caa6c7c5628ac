"""What the screen of an inspector can tell at this moment, collected for a page without a kernel.

Each answer is the very one that the screen would get; one that fails is the text of what is wrong.
Invariant: nothing of the model changes, nor of what its screen remembers. Writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nnx_inspector import protocol
from nnx_inspector.assets import asset
from nnx_inspector.errors import reply_text
from nnx_inspector.flow import flow_of
from nnx_inspector.looking import look
from nnx_inspector.replay import Answer, Told
from nnx_inspector.tracing import Trace

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
        note=_note(layout, detailed),
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


def _note(layout: protocol.Layout, detailed: Sequence[str]) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M")
    told = f"Saved {saved}, with {{passes}}."
    if len(detailed) < len(layout.sites):
        told += f" The details of {len(detailed)} of {len(layout.sites)} modules are kept."
    return told
