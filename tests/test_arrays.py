"""Values are classified by type, also objects that have every attribute or raise."""

import collections
import decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_inspector.arrays import is_array, own_attribute, shape_of
from nnx_inspector.program.structure import describe


class Answers:
    """Has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self) -> Any:
        return self


class Raises:
    """A lazy object that cannot be resolved yet."""

    shape: tuple[int, ...]
    dtype: Any

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


STRANGERS = [Answers(), Raises(), nnx.Rngs(0), Answers, 1.0, None, "float32", decimal.Decimal(1)]


@pytest.mark.parametrize("value", STRANGERS, ids=lambda v: type(v).__name__)
def test_what_is_no_array_is_not_asked_for_its_shape(value: Any):
    streams = len(list(value)) if isinstance(value, nnx.Rngs) else 0
    assert not is_array(value)
    assert describe(value) == type(value).__name__
    assert own_attribute(value, "no_such_attribute", 7) == 7
    assert not streams or len(list(value)) == streams  # asking it may not make a stream


def test_arrays_of_every_kind_have_a_shape():
    reference = jax.new_ref(jnp.ones(3))
    arrays = [np.ones(3), jnp.ones(3), jax.ShapeDtypeStruct((3,), np.float32), reference]
    inside = jax.make_jaxpr(lambda x: (arrays.append(x), x)[1])(jnp.ones(3))
    arrays.append(inside.in_avals[0])
    for one in arrays:
        assert is_array(one), one
        assert shape_of(one) == (3,)
    assert shape_of(np.float32(1)) == shape_of(1) == shape_of(jax.random.key(0)) == ()
    assert shape_of([1, 2]) is shape_of(Answers()) is None


def test_an_attribute_is_the_objects_own_or_its_classs():
    Point = collections.namedtuple("Point", "x y")
    assert own_attribute(Point(1, 2), "_fields") == own_attribute(Point, "_fields") == ("x", "y")
    assert own_attribute(jax.jit(np.sin), "__name__") == "sin"
    assert own_attribute(Point(1, 2).count, "__name__") == "count"  # as a bound method has it
    assert own_attribute(nnx.Rngs(0).fork, "__name__") == "fork"
    assert own_attribute(Answers(), "__name__") is None
    assert own_attribute(Raises(), "_fields", ()) == ()


def test_a_variable_is_told_by_what_it_holds():
    assert describe(nnx.Param(jnp.ones((2, 3)))) == "float32[2,3]"
    assert describe(nnx.Variable("a text")) == "Variable"
