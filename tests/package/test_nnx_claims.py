"""What how-nnx-works.ipynb says of NNX is so, with the flax that is installed.

Each test has one sentence of the notebook as its docstring.
"""

from __future__ import annotations

import inspect
import io
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import nnx_inspector as nni

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "how-nnx-works.ipynb"
SECTIONS = 13


def prose() -> list[str]:
    """The text of each section, its white space made single spaces."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return [" ".join(part.split()) for part in re.split(r"^## ", text, flags=re.MULTILINE)]


def claims() -> list[str]:
    """The sentences that the tests below have as their docstrings."""
    tests = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    found = [test.__doc__ for name, test in tests if name.startswith("test_")]
    return [" ".join(text.split()) for text in found if text is not None]


def test_each_claim_is_a_sentence_of_the_notebook_and_each_section_has_one():
    sections = [part for part in prose() if re.match(r"\d", part)]
    assert len(sections) == SECTIONS
    missing = [claim for claim in claims() if not any(claim in part for part in sections)]
    assert not missing
    untested = [part[:40] for part in sections if not any(claim in part for claim in claims())]
    assert not untested


class Linear(nnx.Module):
    """A module with one kernel."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(rngs.params.normal((3, 3)))
        self.scale = 2.0

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale * (x @ self.kernel)


class Twice(nnx.Module):
    """One module at two places."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = Linear(rngs=rngs)
        self.second = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


class Noisy(nnx.Module):
    """All that training changes: parameters, statistics and random streams."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.items = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(self.items[0](x)))


class Counts(nnx.Module):
    """A counter of each kind of attribute."""

    def __init__(self):
        self.variable = nnx.Variable(jnp.array(0))
        self.array = jnp.array(0)
        self.data = nnx.data(0)
        self.number = 0


x = jax.random.normal(jax.random.key(0), (8, 3))


def noisy() -> Noisy:
    return Noisy(rngs=nnx.Rngs(0))


def squared(model: Any) -> jax.Array:
    return (model(x) ** 2).mean()


def arrays(model: Any, kind: Any = ...) -> list[np.ndarray]:
    """The arrays of the Variables of a type, keys as numbers."""
    leaves = jax.tree.leaves(nnx.state(model, kind))
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    pairs = zip(leaves, keys, strict=True)
    return [np.asarray(jax.random.key_data(a) if key else a) for a, key in pairs]


def changed(model: Any, kind: Any, act: Callable[[], object]) -> bool:
    """Whether `act` changes each (True) or none (False) of the Variables of a type."""
    before = arrays(model, kind)
    act()
    moved = {bool((a != b).any()) for a, b in zip(before, arrays(model, kind), strict=True)}
    assert len(moved) == 1
    return moved.pop()


def traced(act: Callable[[Any], object], models: list[Any]) -> int:
    """How often a jitted function of a model is traced when it is called with each of these."""
    traces: list[None] = []

    @nnx.jit
    def jitted(model: Any) -> Any:
        traces.append(None)
        return act(model)

    for model in models:
        jitted(model)
    return len(traces)


# ---------------------------------------------------------------- modules and state


def test_parameters_are_made_by_the_constructor():
    """The constructor of an NNX module makes the parameters immediately and stores them as
    attributes."""
    linear = nnx.Linear(16, 2, rngs=nnx.Rngs(0))
    assert isinstance(linear.kernel, nnx.Param)
    assert linear.kernel.shape == (16, 2)


def test_a_path_leads_to_a_module():
    """`blocks/0/linear` is `model.blocks[0].linear`."""
    record = nni.capture(noisy())(x)[1]
    assert "items/0" in record


def test_a_plain_array_is_traced_and_updated():
    """A plain array attribute is traced and updated like a Variable."""
    counts = Counts()

    def add(counts: Counts) -> None:
        assert isinstance(counts.array, jax.core.Tracer)
        counts.array = counts.array + 1
        counts.data = counts.data + 1
        counts.variable[...] += 1

    assert traced(add, [counts] * 3) == 1
    assert int(counts.array) == int(counts.data) == int(counts.variable[...]) == 3
    assert {"array", "data", "variable"} == set(nnx.state(counts))


def test_arrays_variables_and_modules_are_data():
    """Arrays, Variables and modules are data."""
    for value in (jnp.ones(1), np.ones(1), nnx.Param(jnp.ones(1)), Counts()):
        assert nnx.is_data(value)


def test_the_rest_is_static():
    """Everything else is static: numbers, strings, functions."""
    for value in (1, 1.5, True, None, "text", max, [1], (1,), {"a": 1}):
        assert not nnx.is_data(value)


