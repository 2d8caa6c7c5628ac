"""The programs of a block are edited where they are launched, for one owner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from jax.core import ShapedArray

from nnx_inspector.program.launched import LaunchedMarks
from nnx_inspector.program.marks import OUTPUT, launch_input, mark_tree
from nnx_inspector.program.plan import Plan
from nnx_inspector.resources import open_all

X = jnp.arange(6.0)
NUMBER = ShapedArray((), jnp.dtype("float32"))


def scaled(x: Any, owner: str) -> Any:
    factor = launch_input.bind(place=(owner, "factor"), kind=NUMBER)
    return mark_tree(factor * x, owner=owner, site="s", part=OUTPUT)


def means_in(seen: list[Any]) -> Any:
    def see(found: Any, arrays: Any) -> None:
        seen.extend(one.summaries[0].mean for _, _, one in found.walk(arrays))

    return see


@pytest.mark.parametrize("jitted", [True, False])
def test_a_given_gets_its_value_and_a_mark_is_seen(jitted: bool) -> None:
    f = jax.jit(scaled, static_argnums=1) if jitted else scaled
    seen: list[Any] = []
    block = LaunchedMarks("us", Plan(), given=lambda place: np.float32(3), seen=means_in(seen))
    with open_all(block):
        np.testing.assert_array_equal(f(X, "us"), 3 * X)
        np.testing.assert_array_equal(f(X, "others"), 0 * X)
    assert seen == [7.5]
    np.testing.assert_array_equal(f(X, "us"), 0 * X)
    assert seen == [7.5]


def test_another_value_compiles_nothing() -> None:
    f, compiled = jax.jit(scaled, static_argnums=1), []
    for value in (1.0, 2.0, 3.0):
        given = lambda place, value=value: np.float32(value)  # noqa: E731
        with (
            open_all(LaunchedMarks("us", Plan(summarise=False), given=given)),
            Compilations() as found,
        ):
            np.testing.assert_array_equal(f(X, "us"), value * X)
        compiled.append(found.kinds.count("compile"))
    assert compiled[1:] == [0, 0]
