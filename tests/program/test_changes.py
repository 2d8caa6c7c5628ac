"""The Variables that a call changes, and by how much, against a plain call of the model.

`trace` lists the Variables; a record has the amounts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import ZOO, batch, rngs

import nnx_inspector as nni
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.program.analysis.calls import TracedCall
from nnx_inspector.program.changes import difference

X = batch(4, 3)


class Layer(nnx.Module):
    """Statistics, a random stream, a counter that goes down, and parameters that stay."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.left = nnx.Variable(jnp.uint32(7))

    def __call__(self, x):
        self.left[...] -= 2
        return self.drop(self.norm(self.linear(x)))


CHANGED = {"norm/mean", "norm/var", "drop/rngs/count", "left"}


class Within(nnx.Module):
    def __init__(self, run):
        self.layer = Layer(rngs())
        self.run = run

    def __call__(self, x):
        return self.run(self.layer, x)


class Stack(nnx.Module):
    """Three layers under one module, their axis at `axis`."""

    def __init__(self, run):
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs())
        self.run = run

    def __call__(self, x):
        return self.run(self.layers, x)


def call(m, x):
    return m(x)


STACKED = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
CARRIED = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}

WITHIN = {
    "plain": call,
    "jit": lambda m, x: nnx.jit(call)(m, x),
    "remat": lambda m, x: nnx.remat(call)(m, x),
    "jit of remat of jit": lambda m, x: nnx.jit(nnx.remat(nnx.jit(call)))(m, x),
    "cond": lambda m, x: nnx.cond(x.sum() > -99, call, lambda m, x: x, m, x),
    "switch": lambda m, x: nnx.switch(1, [lambda m, x: x, call], m, x),
    "fori_loop": lambda m, x: nnx.fori_loop(0, 3, lambda i, s: (s[0], s[0](s[1])), (m, x))[1],
    "while_loop": lambda m, x: nnx.while_loop(
        lambda s: s[2] < 3, lambda s: (s[0], s[0](s[1]), s[2] + 1), (m, x, 0)
    )[1],
    "scan": lambda m, x: nnx.scan(lambda m, x: (m, m(x)), **CARRIED)(m, jnp.stack([x, x]))[1],
    "scan of remat": lambda m, x: nnx.scan(nnx.remat(lambda m, x: (m, m(x))), **CARRIED)(
        m, jnp.stack([x, x])
    )[1],
    "value_and_grad": lambda m, x: nnx.value_and_grad(lambda m: m(x).sum())(m)[0],
    "grad of remat": lambda m, x: nnx.value_and_grad(lambda m: nnx.remat(call)(m, x).sum())(m)[0],
    "grad of scan": lambda m, x: nnx.value_and_grad(
        lambda m: nnx.scan(lambda m, x: (m, m(x)), **CARRIED)(m, jnp.stack([x, x]))[1].sum()
    )(m)[0],
}
WITHIN |= {
    "jit in tree mode": lambda m, x: nnx.jit(call, graph=False)(m, x),
    "remat in tree mode": lambda m, x: nnx.remat(call, graph=False)(m, x),
    "scan in tree mode": lambda m, x: nnx.scan(lambda m, x: (m, m(x)), **CARRIED, graph=False)(
        m, jnp.stack([x, x])
    )[1],
}
STACKS = {
    "scan": lambda m, x: nnx.scan(call, **STACKED)(m, x),
    "scan of remat": lambda m, x: nnx.scan(nnx.remat(call), **STACKED)(m, x),
    "vmap": lambda m, x: nnx.vmap(call, in_axes=(0, None))(m, x),
    "vmap of jit": lambda m, x: nnx.vmap(nnx.jit(call), in_axes=(0, None))(m, x),
    "grad of scan of remat": lambda m, x: nnx.value_and_grad(
        lambda m: nnx.scan(nnx.remat(call), **STACKED)(m, x).sum()
    )(m)[0],
}