def test_a_static_attribute_is_part_of_the_program():
    """A static attribute is part of the program, so each new value compiles the function again."""
    counts = Counts()

    def add(counts: Counts) -> None:
        counts.number += 1

    assert traced(add, [counts] * 3) == 3
    assert counts.number == 3


def test_data_and_static_declare():
    """`nnx.data(...)` declares an attribute to be data, and `nnx.static(...)` declares it to be
    static."""

    class Declared(nnx.Module):
        def __init__(self):
            self.data, self.static = nnx.data(1.0), nnx.static(1.0)

    assert set(nnx.state(Declared())) == {"data"}


@pytest.mark.parametrize("wrap", [list, tuple, nnx.static])
def test_a_static_attribute_holds_no_data(wrap: Callable[[Any], Any]):
    """A plain list is static, and a static attribute may not hold data"""
    with pytest.raises(ValueError, match="Found data"):
        holder(wrap)


def test_containers_are_data():
    """`nnx.List` and `nnx.Dict` are containers that are themselves modules, so they are data, and
    each item has a path."""
    assert isinstance(nnx.List([]), nnx.Module)
    assert isinstance(nnx.Dict({}), nnx.Module)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(holder(nnx.List)))]
    assert paths == [("layers", 0, "kernel")]


def holder(wrap: Callable[[Any], Any]) -> nnx.Module:
    class Holder(nnx.Module):
        def __init__(self):
            self.layers = wrap([Linear(rngs=nnx.Rngs(0))])

    return Holder()


def test_variables_have_an_identity():
    """Two places can hold the same Variable, and both see a change."""
    model = Twice(rngs=nnx.Rngs(0))
    model.first.kernel[...] = jnp.zeros((3, 3))
    assert not model.second.kernel[...].any()


def test_filters_leave_plain_arrays_out():
    """`nnx.state(model, nnx.Param)`, `nnx.grad` and `nnx.Optimizer(..., wrt=nnx.Param)` all leave
    plain arrays out."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.param, self.array = nnx.Param(jnp.ones(3)), jnp.ones(3)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.param * self.array

    model = Scaled()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(squared)(model)
    optimizer.update(model, grads)
    assert set(nnx.state(model, nnx.Param)) == set(grads) == {"param"}
    assert (model.param[...] < 1).all()
    assert (model.array == 1).all()


def test_a_call_in_training_mode_changes_the_model():
    """In training mode BatchNorm writes its running statistics in every call, and Dropout counts
    its draws."""
    model = noisy()
    assert changed(model, nnx.BatchStat, lambda: model(x))
    assert changed(model, nnx.RngCount, lambda: model(x))


# ---------------------------------------------------------------- graphdef, sharing, modes


def test_merge_makes_a_new_object():
    """`nnx.merge` makes a new object."""
    model = noisy()
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    assert again is not model
    assert again.items[0] is not model.items[0]
    assert nnx.graphdef(again) == graphdef


def test_what_training_and_modes_change():
    """Training changes the state and leaves the graphdef as it was. A mode is a static attribute,
    so `eval()` changes the graphdef."""
    model = noisy()
    before = nnx.graphdef(model)
    train(model)
    assert nnx.graphdef(model) == before
    model.eval()
    assert nnx.graphdef(model) != before
    assert not nnx.is_data(model.drop.deterministic)


def test_equal_graphdefs_share_a_program():
    """equal graphdefs share one, and a different graphdef means another compilation."""
    first, second, third = (Linear(rngs=nnx.Rngs(i)) for i in range(3))
    third.scale = 3.0
    assert traced(lambda model: model(x), [first, second, first]) == 1
    assert traced(lambda model: model(x), [first, third, first]) == 2


def test_sharing_survives_split_and_merge():
    """`nnx.split` stores a shared object once, and `nnx.merge` shares it again."""
    model = Twice(rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(nnx.state(model))) == 1
    merged = nnx.merge(*nnx.split(model))
    assert merged.first is merged.second


def test_a_plain_pytree_loses_sharing():
    """A plain pytree cannot express sharing: `jax.tree.map` gives two copies."""
    model = Twice(rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(model)) == 2
    mapped = jax.tree.map(lambda leaf: leaf, model)
    assert mapped.first is not mapped.second


def test_a_shared_module_is_one_site():
    """there is one site, and it was called twice."""
    record = nni.capture(Twice(rngs=nnx.Rngs(0)))(x)[1]
    assert set(record) == {"", "first"}
    assert len(record["first"].calls) == 2


def test_tree_mode_refuses_sharing():
    """Tree mode refuses a model that holds one Variable in two places."""
    model = Twice(rngs=nnx.Rngs(0))
    nnx.split(model)  # graph mode is the default
    with pytest.raises(ValueError, match="Tree mode"):
        nnx.split(model, graph=False)
    with pytest.raises(ValueError, match="Duplicate"):
        nnx.jit(lambda model: model(x), graph=False)(model)


def test_tree_mode_writes_variables_back():
    """It writes the values of Variables back, but not the attributes that were assigned inside."""

    def add(counts: Counts) -> None:
        counts.variable[...] += 1
        counts.array = counts.array + 1

    tree, graph = Counts(), Counts()
    nnx.jit(add, graph=False)(tree)
    nnx.jit(add)(graph)
    assert (int(tree.variable[...]), int(tree.array)) == (1, 0)
    assert (int(graph.variable[...]), int(graph.array)) == (1, 1)


def test_each_mode_has_one_program():
    """When training mode comes back, the first program is found again."""
    model, traces = noisy(), []

    @nnx.jit
    def forward(model: Noisy) -> jax.Array:
        traces.append(None)
        return model(x)

    for mode in ("train", "eval", "train"):
        getattr(model, mode)()
        forward(model)
    assert len(traces) == 2


def test_evaluation_is_not_random():
    """In evaluation mode nothing is random, so two calls agree."""
    model = noisy()
    assert (model(x) != model(x)).any()
    model.eval()
    assert (model(x) == model(x)).all()


# ---------------------------------------------------------------- transforms and training


def test_jit_writes_back():
    """`nnx.jit` splits the model, merges it inside `jax.jit`, and writes the changes back. Without
    the last step nothing fails, but nothing is kept"""
    by_hand, jitted = noisy(), noisy()
    forgotten = jax.jit(lambda graphdef, state: nnx.merge(graphdef, state)(x))
    assert not changed(by_hand, nnx.BatchStat, lambda: forgotten(*nnx.split(by_hand)))

    @jax.jit
    def written(graphdef: Any, state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        model(x)
        return nnx.state(model)

    nnx.update(by_hand, written(*nnx.split(by_hand)))
    assert changed(jitted, nnx.BatchStat, lambda: nnx.jit(lambda model: model(x))(jitted))
    for one, other in zip(arrays(by_hand), arrays(jitted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_model_that_is_not_an_argument_is_not_written_to():
    """NNX raises an error when a Variable is written to from inside a transform that the model did
    not enter as an argument."""
    model = noisy()
    with pytest.raises(TraceContextError, match="Cannot mutate"):
        jax.jit(lambda: model(x))()


def test_inside_a_transform_is_another_object():
    """Under a transform of NNX the model is another object with an equal graphdef."""
    model, seen = noisy(), []

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append((context.path, context.module is model.norm))
        return next_fun(*args, **kwargs)

    inside: list[bool] = []
    graphdef = nnx.graphdef(model)
    with nni.intercept_methods(note, model=model, only="norm"):
        model(x)
        nnx.jit(lambda model: (inside.append(nnx.graphdef(model) == graphdef), model(x))[1])(model)
    assert seen == [("norm", True), ("norm", False)]
    assert inside == [True]


def train(model: Noisy) -> None:
    """One jitted step."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Noisy, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(squared)(model))

    step(model, optimizer)


