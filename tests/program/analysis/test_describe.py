"""Values in words: arrays by dtype and shape, plain values as they are."""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from nnx_inspector.program.analysis.describe import in_words, value_in_words


class Mode(enum.Enum):
    TRAIN = "train"


class Pair(NamedTuple):
    left: object
    right: object


@struct.dataclass
class Batch:
    image: object
    label: object


X = jnp.ones((4, 2))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (X, "float32[4,2]"),
        (np.zeros(3, np.int8), "int8[3]"),
        (jax.ShapeDtypeStruct((1, 2), jnp.bfloat16), "bfloat16[1,2]"),
        (jax.random.key(0), "key<fry>[]"),
        (True, "True"),
        (None, "None"),
        (3, "3"),
        (2.5, "2.5"),
        (1j, "1j"),
        ("relu", "'relu'"),
        ("x" * 60, "'" + "x" * 35 + "...'"),
        (Mode.TRAIN, "Mode.TRAIN"),
        (jnp.tanh, "tanh"),
        (nnx.relu, "relu"),
        (jnp.float32, "float32"),
        (nnx.Linear, "Linear"),
        (object(), "object"),
        ((), "()"),
        ((X,), "(float32[4,2],)"),
        ((X, None), "(float32[4,2], None)"),
        ([X, [1]], "[float32[4,2], [1]]"),
        ({"a": X, "b": {"c": False}}, "{a: float32[4,2], b: {c: False}}"),
        (Pair(X, 1), "Pair(left=float32[4,2], right=1)"),
        (Batch(X, "cat"), "Batch(float32[4,2], 'cat')"),
        (nnx.Param(X), "Param"),
        (nnx.Dropout(0.5), "Dropout"),
        (list(range(10)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 2 more]"),
    ],
)
def test_a_value(value, text):
    assert value_in_words(value) == text


def test_arguments_stand_as_in_a_call():
    assert (
        in_words((X, 2), {"train": True, "mask": None}) == "float32[4,2], 2, train=True, mask=None"
    )
    assert in_words((), {}) == "nothing"


def test_a_tracer_is_told_without_its_numbers():
    told = []
    jax.jit(lambda x: told.append(value_in_words({"x": x})))(X)
    assert told == ["{x: float32[4,2]}"]