def numbers(value):
    array = value[0] if isinstance(value, tuple) else value
    if jnp.issubdtype(jnp.asarray(array).dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def held(model) -> dict[str, np.ndarray]:
    return {site_key(path): numbers(value) for path, _, value in contents(model)}


def changed_by(model, *args, **kwargs) -> dict[str, np.ndarray]:
    """By how much a plain call changes each Variable that it changes."""
    before = held(model)
    model(*args, **kwargs)
    after = held(model)
    return {
        key: value.astype(float) - before[key].astype(float)
        for key, value in after.items()
        if key in before and not np.array_equal(value, before[key])
    }


def check_summary(summary, expected: np.ndarray) -> None:
    exact = bool((expected == np.round(expected)).all())
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 2e-6}
    for name in ("mean", "min", "max"):
        np.testing.assert_allclose(
            getattr(summary, name), getattr(expected, name)(), err_msg=name, **tolerance
        )
    assert summary.size == expected.size


def named(call: TracedCall) -> set[str]:
    return {variable.name for variable in call.changed}


@pytest.mark.parametrize(
    ("make", "how"), [(Within, k) for k in WITHIN] + [(Stack, k) for k in STACKS]
)
def test_trace_names_what_a_call_changes_and_nothing_that_passes_through(make, how):
    run = (WITHIN if make is Within else STACKS)[how]
    trace = nni.trace(make(run), X)
    below = "layer" if make is Within else "layers"
    assert set(changed_by(make(run), X)) == {f"{below}/{name}" for name in CHANGED}
    by_site = {c.site: named(c) for c in trace.calls}
    assert by_site == {
        "": {f"{below}/{name}" for name in CHANGED},
        below: CHANGED,
        f"{below}/linear": set(),
        f"{below}/norm": {"mean", "var"},
        f"{below}/drop": {"rngs/count"},
    }


@pytest.mark.parametrize("how", WITHIN)
def test_a_record_says_by_how_much(how):
    expected = changed_by(Within(WITHIN[how]), X)
    _, record = nnx.jit(lambda m, x: nni.capture(m)(x))(Within(WITHIN[how]), X)
    root = record[""].calls[0].changes
    assert set(root) == set(expected)
    for name, summary in root.items():
        check_summary(summary, expected[name])
    # the layer's own calls, each by itself, add up to it
    changes = record["layer"].changes
    assert set(changes) == CHANGED
    count = np.sum(record["layer"].calls[0].ran)
    for name, summary in changes.items():
        np.testing.assert_allclose(
            summary.mean * count, expected[f"layer/{name}"].mean(), rtol=1e-4, atol=2e-6
        )
    assert record["layer/linear"].changes == {}


@pytest.mark.parametrize("how", ["plain", "jit of remat of jit", "cond", "fori_loop"])
def test_an_eager_record_says_the_same(how):
    expected = changed_by(Within(WITHIN[how]), X)
    _, record = nni.capture(Within(WITHIN[how]))(X)
    assert set(record[""].changes) == set(expected)
    for name, summary in record[""].changes.items():
        check_summary(summary, expected[name])


@pytest.mark.parametrize("how", STACKS)
def test_a_record_of_a_stack_has_a_row_a_layer(how):
    expected = changed_by(Stack(STACKS[how]), X)
    _, record = nni.capture(Stack(STACKS[how]))(X)
    for name, summary in record["layers"].changes.items():
        check_summary(summary, expected[f"layers/{name}"])
    if "scan" in how:
        assert record["layers"].rows == 3
        for i in range(3):
            for name, summary in record[f"layers[{i}]"].changes.items():
                check_summary(summary, expected[f"layers/{name}"][i])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("within", [call, nnx.jit(call), nnx.remat(call)])
@pytest.mark.parametrize(
    "over",
    [
        lambda f, axis: nnx.scan(f, in_axes=(axis, nnx.Carry), out_axes=nnx.Carry),
        lambda f, axis: nnx.vmap(f, in_axes=(axis, None), out_axes=0),
    ],
)
def test_a_stack_along_any_axis(axis, within, over):
    class Norms(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda: nnx.BatchNorm(3, rngs=rngs()), out_axes=axis, axis_size=2)
            self.norms = make()

        def __call__(self, x):
            return over(within, axis)(self.norms, x)

    expected = changed_by(Norms(), X)
    assert set(expected) == {"norms/mean", "norms/var"}
    assert [named(c) for c in nni.trace(Norms(), X).calls] == [set(expected), {"mean", "var"}]
    _, record = nni.capture(Norms())(X)
    for name, summary in record["norms"].changes.items():
        check_summary(summary, expected[f"norms/{name}"])