def test_gradients_are_a_state_of_params():
    """`nnx.grad` gives a state of `Param`s, with the paths of the model."""
    grads, params = nnx.grad(squared)(noisy()), nnx.state(noisy(), nnx.Param)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert {type(leaf) for _, leaf in nnx.to_flat_state(grads)} == {nnx.Param}


@pytest.mark.parametrize("kind", [nnx.Param, nnx.BatchStat, nnx.RngCount, nnx.RngKey])
def test_what_a_step_changes(kind: Any):
    """The optimizer changes the parameters. The forward pass inside the step changes the
    statistics and the counts of the random streams. The keys never change, and neither does the
    graphdef."""
    model = noisy()
    before = nnx.graphdef(model)
    assert changed(model, kind, lambda: train(model)) == (kind is not nnx.RngKey)
    assert nnx.graphdef(model) == before


def test_a_stack_is_one_object():
    """One object, one path, and Variables with a leading axis of six."""
    made = nnx.split_rngs(splits=6)(nnx.vmap(lambda rngs: Linear(rngs=rngs)))(nnx.Rngs(0))
    assert made.kernel.shape == (6, 3, 3)
    assert (made.kernel[0] != made.kernel[1]).any()


# ---------------------------------------------------------------- random numbers


def test_a_draw_folds_the_count_in():
    """A draw folds the count into the key and adds one to the count."""
    stream = nnx.Rngs(0).default
    for count in range(3):
        assert stream() == jax.random.fold_in(jax.random.key(0), count)
        assert int(stream.count[...]) == count + 1


