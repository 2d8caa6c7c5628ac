"""What cloudpickle makes of a model in a region is what it makes of it outside."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
import sys
import types
from typing import Any

import cloudpickle
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.hooks import wrapping

X = jnp.ones((2, 8))


class Forward:
    """A method that a model inherits from a class that is no module."""

    a: Any

    def __call__(self, x):
        return self.a(x) * 2


class Twice:
    """A decorator that is an object, as those of transforms are."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args):
        return 2 * vars(self)["__wrapped__"](*args)


def own():
    class M(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.a(x) * 2

    return M(nnx.Rngs(0))


def inherits_from_flax():
    class M(nnx.Linear):
        extra = 3

    return M(8, 3, rngs=nnx.Rngs(0))


def inherits_from_a_plain_class():
    class M(Forward, nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 3, rngs=rngs)

    return M(nnx.Rngs(0))


def calls_super():
    class Base(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.a(x)

        def encode(self, x):
            return self(x) + 1

    class M(Base):
        def __call__(self, x):
            return super().__call__(x) * 2

    return M(nnx.Rngs(0))


def decorated():
    class M(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 3, rngs=rngs)

        @Twice
        def inner(self, x):
            return self.a(x)

        def several(self, x):
            yield self.a(x)

        def __call__(self, x):
            return self.inner(x)

    return M(nnx.Rngs(0))


def holds_a_bound_method():
    class M(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 3, rngs=rngs)
            self.inner = self.encode

        def encode(self, x):
            return self.a(x)

        def __call__(self, x):
            return self.inner(x)

    return M(nnx.Rngs(0))


def is_importable():
    return models.MLP(models.rngs())


CASES = [own, inherits_from_flax, inherits_from_a_plain_class, calls_super, decorated,
         holds_a_bound_method, is_importable]  # fmt: skip


@pytest.mark.parametrize("made", CASES)
def test_a_model_is_pickled_by_value_as_outside(made):
    model = made()
    x = X if made is not is_importable else jnp.ones((2, 3))
    outside, expected = cloudpickle.dumps(model), model(x)
    insp = nni.Inspector(model, x, display=False)
    within = []
    for batch in insp.watch([x] * 2, every=1):
        model(batch)
        within.append(cloudpickle.dumps(model))
    with nni.perturb("**", nni.Scale(1.0)):
        within.append(cloudpickle.dumps(model))
    insp.close()
    assert within == [outside] * 3
    assert b"nnx_inspector" not in outside
    np.testing.assert_array_equal(cloudpickle.loads(within[0])(x), expected)


def test_functions_that_use_the_class_are_pickled_as_outside():
    model = own()
    cls = type(model)
    bound, by_class = model.__call__, lambda m, x: cls.__call__(m, x) + 1
    outside = [cloudpickle.dumps(one) for one in (cls, bound, by_class)]
    with nni.perturb("**", nni.Scale(1.0)):
        assert [cloudpickle.dumps(one) for one in (cls, bound, by_class)] == outside
        wrapper = cls.__call__  # it is the class's own, and pickled so
        found = cloudpickle.loads(cloudpickle.dumps(wrapper))
    np.testing.assert_array_equal(found(model, X), model(X))


def test_a_method_of_an_importable_class_is_found_by_its_name():
    method = models.MLP.__call__
    with nni.perturb("**", nni.Scale(1.0)):
        within = cloudpickle.dumps((method, models.MLP.__call__))
    assert cloudpickle.loads(within) == (method, method)


def test_a_pickle_that_was_loaded_in_a_region_leaves_no_wrapper():
    model = own()
    with nni.perturb("**", nni.Scale(1.0)):
        loaded = cloudpickle.loads(cloudpickle.dumps(model))
        np.testing.assert_array_equal(loaded(X), model(X))
    # nothing else knows what is wrapped
    assert not wrapping._is_wrapper(vars(type(loaded))["__call__"])
    assert "nnx_inspector" not in vars(type(loaded))["__call__"].__code__.co_filename
    np.testing.assert_array_equal(loaded(X), model(X))


def test_the_pickler_is_as_before_when_the_region_ends():
    pickler: Any = cloudpickle.CloudPickler
    before = pickler.reducer_override.__code__, nnx.Module.__getstate__.__code__
    with nni.perturb("**", nni.Scale(1.0)):
        assert pickler.reducer_override.__code__ is not before[0]
    assert (pickler.reducer_override.__code__, nnx.Module.__getstate__.__code__) == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy,
                                    lambda m: pickle.loads(pickle.dumps(m))])  # fmt: skip
def test_other_copies_of_a_model_are_as_outside(copied):
    model = models.MLP(models.rngs())
    with nni.perturb("**", nni.Scale(1.0)):
        found = copied(model)
        assert type(found) is models.MLP
        decorated_one = type(decorated()).inner
        assert copied is not copy.deepcopy or not isinstance(
            copied(decorated_one),
            wrapping._DecoratedMethod,  # the class that a pickle names
        )
    np.testing.assert_array_equal(found(jnp.ones((2, 3))), model(jnp.ones((2, 3))))


def test_a_pickler_that_is_loaded_within_the_region(monkeypatch):
    """As the copy that Ray has of cloudpickle."""
    model = own()
    with nni.perturb("**", nni.Scale(1.0)):
        name = "a_copy_of_cloudpickle"
        spec: Any = importlib.util.spec_from_file_location(name, cloudpickle.cloudpickle.__file__)
        late = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, late)
        spec.loader.exec_module(late)
        within = late.dumps(model)
    assert within == late.dumps(model)
    assert b"nnx_inspector" not in within