def test_gradients_do_not_disturb_it():
    def loss(m, x):
        return (m(x) ** 2).sum()

    (_, record), grads = nni.value_and_grad(loss)(Within(WITHIN["remat"]), X)
    expected = changed_by(Within(WITHIN["plain"]), X)
    for name, summary in record[""].changes.items():
        check_summary(summary, expected[name])
    plain = nnx.grad(loss)(Within(WITHIN["remat"]), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # sow and perturb outside nnx.capture
@pytest.mark.parametrize("name", sorted(ZOO))
def test_of_any_model_the_trace_names_what_a_plain_call_changes(name):
    case = ZOO[name]()
    trace = nni.trace(case.model, *case.args, **case.kwargs)
    created = {v.name for v in trace.calls[0].changed if not v.before or not v.after}
    case = ZOO[name]()
    before = set(held(case.model))
    expected = set(changed_by(case.model, *case.args, **case.kwargs))
    created_by_it = set(held(case.model)) - before
    assert named(trace.calls[0]) - created == expected
    assert created == created_by_it


def test_a_cache_that_is_written_to():
    model = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs())
    model.init_cache((2, 5, 4))
    twin = nnx.clone(model)
    x = batch(2, 1, 4)
    expected = changed_by(twin, x)
    assert {v.type for v in nni.trace(model, x).calls[0].changed} == {"Cache"}
    for index in range(2):
        _, record = nni.capture(model)(x)
        assert set(record[""].changes) == {"cache_index", "cached_key", "cached_value"}
        for name, summary in record[""].changes.items():
            check_summary(summary, expected[name])
        expected = changed_by(twin, x)
        assert model.cache_index[...] == index + 1


def test_a_transform_that_drops_what_changed():
    model = Within(lambda m, x: jax.jit(call)(m, x))
    assert changed_by(Within(model.run), X) == {}
    assert {c.site: named(c) for c in nni.trace(model, X).calls[:2]} == {
        "": set(),
        "layer": CHANGED,
    }


def test_calls_are_told_apart_and_merged():
    class Twice(nnx.Module):
        def __init__(self):
            self.layer = Layer(rngs())

        def __call__(self, x):
            self.layer(x)
            return self.layer(x + 1)

    _, record = nni.capture(Twice())(X)
    twin = Layer(rngs())
    for number, x in enumerate((X, X + 1)):
        expected = changed_by(twin, x)
        for name, summary in record["layer"].calls[number].changes.items():
            check_summary(summary, expected[name])
    assert record["layer"].changes["drop/rngs/count"].size == 2
    assert record["layer"].changes["left"].mean == -2
    assert record[""].changes["layer/left"].mean == -4


def test_a_branch_that_is_not_taken_changes_nothing_then():
    model = Within(lambda m, x: nnx.cond(x.sum() > 1e6, call, lambda m, x: x, m, x))
    assert named(nni.trace(model, X).calls[0]) == {f"layer/{n}" for n in CHANGED}  # it may
    _, record = nni.capture(model)(X)
    assert record["layer"].changes == {}
    assert all(s.min == s.max == 0 for s in record[""].changes.values())


def test_what_a_call_writes_back_as_it_was_is_no_change():
    class Writes(nnx.Module):
        def __init__(self):
            self.same, self.other = nnx.Cache(jnp.ones(2)), nnx.Cache(jnp.ones(2))

        def __call__(self, x):
            self.same[...] = nnx.jit(lambda v: v)(self.same[...])
            self.other[...] = self.other[...] * 1  # another value, as far as the program says
            return x

    assert named(nni.trace(Writes(), X).calls[0]) == {"other"}
    _, record = nni.capture(Writes())(X)
    assert {k: s.max for k, s in record[""].changes.items()} == {"other": 0}


