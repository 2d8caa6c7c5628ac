"""Training loops as in other people's repositories, bare and watched in every way.

A watched loop trains like the bare one, makes as many steps, and leaves classes, graphdefs and
threads unchanged. Each measured pass has its step's number and NumPy's figures in float64, also
while a module is perturbed; calls that cannot be seen are reported, and not recorded. Each test run
watches each loop in one way; the long tests watch it in all ways.
"""

from __future__ import annotations

import pytest
from loop_comparison import LOOPS, check
from random_training_loops import made

from nnx_inspector.live.programs.variants import Variants

WAYS = (
    "iterated", "region, perturbed", "script", "ticked, perturbed", "iterated, perturbed", "region",
    "ticked",
)  # fmt: skip
ENSEMBLE = "ensemble"  # a batch cannot be an inspector's example
IN_PART = ("meta", "restored")
"""Loops in which only some calls are perturbed: they have no bare equivalent."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Have each variant of a program there when it is first wanted, on any machine."""
    compile_ahead = Variants._compile_ahead  # a loop may end before its thread does

    def compile_now(self, *of):
        compile_ahead(self, *of)
        self.wait()

    monkeypatch.setattr(Variants, "_compile_ahead", compile_now)


FIRSTS = range(3, 1000, 25)
"""The first numbers of made-up loops; together a thousand."""


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


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in FIRSTS)])
def test_a_made_up_loop(first):
    """The loops of twenty-five numbers, or of three in each test run."""
    for seed in range(first, first + (3 if first == 0 else 25)):
        one = made(seed)
        LOOPS[name := f"made from {seed}: {one}"] = one
        check(name, one.way, perturbed=one.perturbed)
