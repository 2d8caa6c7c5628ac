"""Training loops in the manner of other people's repositories, bare and watched in every way.

A watched loop trains as the bare one does, takes as many steps, and leaves classes, graphdefs and
threads as they were. Each measured pass has its step's number and the figures that NumPy finds in
float64, also while a module is perturbed; what cannot be seen is told, and nothing is recorded of
it. Each loop is watched in one way in each run, in all of them with the long tests.
"""

from __future__ import annotations

import pytest
from watched_loops import LOOPS, check

WAYS = (
    "iterated", "region, perturbed", "script", "ticked, perturbed", "iterated, perturbed", "region",
    "ticked",
)  # fmt: skip
ENSEMBLE = "ensemble"  # a batch is no example for an inspector
IN_PART = ("meta", "restored")
"""Loops in which a part of the calls is perturbed: there is no bare loop like that."""


def cases():
    for index, name in enumerate(LOOPS):
        ways = [
            way for way in (("script",) if name == ENSEMBLE else WAYS)
            if not ("perturbed" in way and name in IN_PART)
        ]  # fmt: skip
        for number, way in enumerate(ways):
            marks = [pytest.mark.long] if number != index % len(ways) else []
            yield pytest.param(name, way, id=f"{name}, {way}", marks=marks)


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_a_watched_loop(name, way):
    check(name, way.split(",")[0], perturbed="perturbed" in way)