def test_variables_that_come_go_and_change_their_shape():
    class Restless(nnx.Module):
        def __init__(self):
            self.old, self.grows = nnx.Cache(jnp.ones(2)), nnx.Cache(jnp.ones(2))

        def __call__(self, x):
            del self.old
            self.new = nnx.Intermediate(x)
            self.grows = nnx.Cache(jnp.ones(5))
            return x

    (call,) = nni.trace(Restless(), X).calls
    assert list(map(str, call.changed)) == [
        "grows (Cache float32[2] -> float32[5])",
        "old (Cache deleted)",
        "new (Intermediate created)",
    ]
    _, record = nni.capture(Restless())(X)
    assert record[""].changes == {}


def test_a_key_is_told_without_numbers():
    class Rekeys(nnx.Module):
        def __init__(self):
            self.rngs = rngs()

        def __call__(self, x):
            self.rngs.default.key[...] = jax.random.fold_in(self.rngs.default.key[...], 1)
            return x

    (call,) = nni.trace(Rekeys(), X).calls
    assert list(map(str, call.changed)) == ["rngs/default/key (RngKey)"]
    assert call.changed[0].after == "key<fry>[]"
    assert nni.capture(Rekeys())(X)[1][""].changes == {}


def test_a_variable_that_holds_a_tree_is_told_array_by_array():
    class Holds(nnx.Module):
        def __init__(self):
            self.pair = nnx.Variable((jnp.ones(2), {"n": jnp.int32(3)}))

        def __call__(self, x):
            first, rest = self.pair.get_value()
            self.pair.set_value((first, {"n": rest["n"] + 4}))
            return x

    (call,) = nni.trace(Holds(), X).calls
    assert list(map(str, call.changed)) == ["pair[1]['n'] (Variable)"]
    changes = nni.capture(Holds())(X)[1][""].changes
    assert {name: s.mean for name, s in changes.items()} == {"pair[1]['n']": 4}


def test_a_frame_has_a_row_for_each_change():
    _, record = nni.capture(Within(call))(X)
    frame = record.to_frame()
    rows = frame[(frame.quantity == "change") & (frame.site == "layer")].set_index("array")
    assert set(rows.index) == CHANGED
    assert rows.loc["left", "mean"] == -2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.uint32([7, 0]), np.uint32([5, 2**31 - 1])),
        (np.int32([-5, 2**31 - 1]), np.int32([5, 2**30])),
        (np.uint8([255, 0]), np.uint8([0, 255])),
        (np.int8([-128, 127]), np.int8([127, -128])),
        (np.bool_([True, False]), np.bool_([False, True])),
        (np.float16([6e4]), np.float16([-6e4])),
        (np.float32([1e20, 1]), np.float32([1, 1e20])),
    ],
)
def test_a_difference_is_exact_where_its_dtype_is_narrow(old, new):
    found = np.asarray(difference(jnp.asarray(old), jnp.asarray(new)), float)
    wide = np.float32 if old.dtype == np.float32 else float
    np.testing.assert_array_equal(found, new.astype(wide) - old.astype(wide))


def test_nothing_is_summarised_where_nothing_changes():
    class Passes(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, x):
            return nnx.remat(nnx.jit(call))(self.linear, x)

    model = Passes()
    _, record = nni.capture(model)(X)
    assert all(c.changed == [] for key in record for c in record[key].calls)
    _, plain = nni.capture(model.linear)(X)
    (words,), (of_one,) = jax.tree.leaves(record), jax.tree.leaves(plain)
    assert words.size == 2 * of_one.size


@pytest.mark.parametrize("first", [0, 1.0])
def test_a_number_of_python_that_a_call_counts_up(first):
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(first)

        def __call__(self, x):
            self.calls.set_value(self.calls.get_value() + 1)
            return x

    model = Counting()
    _, record = nni.capture(model)(jnp.ones(2))
    assert record[""].changes["calls"].mean == 1
    assert model.calls.get_value() == first + 1
