"""Difficult models, attributes and arguments: each gives the same result as plain flax."""

import contextlib
import copy
import dataclasses
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

X = jnp.arange(8.0).reshape(2, 4) / 8


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x: Any, *, rngs: Any = None) -> Any:
        return self.dropout(self.linear(x), rngs=rngs)


class HandsOn(nnx.Module):
    """Calls its child with streams: its own, or those of the caller."""

    def __init__(self, rngs: nnx.Rngs):
        self.child = Dropped(rngs)
        self.rngs = rngs

    def __call__(self, x: Any, rngs: Any = None) -> Any:
        return self.child(x, rngs=self.rngs if rngs is None else rngs)


def _refuses(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError("a method that nobody but the user may call")


_ODD = ("len", "bool", "eq", "ne", "hash", "iter", "contains", "getitem", "repr", "str", "array")


class Odd(nnx.Module):
    """Every special method that Python calls implicitly raises."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)

    __jax_array__ = __float__ = __index__ = _refuses


for _name in _ODD:
    setattr(Odd, f"__{_name}__", _refuses)


class Proxy(nnx.Module):
    """Asks its child for a missing attribute, and raises another error than AttributeError."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise RuntimeError(f"asked for {name}")


class Magic:
    """Has every attribute, and no special method."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __len__ = __bool__ = __iter__ = __eq__ = _refuses
    __hash__ = object.__hash__


class Parent(nnx.Module):
    def __init__(self, cls: Any, rngs: nnx.Rngs):
        self.child = cls(rngs)
        self.children = nnx.List([cls(rngs)])
        self.magic = Magic()

    def __call__(self, x: Any, magic: Any = None) -> Any:
        return self.children[0](self.child(x))


Case = Callable[[], tuple[nnx.Module, tuple[Any, ...], dict[str, Any]]]
ODD_CASES: dict[str, Case] = {
    "rngs as an argument": lambda: (HandsOn(nnx.Rngs(0)), (X, nnx.Rngs(1)), {}),
    "rngs handed to a submodule": lambda: (HandsOn(nnx.Rngs(0)), (X,), {}),
    "methods that raise": lambda: (Parent(Odd, nnx.Rngs(0)), (X,), {}),
    "a root whose methods raise": lambda: (Odd(nnx.Rngs(0)), (X,), {}),
    "a proxy": lambda: (Parent(Proxy, nnx.Rngs(0)), (X,), {}),
    "an argument that has everything": lambda: (Parent(Proxy, nnx.Rngs(0)), (X, Magic()), {}),
}


def squares(model: Any, *args: Any, **kwargs: Any) -> Any:
    return (model(*args, **kwargs) ** 2).mean()


def same(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b)


@pytest.mark.parametrize("case", ODD_CASES)
def test_objects_are_asked_what_they_are(case: str, tmp_path: pathlib.Path):
    make = ODD_CASES[case]
    model, args, kwargs = make()
    want = model(*args, **kwargs)
    model, args, kwargs = make()
    gradients = nnx.grad(squares)(model, *args)

    model, args, kwargs = make()
    before = {cls: dict(vars(cls)) for cls in (type(model), nnx.Linear, nnx.Dropout)}
    calls = len(nni.trace(model, *args, **kwargs).calls)
    y, record = nni.capture(model)(*args, **kwargs)
    same(y, want)
    assert len(list(record)) == calls
    model, args, kwargs = make()
    _, grads = nni.value_and_grad(squares)(model, *args)
    same(jax.tree.leaves(grads), jax.tree.leaves(gradients))
    with contextlib.closing(nni.Inspector(model, *args, display=False, **kwargs)) as insp:
        model, args, kwargs = make()
        insp.run(*args, **kwargs)
        insp.step(squares, *args, **kwargs)
        site = insp.trace.calls[-1].site
        assert np.shape(insp.values(site)) == (2, 4)
        assert insp.units(site) is not None
        insp.perturb(site, nni.Zero())
        assert insp.run(*args, **kwargs).shape == (2, 4)
        assert insp.to_html(tmp_path / "page.html") > 0
    assert before == {cls: dict(vars(cls)) for cls in before}


def test_a_text_array_of_numpy_reaches_the_call_as_it_is():
    class Named(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x: Any, names: Any) -> Any:
            return self.linear(x) * len(names[0])

    model, names = Named(nnx.Rngs(0)), np.array(["abc"])
    want = model(X, names)
    same(nni.capture(model)(X, names)[0], want)


def test_batches_whose_length_is_not_known_are_watched():
    class Endless:
        def __len__(self) -> int:
            raise TypeError("this data set has no end")

        def __iter__(self) -> Any:
            return iter([X, X])

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    seen = [model(batch).shape for batch in insp.watch(Endless(), every=1)]
    insp.close()
    assert seen == [(2, 2), (2, 2)]


# ------------------------------------------------------------- settings without a hash


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Counting:
    """Changes itself at each call, as a cache or a log does."""

    scale = 2.0

    def __init__(self) -> None:
        self.calls = 0


class Scaled(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.config = config
        self.names = nnx.static(["a"])
        self.table = nnx.static({"b": [1]})

    def __call__(self, x: Any, config: Any = None) -> Any:
        traced.append(1)
        config = self.config if config is None else config
        if isinstance(config, Counting):
            config.calls += 1
        return self.linear(x) * (config["scale"] if isinstance(config, dict) else config.scale)


traced: list[int] = []
SETTINGS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Config(), lambda c: setattr(c, "scale", 5.0)),
    "dict": ({"scale": 2.0}, lambda c: c.update(scale=5.0)),
    "namespace": (types.SimpleNamespace(scale=2.0), lambda c: setattr(c, "scale", 5.0)),
    "object": (Counting(), lambda c: setattr(c, "scale", 5.0)),
}


@pytest.mark.parametrize("where", ["attribute", "argument"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_without_a_hash_is_run_and_a_change_of_it_is_noticed(name: str, where: str):
    config, change = copy.deepcopy(SETTINGS[name][0]), SETTINGS[name][1]
    config = nnx.static(config) if isinstance(config, dict) and where == "attribute" else config
    model = Scaled(config, nnx.Rngs(0))
    args = (X,) if where == "attribute" else (X, model.config)
    with contextlib.closing(nni.Inspector(model, *args, display=False)) as insp:
        insp.run(*args)
        before = len(traced)
        same(insp.run(*args), want := model(*args))
        assert len(traced) == before + 1  # by this test's own call only
        change(model.config)
        same(insp.run(*args), want * 2.5)
        assert insp.values("linear").shape == (2, 2)
        insp.step(squares, *args)


# ------------------------------------------------------------- models that are too deep


class Nested(nnx.Module):
    def __init__(self, inner: Any):
        self.inner = nnx.data(inner)

    def __call__(self, x: Any) -> Any:
        return x if self.inner is None else self.inner(x)


@pytest.mark.parametrize("look", [nni.trace, lambda model, x: nni.capture(model)(x)])
def test_a_model_that_is_too_deep_raises_its_own_error_and_leaves_nothing(look: Any):
    model: Any = None
    for _ in range(600):
        model = Nested(model)
    before = dict(vars(Nested))
    with pytest.raises(RecursionError):
        look(model, X)
    assert dict(vars(Nested)) == before
    same(nni.capture(Nested(None))(X)[0], X)
