"""The keys of settings: hashable for every value, and different after a change."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.hooks.content import key_of


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
    before = key_of(value)
    assert key_of(value) == before
    assert hash(key_of(value)) == hash(before)
    change(value)
    assert key_of(value) != before


def test_equal_content_has_one_key_and_equal_numbers_of_other_types_have_not():
    assert key_of(Config()) == key_of(Config())
    assert key_of(jnp.arange(3)) == key_of(jnp.arange(3)) != key_of(np.arange(3))
    assert key_of(jax.random.key(0)) != key_of(jax.random.key(1))
    assert len({key_of([x]) for x in (1, 1.0, True, np.float32(1), "1")}) == 5
    assert key_of(0.0) != key_of(-0.0)
    assert key_of(Plain()) != key_of(Plain())


def test_what_holds_itself_has_a_key():
    loop: list[Any] = [1]
    loop.append(loop)
    assert hash(key_of(loop)) == hash(key_of(loop))
