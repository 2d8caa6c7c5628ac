"""Paths, keys, methods and selections, against `nnx.iter_modules` and the MRO by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import models
import optax
import pytest
from flax import linen, nnx

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks import sites
from nnx_inspector.hooks.sites import Selection, parse_key, site_key
from nnx_inspector.program.function import argument_name
from nnx_inspector.records.capture import capture


def keys_of(model):
    return [site.key for site in sites.module_sites(model)]


# -------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("path", "method", "key"),
    [
        ((), "__call__", ""),
        ((), "encode", ":encode"),
        (("blocks", 0, "attn"), "__call__", "blocks/0/attn"),
        (("encoder",), "encode", "encoder:encode"),
        (("a/b", "c:d", "e[0]"), "__call__", r"a\/b/c\:d/e\[0]"),
        (("back\\slash",), "__call__", r"back\\slash"),
        (("back\\", "slash"), "f", r"back\\/slash:f"),
    ],
)
def test_a_key_is_written_and_read_back(path, method, key):
    assert site_key(path, method) == key
    assert parse_key(key) == (tuple(str(p) for p in path), method)


# ----------------------------------------------------------------- modules


def test_modules_come_parents_first_and_in_the_order_they_were_set():
    model = models.Nested(models.rngs())
    assert keys_of(model) == [
        "",
        "blocks",
        "blocks/0",
        "blocks/0/linear",
        "blocks/1",
        "blocks/1/linear",
        "heads",
        "heads/a",
        "heads/b",
        "tail",
        "tail/layers",
        "tail/layers/0",
    ]


def test_children_of_a_list_come_in_numeric_order():
    model = nnx.Dict(blocks=nnx.List([models.Frozen() for _ in range(11)]))
    assert keys_of(model)[2:] == [f"blocks/{i}" for i in range(11)]


def test_paths_are_those_of_iter_modules():
    model = models.Nested(models.rngs())
    ours = {site.path: site.module for site in sites.module_sites(model)}
    theirs = dict(nnx.iter_modules(model))
    assert ours.keys() == theirs.keys()
    assert all(ours[path] is theirs[path] for path in theirs)


def test_a_shared_module_is_one_site_with_an_alias():
    model = models.Shared(models.rngs())
    root, linear = sites.module_sites(model)
    assert root.aliases == ()
    assert linear.path == ("first",)
    assert linear.aliases == (("second",),)


def test_a_prefix_goes_before_paths_and_aliases():
    linear = sites.module_sites(models.Shared(models.rngs()), ("model",))[1]
    assert (linear.path, linear.aliases) == (("model", "first"), (("model", "second"),))


def test_a_module_below_a_pytree_that_is_no_module_follows_its_nearest_module():
    class Holder(nnx.Pytree):
        def __init__(self):
            self.inner = nnx.data(models.Frozen())

    class Outer(nnx.Module):
        def __init__(self):
            self.holder = nnx.data(Holder())
            self.after = nnx.data(models.Frozen())

    assert keys_of(Outer()) == ["", "holder/inner", "after"]


def test_a_submodule_added_later_is_found_and_a_deleted_one_is_gone():
    model = models.MLP(models.rngs())
    model.extra = nnx.Linear(2, 2, rngs=models.rngs())
    del model.up
    assert keys_of(model) == ["", "down", "extra"]


# ----------------------------------------------------------------- methods


class Overrides(models.Base):
    def train(self, **kwargs):
        super().train(**kwargs)


class Nesting(nnx.Module):
    class Config:
        pass

    def _hidden(self): ...

    def shown(self): ...


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        # neither properties nor static and class methods; `update` is one of nnx.Dict's names too
        (models.Methods, {"encode", "decode", "update", "__call__"}),
        (models.Decorated, {"jitted", "again", "mapped", "__call__"}),
        (Overrides, {"__call__"}),
        (Nesting, {"shown"}),
        (nnx.List, set()),
        (nnx.Dict, set()),
    ],
)
def test_public_methods_of_the_users_own_are_sites(cls, names):
    assert set(sites.methods(cls)) == names


def test_an_inherited_method_is_a_site_of_the_heir():
    assert sites.methods(models.Inherits)["__call__"] is vars(models.Base)["__call__"]


# --------------------------------------------------------------- selection

BASE, FROZEN = models.Base(models.rngs()), models.Frozen()


@pytest.mark.parametrize(
    ("only", "path", "method", "module", "selected"),
    [
        ("encoder", ("encoder",), "__call__", BASE, True),
        ("encoder", ("encoder",), "encode", BASE, False),
        ("**:enc*", (), "encode", BASE, True),
        ("**:enc*", ("a", "b"), "encode", BASE, True),
        ("**:enc*", (), "__call__", BASE, False),
        (models.Base, (), "__call__", models.Supers(models.rngs()), True),
        (models.Base, (), "__call__", FROZEN, False),
        (["a", models.Frozen], ("a",), "__call__", BASE, True),
        (["a", models.Frozen], ("b",), "__call__", FROZEN, True),
        (["a", models.Frozen], ("b",), "__call__", BASE, False),
        (r"c\[0]", ("c[0]",), "__call__", FROZEN, True),
        ("**", None, "__call__", FROZEN, False),  # a call that is not attributed
    ],
)
def test_what_a_selection_selects(only, path, method, module, selected):
    assert Selection(only).matches(path, method, module) == selected


def test_a_predicate_sees_path_and_module():
    seen = []
    module = models.Frozen()
    Selection(lambda path, module: bool(seen.append((path, module)))).matches(
        ("a", 0), "__call__", module
    )
    assert seen == [(("a", 0), module)]


def test_equal_selections_are_equal_and_hash_alike():
    assert Selection(["a", models.Base]) == Selection(("a", models.Base))
    assert hash(Selection(["a", models.Base])) == hash(Selection(("a", models.Base)))
    assert Selection("a") != Selection("b")
    assert Selection("a") != Selection("a", default_methods="*")


def test_a_selection_that_matches_nothing_names_the_closest_sites():
    with pytest.raises(ValueError, match=r"closest") as error:
        Selection("blocks/0/linaer").require_match(models.Nested(models.rngs()))
    assert str(error.value) == (
        "'blocks/0/linaer' matches no site of this model. "
        "The closest sites are 'blocks/0/linear', 'blocks/1/linear', 'blocks/0'."
    )


def test_a_type_that_matches_nothing_is_named():
    with pytest.raises(ValueError, match=r"'Conv' matches no site of this model"):
        Selection(nnx.Conv).require_match(models.MLP(models.rngs()))


@pytest.mark.parametrize(
    ("only", "error", "words"),
    [
        ("blocks[3]", InspectorError, r"'blocks\[3\]' is one layer .* 'blocks' instead"),
        ([], ValueError, r"only= is empty"),
        (3, TypeError, r"got 3 of type int"),
    ],
)
def test_what_is_no_selection_is_refused(only, error, words):
    with pytest.raises(error, match=words):
        Selection(only)


def test_the_nearest_key_by_name_is_found_however_long_its_path():
    keys = ["", "encoder/blocks/0/attn", "head"]
    assert sites.closest_keys("attn", keys)[0] == "encoder/blocks/0/attn"


def test_a_glob_names_the_sites_that_end_alike():
    keys = ["emb", "emb@_take.lt", "blocks/0/att@softmax", "blocks/0/att", "blocks/1/att@softmax"]
    assert sites.closest_keys("**@sotfmax", keys)[:2] == [
        "blocks/0/att@softmax",
        "blocks/1/att@softmax",
    ]
    assert sites.closest_keys("**/atn", keys)[0] == "blocks/0/att"


# ---------------------------------------------------------- what a model is


def test_argument_names_are_those_of_the_signature():
    def f(a, /, b, *rest, c): ...

    assert [argument_name(f, i) for i in range(4)] == ["a", "b", "2", "3"]


def test_capture_names_the_nearest_site_of_each_of_several_models():
    def f(student, teacher, x):
        return student(x), teacher(x)

    a, b = models.MLP(models.rngs()), models.MLP(models.rngs())
    with pytest.raises(ValueError, match=r"'student/upp' matches no site.*'student/up'"):
        capture(f, only="student/upp")(a, b, jnp.ones((1, 3)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (type, "model is the class Linear, not an instance of it"),
        (lambda m: linen.Dense(3), "got Dense. Wrap a Linen module with nnx.bridge.ToNNX"),
        (lambda m: {}, "must be an nnx.Module, got dict"),
        (lambda m: nnx.state(m), "got State. Merge the model first: model = nnx.merge"),
        (lambda m: nnx.graphdef(m), "got GraphDef. Merge the model first"),
        (lambda m: nnx.split(m), "got tuple. Merge the model first"),
        (lambda m: (m, 3), "got tuple. Pass one module"),
        (lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param), "the model that it updates"),
    ],
)
def test_what_stands_for_a_model_is_told_how_to_become_one(given: Any, words: str):
    with pytest.raises(TypeError, match=words):
        sites.require_module(given(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))


def test_a_missing_example_is_told_with_what_the_model_takes():
    class Masked(nnx.Module):
        def __call__(self, x: Any, mask: Any = None, *, train: bool) -> Any:
            return x

    with pytest.raises(TypeError, match=r"Masked takes x, train= .no example.*"):
        sites.require_arguments(Masked(), (), {})
    with pytest.raises(TypeError, match=r"nni\.Inspector\(model, x, train=\.\.\.\)"):
        sites.require_arguments(Masked(), (1,), {})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'trian'"):
        sites.require_arguments(Masked(), (1,), {"trian": True, "train": True})
    sites.require_arguments(Masked(), (1,), {"train": True})
    sites.require_arguments(Masked().__call__, (1,), {"train": True})


@pytest.mark.parametrize("key", [0, None, ("layers", 0)])
def test_a_key_is_a_text(key):
    _, record = capture(models.MLP(nnx.Rngs(0)))(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"A site's key is a text such as 'blocks/0/attn', got"):
        record[key]
