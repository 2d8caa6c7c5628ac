"""The keys of settings: hashable for every value, and different after a change."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.hooks.cache_key import cache_key


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: Any = dataclasses.field(default_factory=lambda: [1])


class Plain:
    def __init__(self) -> None:
        self.scale = 1.0


def change_attribute(x: Any) -> None:
    x.scale = 3.0


def change_array(x: Any) -> None:
    x[0] = 7


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": ([1, [2]], lambda x: x[1].append(3)),
    "dict": ({"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),  # another order
    "set": ({1}, lambda x: x.add(2)),
    "dataclass": (Config(), lambda x: x.sizes.append(2)),
    "frozen dataclass": (Frozen(), lambda x: x.sizes.append(2)),
    "namespace": (types.SimpleNamespace(scale=1.0), change_attribute),
    "object": (Plain(), change_attribute),
    "array": (np.zeros(2), change_array),
    "array of objects": (np.array(["a", [1]], object), change_array),
    "argument": ((1, {"config": Config()}), lambda x: change_attribute(x[1]["config"])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_another_key(name: str):
    value, change = CHANGES[name]
    before = cache_key(value)
    assert cache_key(value) == before
    assert hash(cache_key(value)) == hash(before)
    change(value)
    assert cache_key(value) != before


def test_equal_content_has_one_key_and_equal_numbers_of_other_types_have_not():
    assert cache_key(Config()) == cache_key(Config())
    assert cache_key(jnp.arange(3)) == cache_key(jnp.arange(3)) != cache_key(np.arange(3))
    assert cache_key(jax.random.key(0)) != cache_key(jax.random.key(1))
    assert len({cache_key([x]) for x in (1, 1.0, True, np.float32(1), "1")}) == 5
    assert cache_key(0.0) != cache_key(-0.0)
    assert cache_key(Plain()) != cache_key(Plain())


def test_what_holds_itself_has_a_key():
    loop: list[Any] = [1]
    loop.append(loop)
    assert hash(cache_key(loop)) == hash(cache_key(loop))