def test_names_without_a_stream_draw_from_the_default():
    """`nnx.Rngs(0)` has one stream, `default`, and every name that has no stream of its own draws
    from it. `nnx.Rngs(0, dropout=1)` has two."""
    one, two = nnx.Rngs(0), nnx.Rngs(0, dropout=1)
    for rngs in (one, two):
        rngs.params(), rngs.dropout()
    assert int(one.default.count[...]) == 2
    assert int(two.default.count[...]) == int(two.dropout.count[...]) == 1


def test_dropout_has_its_own_stream():
    """`nnx.Dropout` makes a stream of its own from the one it is given."""
    rngs = nnx.Rngs(0)
    drop = nnx.Dropout(0.5, rngs=rngs)
    drop(x)
    assert (int(rngs.default.count[...]), int(drop.rngs.count[...])) == (1, 1)
    assert drop.rngs.key[...] != rngs.default.key[...]


rows = jnp.ones((4, 32))


def dropped(drop: nnx.Dropout, row: jax.Array) -> jax.Array:
    return drop(row)


def test_a_stream_that_is_not_mapped_gives_one_mask():
    """Under `nnx.vmap` a stream that is not mapped over gives every row the same mask."""
    y = nnx.vmap(dropped, in_axes=(None, 0))(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), rows)
    assert (y == y[0]).all()
    assert 0 < (y == 0).sum() < y.size


def test_split_rngs_gives_each_row_its_own():
    """`nnx.split_rngs` splits each stream into keys, one for each row, and afterwards puts
    the stream back, advanced by one draw."""
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key, axes = drop.rngs.key[...], nnx.StateAxes({nnx.RngState: 0, ...: None})
    y = nnx.split_rngs(splits=4)(nnx.vmap(dropped, in_axes=(axes, 0)))(drop, rows)
    assert len(np.unique(np.asarray(y), axis=0)) == 4
    assert drop.rngs.key[...] == key
    assert int(drop.rngs.count[...]) == 1


def test_a_jitted_function_draws_anew():
    """A jitted function draws a new mask in each call, because the count leaves the program as
    state."""
    drop, jitted = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.jit(dropped)
    assert (jitted(drop, rows) != jitted(drop, rows)).any()
    assert int(drop.rngs.count[...]) == 2


def test_remat_draws_the_same_mask_twice():
    """`nnx.remat` computes a block twice and uses the same mask both times."""
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    twin = nnx.clone(drop)
    grad = nnx.grad(lambda rows, drop: nnx.remat(dropped)(drop, rows).sum())(rows, drop)
    assert (grad == twin(rows)).all()
    assert int(drop.rngs.count[...]) == 1


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_of_numpy_restores_a_model():
    """`nnx.to_pure_dict` turns it into nested dictionaries of arrays, which any format can
    hold."""
    from flax.traverse_util import unflatten_dict

    model = noisy()
    train(model)
    model.eval()
    pure = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    flat = {"/".join(map(str, path)): a for path, a in leaves(pure)}
    file = io.BytesIO()
    np.savez(file, **flat)
    file.seek(0)
    saved = nnx.restore_int_paths(unflatten_dict(dict(np.load(file)), sep="/"))

    graphdef, state = nnx.split(nnx.eval_shape(noisy))
    assert isinstance(nnx.to_pure_dict(state)["norm"]["mean"], jax.ShapeDtypeStruct)
    nnx.replace_by_pure_dict(state, saved)
    restored = nnx.merge(graphdef, state)
    restored.eval()
    assert (restored(x) == model(x)).all()


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for key, part in tree.items() for leaf in leaves(part, (*path, key))]


def test_keys_are_no_numbers_to_numpy():
    """To NumPy, random keys are not numbers: `jax.random.key_data` returns their numbers, and
    `jax.random.wrap_key_data` turns these into keys again."""
    key = nnx.Rngs(0).default.key[...]
    with pytest.raises(TypeError, match="PRNGKey"):
        np.asarray(key)
    numbers = np.asarray(jax.random.key_data(key))
    assert jax.random.wrap_key_data(jnp.asarray(numbers)) == key


def test_what_a_restore_checks():
    """A path that the model does not have raises an error. What the checkpoint does not have stays
    as it was in the model, and `nnx.update` does not check shapes."""
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    state, kernel = nnx.state(linear), linear.kernel[...]
    with pytest.raises(ValueError, match="not available"):
        nnx.replace_by_pure_dict(state, {"weight": kernel})
    nnx.replace_by_pure_dict(state, {"bias": jnp.ones(3)})
    nnx.update(linear, state)
    assert (linear.kernel[...] == kernel).all()
    assert (linear.bias[...] == 1).all()
    nnx.update(linear, nnx.state(nnx.Linear(5, 7, rngs=nnx.Rngs(0))))
    assert linear.kernel.shape == (5, 7)
