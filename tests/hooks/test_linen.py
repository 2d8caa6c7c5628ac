"""Linen modules inside `nnx.bridge.ToNNX`, and NNX modules inside `ToLinen`, seen as sites.

The oracle is the same network written out with jnp; gradients are `jax.grad`'s by an added zero.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from inside import inside
from leftovers import arrays_of

import nnx_inspector as nni
from nnx_inspector.stats.summary import Summary

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


# ------------------------------------------------------------------- models


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4)(x))
        return nn.Dense(2)(x)


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Mlp(name="mlp")(x)
        return nn.Dense(3, name="out")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(3)(x))


class Listed(nn.Module):
    """setup-style, modules in a list and in a dict, and a method of its own."""

    def setup(self):
        self.layers = [nn.Dense(3), nn.Dense(3)]
        self.heads = {"a": nn.Dense(2), "b": nn.Dense(1)}

    def __call__(self, x):
        x = self.encode(x)
        return self.heads["a"](x), self._hidden(self.heads["b"](x))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def _hidden(self, x):
        return -x


class Stateful(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        lifted = nn.scan(
            ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return lifted(name="layers")(x, None)[0]


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = jnp.tanh(nn.Dense(3)(x))
        return x, x


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        lifted = nn.vmap(
            nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
        )
        return lifted(2, name="each")(x)


class Rematted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Block)(name="block")(x)


JitBlock = nn.jit(Block)


class Jitted(nn.Module):
    """Two equal modules, which Linen compiles once."""

    @nn.compact
    def __call__(self, x):
        first, second = JitBlock(name="first"), JitBlock(name="second")
        return second(first(first(second(first(x)))))


class JittedMethod(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.SimpleCell(4, name="cell"))(x[None])


class Sub(Mlp):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x) + 1


class Shared(nn.Module):
    def setup(self):
        self.one = nn.Dense(3)

    def __call__(self, x):
        return self.one(self.one(x))


class Host(nnx.Module):
    """An NNX model with a Linen module among its own."""

    def __init__(self, linen: nn.Module, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 3, rngs=rngs)
        self.wrapped = nnx.bridge.ToNNX(linen, rngs=rngs)

    def __call__(self, x, **kwargs):
        return self.wrapped(self.inner(x), **kwargs)


@functools.cache
def built(linen: nn.Module) -> Host:
    model = Host(linen, nnx.Rngs(0, dropout=1))
    nnx.bridge.lazy_init(model, X)
    return model


def host(linen: nn.Module) -> Host:
    """A copy of its own, because building one takes longer than most tests of it."""
    return nnx.clone(built(linen))


def calls(run, *args, only=None, model=None, **kwargs) -> list[str]:
    """The keys of the calls that an interceptor sees, in the order in which they begin."""
    found = []

    def note(next_fun, args, kwargs, context):
        found.append(context.site)
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(note, only=only, model=model):
        run(*args, **kwargs)
    return found


def is_summary(x) -> bool:
    return isinstance(x, Summary)


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


# -------------------------------------------------------------- which sites


SITES = {
    "compact": (Mlp, ["wrapped/Dense_0", "wrapped/Dense_1"]),
    "nested": (
        Nested,
        ["wrapped/mlp", "wrapped/mlp/Dense_0", "wrapped/mlp/Dense_1", "wrapped/out"],
    ),
    "setup": (
        Listed,
        ["wrapped:encode", "wrapped/layers_0", "wrapped/layers_1", "wrapped/heads_a",
         "wrapped/heads_b"],
    ),
    "state": (Stateful, ["wrapped/Dense_0", "wrapped/BatchNorm_0", "wrapped/Dropout_0"]),
    "remat": (Rematted, ["wrapped/block", "wrapped/block/Dense_0"]),
    "super": (Sub, ["wrapped/Dense_0", "wrapped/Dense_1"]),
    "shared": (Shared, ["wrapped/one", "wrapped/one"]),
    "a jitted method": (JittedMethod, ["wrapped/Dense_0"]),
    "vmap": (Mapped, ["wrapped/each"]),
}  # fmt: skip


@pytest.mark.parametrize(("linen", "below"), SITES.values(), ids=SITES)
@pytest.mark.parametrize("known", [True, False], ids=["model=", "outermost"])
def test_each_call_of_a_linen_submodule_is_one_call_of_a_site(linen, below, known):
    model = host(linen())
    mutable = {"mutable": ["batch_stats"]}
    found = calls(model, X, model=model if known else None, **mutable)
    order = {key: number for number, key in enumerate(found)}
    assert sorted(found) == sorted(["", "inner", "wrapped", *below])
    assert order[""] < order["inner"] < order["wrapped"] == 2


def test_a_linen_module_alone_is_the_root():
    model = nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0)).lazy_init(X)
    assert sorted(calls(model, X)) == ["", "Dense_0", "Dense_1"]


def test_the_context_tells_the_linen_module_and_its_method():
    model, found = host(Listed()), {}

    def note(next_fun, args, kwargs, context):
        found[context.site] = context
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(note):
        model(X)
    context = found["wrapped/layers_0"]
    assert isinstance(context.module, nn.Dense)
    assert (context.path, context.method_name, context.call) == ("wrapped/layers_0", "__call__", 0)
    assert (context.kind, context.type_name) == ("linen", "Dense")
    assert found["wrapped:encode"].method_name == "encode"
    assert isinstance(found["wrapped"].module, nnx.bridge.ToNNX)


DENSES = ["wrapped/heads_a", "wrapped/heads_b", "wrapped/layers_0", "wrapped/layers_1"]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("wrapped/*", DENSES),
        ("**/layers_1", ["wrapped/layers_1"]),
        ("**:encode", ["wrapped:encode"]),
        (nn.Dense, DENSES),
        (lambda path, module: getattr(module, "features", 0) == 1, ["wrapped/heads_b"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False], ids=["model=", "outermost"])
def test_filters_select_linen_sites(only, expected, known):
    model = host(Listed())
    assert sorted(calls(model, X, only=only, model=model if known else None)) == expected


def test_a_type_selects_a_linen_module_that_is_wrapped_alone():
    model = nnx.Sequential(nnx.bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)))
    nnx.bridge.lazy_init(model, X)
    for known in (model, None):
        assert calls(model, X, only=nn.Dense, model=known) == ["layers/0"]
    holds = host(HoldsNnx())
    expected = ["wrapped/first", "wrapped/second"]
    assert calls(holds, X, only=Small) == calls(holds, X, only=Small, model=holds) == expected


@pytest.mark.parametrize("known", [True, False], ids=["model=", "outermost"])
@pytest.mark.parametrize("only", ["wrapped/layers_7", nn.Conv, lambda path, module: False])
def test_a_selection_that_matches_no_linen_site_is_an_error(only, known):
    model = host(Listed())
    closest = "'wrapped/layers_[01]'" if isinstance(only, str) else "matches no site"
    with pytest.raises(ValueError, match=closest):
        calls(model, X, only=only, model=model if known else None)
    with (
        pytest.raises(ValueError, match=closest),
        nni.perturb(only, nni.Zero(), model=model if known else None),
    ):
        model(X)
    with pytest.raises(ValueError, match=closest):
        nni.capture(model, only=only)(X)


def test_a_site_that_has_no_variables_can_be_selected():
    model = host(Stateful())
    mutable = {"mutable": ["batch_stats"]}
    assert calls(model, X, only="**/Dropout_0", model=model, **mutable) == ["wrapped/Dropout_0"]
    assert list(nni.capture(model, only=nn.Dropout)(X, **mutable)[1]) == ["wrapped/Dropout_0"]


@pytest.mark.parametrize("method", ["encode", Listed.encode], ids=["by name", "the function"])
def test_a_method_that_is_called_by_method(method):
    model = host(Listed())
    layers = ["wrapped/layers_0", "wrapped/layers_1"]
    assert calls(model.wrapped, X, method=method, model=model) == [
        "wrapped", "wrapped:encode", *layers,
    ]  # fmt: skip
    assert calls(model.wrapped.encode, X, model=model) == ["wrapped", "wrapped:encode", *layers]


def test_a_method_of_the_linen_module_can_be_captured_and_traced():
    model = host(Listed()).wrapped
    expected = ["", ":encode", "layers_0", "layers_1"]
    y, record = nni.capture(model.encode, only=["**", "**:*"])(X)
    assert sorted(record) == expected
    np.testing.assert_array_equal(y, model.encode(X))
    assert [call.site for call in nni.trace(model.encode, X, only=["**", "**:*"]).calls] == expected


def test_a_function_over_the_linen_module_is_no_site():
    model = host(Listed())
    found = calls(model.wrapped, X, method=lambda m, x: m.layers[1](m.encode(x)), model=model)
    assert found == ["wrapped", "wrapped:encode", "wrapped/layers_0"] + 2 * ["wrapped/layers_1"]


def test_lifted_loops_are_seen_from_inside():
    model = host(Scanned())
    found = calls(nnx.jit(lambda m, x: m(x)), model, X, model=model)
    assert set(found) == {"", "inner", "wrapped", "wrapped/layers", "wrapped/layers/Dense_0"}


def test_a_lifted_function_is_no_site_and_its_module_is():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.Dense(3, name="cell")

            def encode(module, carry, _):
                return module(carry), None

            scan = nn.scan(encode, variable_broadcast="params", split_rngs={"params": False},
                           length=2)  # fmt: skip
            return scan(cell, x, None)[0]

    assert set(calls(host(Body()), X)) == {"", "inner", "wrapped", "wrapped/cell"}


def test_setup_that_linen_runs_to_check_it_is_no_call():
    class Ready(nn.Module):
        def setup(self):
            self.one = nn.Dense(3)
            self.prepare()

        def prepare(self):
            pass

        def __call__(self, x):
            return self.one(x)

    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Ready)(name="ready")(x)

    found = calls(host(Lifted()), X)
    assert found.count("wrapped/ready:prepare") <= 2
    assert "wrapped:prepare" not in found
    assert found.count("wrapped/ready/one") == 1


def test_modules_that_share_a_scope_are_two_sites():
    class Adapted(nn.Module):
        def setup(self):
            self.base = nn.Dense(3)
            nn.share_scope(self, self.base)

        def __call__(self, x):
            return self.base(x) + 1

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Adapted(name="adapted")(x)

    found = calls(host(Outer()), X)
    assert found[3:] == ["wrapped/adapted", "wrapped/adapted/base"]
    assert calls(host(Adapted()), X)[2:] == ["wrapped", "wrapped/base"]


def test_linen_modules_that_are_applied_by_hand_are_unattributed():
    class ByHand(nn.Module):
        @nn.compact
        def __call__(self, x):
            other = Mlp(parent=None)
            variables = other.init(jax.random.key(0), x)
            bound = Block(parent=None).bind({"params": {"Dense_0": {
                "kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}})  # fmt: skip
            held = Listed(parent=None).bind(Listed(parent=None).init(jax.random.key(0), x))
            y = bound(x) + held.layers[0](x) + other.apply(variables, x).sum()
            return nn.Dense(3)(x) + y

    model = host(ByHand())
    assert calls(model, X, model=model) == ["", "inner", "wrapped", "wrapped/Dense_0"]
    _, record = nni.capture(model)(X)
    assert sorted(record) == ["", "inner", "wrapped", "wrapped/Dense_0"]
    assert "2 unattributed calls" in record.unseen["(Mlp)"]
    assert "1 unattributed call " in record.unseen["(Block)"]
    assert "1 unattributed call " in record.unseen["(Dense)"]


def test_a_linen_module_inside_an_unknown_tonnx_has_no_path():
    model, other = host(Mlp()), nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0)).lazy_init(X)
    assert calls(other, X, model=model) == []
    other.to_nnx__rngs = None  # its streams belong to another trace
    _, record = nni.capture(lambda m, x: m(x) + other(x))(model, X)
    assert "1 unattributed call " in record.unseen["(ToNNX)"]


# ---------------------------------------------- what is computed stays the same


@pytest.mark.parametrize(("linen", "_"), SITES.values(), ids=SITES)
def test_results_and_state_are_those_without_us(linen, _):
    plain, watched = host(linen()), host(linen())
    run = lambda m: m(X, mutable=["batch_stats"])  # noqa: E731
    expected = [run(plain), run(plain)]
    with nni.intercept_methods(lambda f, a, k, c: f(*a, **k)):
        found = [run(watched), run(watched)]
    same(expected, found)
    same(arrays_of(nnx.state(plain)), arrays_of(nnx.state(watched)))


@pytest.mark.parametrize("linen", [Stateful, Scanned, Jitted, Rematted])
def test_capture_gives_the_plain_result_and_state(linen):
    plain, watched = host(linen()), host(linen())
    expected = plain(X, mutable=["batch_stats"])
    found, record = nni.capture(watched)(X, mutable=["batch_stats"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    for a, b in zip(arrays_of(nnx.state(plain)), arrays_of(nnx.state(watched)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert record["wrapped"].output.size == found.size


def test_batch_statistics_are_updated_under_capture_as_without_it():
    model = host(Stateful())
    before = np.asarray(model.wrapped.BatchNorm_0["mean"][...])
    nni.capture(model)(X, mutable=["batch_stats"])
    assert not np.array_equal(before, model.wrapped.BatchNorm_0["mean"][...])


# ------------------------------------------------------------------ summaries


def written_out(model: Host, x, zeros):
    """Host(Mlp) with jnp, and a zero added at each site's output."""
    taken = model.wrapped
    kernel = lambda m: m["kernel"][...]  # noqa: E731
    inner = x @ model.inner.kernel[...] + model.inner.bias[...] + zeros["inner"]
    up = inner @ kernel(taken.Dense_0) + taken.Dense_0["bias"][...] + zeros["wrapped/Dense_0"]
    hidden = jnp.tanh(up)
    down = hidden @ kernel(taken.Dense_1) + taken.Dense_1["bias"][...] + zeros["wrapped/Dense_1"]
    return down, {"inner": inner, "wrapped/Dense_0": up, "wrapped/Dense_1": down,
                  "wrapped": down, "": down, "inputs": {"wrapped/Dense_1": hidden}}  # fmt: skip


ZEROS = {
    "inner": jnp.zeros((5, 3)),
    "wrapped/Dense_0": jnp.zeros((5, 4)),
    "wrapped/Dense_1": jnp.zeros((5, 2)),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_outputs_and_inputs_against_the_network_written_out(jit):
    model = host(Mlp())
    run = lambda m, x: nni.capture(m)(x)  # noqa: E731
    _, record = (nnx.jit(run) if jit else run)(model, X)
    _, values = written_out(model, X, ZEROS)
    assert sorted(record) == ["", "inner", "wrapped", "wrapped/Dense_0", "wrapped/Dense_1"]
    for site in record:
        value = np.asarray(values[site])
        np.testing.assert_allclose(record[site].output.mean, value.mean(), rtol=1e-4)
        np.testing.assert_allclose(record[site].output.max, value.max(), rtol=1e-5)
    entered = np.asarray(values["inputs"]["wrapped/Dense_1"])
    np.testing.assert_allclose(record["wrapped/Dense_1"].input.std, entered.std(), rtol=1e-4)


def test_gradients_against_the_network_written_out():
    model = host(Mlp())
    loss_fn = lambda m, x: (m(x) ** 2).sum()  # noqa: E731
    run = lambda m, x: nni.value_and_grad(loss_fn)(m, x)  # noqa: E731
    (loss, record), grads = nnx.jit(run)(model, X)
    oracle = jax.grad(lambda z: (written_out(model, X, z)[0] ** 2).sum())(ZEROS)
    for site, expected in oracle.items():
        norm = np.linalg.norm(np.asarray(expected).ravel())
        np.testing.assert_allclose(record[site].gradient.norm, norm, rtol=1e-4)
    plain_loss, plain_grads = nnx.value_and_grad(loss_fn)(model, X)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, plain_grads)


def test_a_scanned_block_has_a_row_a_layer():
    model = host(Scanned())
    _, record = nni.capture(model)(X)
    dense = model.wrapped.layers["Dense_0"]
    x = X @ model.inner.kernel[...] + model.inner.bias[...]
    means = []
    for layer in range(3):
        y = x @ dense["kernel"][layer] + dense["bias"][layer]
        means.append(float(y.mean()))
        x = jnp.tanh(y)
    entry = record["wrapped/layers/Dense_0"]
    assert entry.rows == 3
    np.testing.assert_allclose(
        [entry.row(layer).output.mean for layer in range(3)], means, rtol=1e-4
    )


@pytest.mark.parametrize("linen", [Rematted, Mapped, Scanned, Jitted])
def test_gradients_through_lifted_transforms_are_finite_and_sum_up(linen):
    model = host(linen())
    loss_fn = lambda m, x: (m(x) ** 2).sum()  # noqa: E731
    (_, record), _ = nni.value_and_grad(loss_fn)(model, X)
    out = model(X)
    np.testing.assert_allclose(
        record["wrapped"].gradient.norm, 2 * jnp.linalg.norm(out.ravel()), rtol=1e-4
    )
    inside = [key for key in record if key.startswith("wrapped/")]
    assert inside
    for key in inside:
        assert all(g.norm > 0 for g in jax.tree.leaves(record[key].gradient, is_leaf=is_summary))
    assert not record.unseen


# ------------------------------------------------- equal modules are kept apart


def test_two_tonnx_of_one_class_are_two():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.bridge.ToNNX(Mlp(), rngs=rngs)
            self.b = nnx.bridge.ToNNX(Mlp(), rngs=rngs)

        def __call__(self, x):
            return self.a(x), 10 * self.b(x)

    model = Pair(nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    (a, b), record = nni.capture(model)(X)
    for key, value in (("a/Dense_1", a), ("b/Dense_1", b / 10)):
        np.testing.assert_allclose(record[key].output.mean, np.asarray(value).mean(), rtol=1e-4)
    with nni.perturb("b/Dense_1", nni.Zero()):
        c, d = model(X)
    np.testing.assert_array_equal(a, c)
    np.testing.assert_array_equal(d, 0 * d)


def test_programs_of_linen_jit_are_not_shared_between_sites():
    model = host(Jitted())
    run = lambda m, x: nni.capture(m)(x)  # noqa: E731
    _, record = nnx.jit(run)(model, X)
    assert len(record["wrapped/first"].calls) == 3
    assert len(record["wrapped/second"].calls) == 2
    x = X @ model.inner.kernel[...] + model.inner.bias[...]
    sums = {"first": [], "second": []}
    for name in ("first", "second", "first", "first", "second"):
        dense = getattr(model.wrapped, name)["Dense_0"]
        y = x @ dense["kernel"][...] + dense["bias"][...]
        sums[name].append(float(y.mean()))
        x = x + jnp.tanh(y)
    for name, means in sums.items():
        found = [c.output.mean for c in record[f"wrapped/{name}/Dense_0"].calls]
        np.testing.assert_allclose(found, means, rtol=1e-4)


def test_programs_of_linen_jit_are_not_shared_between_models():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.bridge.ToNNX(JitBlock(), rngs=rngs)
            self.b = nnx.bridge.ToNNX(JitBlock(), rngs=rngs)

        def __call__(self, x):
            return self.b(self.a(x))

    model = Pair(nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    expected = ["", "a", "a/Dense_0", "b", "b/Dense_0"]
    assert calls(model, X, model=model) == expected
    assert sorted(nni.capture(model)(X)[1]) == expected


def test_programs_of_linen_jit_are_compiled_once_for_equal_hooks():
    model, traced = host(Jitted()), []

    def note(next_fun, args, kwargs, context):
        traced.append(context.site)
        return next_fun(*args, **kwargs)

    for _ in range(2):
        with nni.intercept_methods(note, model=model):
            model(X)
    count = len(traced)
    with nni.intercept_methods(note, model=model):
        model(X)
    assert traced[count:] == ["", "inner", "wrapped"]  # the rest sits in programs
    before = model(X)
    with nni.perturb("wrapped/first/Dense_0", nni.Zero(), model=model):
        assert not np.array_equal(model(X), before)
    np.testing.assert_array_equal(model(X), before)


# ----------------------------------------------------- trace, Inspector, watch


def test_the_trace_tells_types_parameters_and_flops_of_linen_sites():
    model = host(Nested())
    found = {call.site: call for call in nni.trace(model, X).calls}
    assert list(found) == [
        "", "inner", "wrapped", "wrapped/mlp", "wrapped/mlp/Dense_0", "wrapped/mlp/Dense_1",
        "wrapped/out",
    ]  # fmt: skip
    dense = found["wrapped/mlp/Dense_0"]
    assert (dense.type, dense.inputs, dense.output) == ("Dense", "float32[5,3]", "float32[5,4]")
    assert (dense.depth, found["wrapped/mlp"].type) == (3, "Mlp")
    assert dense.parameters == 3 * 4 + 4
    assert dense.flops == 2 * 5 * 3 * 4 + 5 * 4
    assert found["wrapped/mlp"].parameters == 16 + 4 * 2 + 2
    assert found["wrapped"].parameters == 26 + 2 * 3 + 3
    assert found["wrapped"].flops > found["wrapped/mlp"].flops > dense.flops
    assert "test_linen.py" in dense.source


def test_edges_go_from_linen_module_to_linen_module_and_across_the_bridge():
    edges = {tuple(edge)[:2] for edge in nni.trace(host(Nested()), X).edges}
    assert edges == {
        ("inner", "wrapped"),
        ("wrapped/mlp/Dense_0", "wrapped/mlp/Dense_1"),
        ("wrapped/mlp", "wrapped/out"),
    }


def test_loops_and_stacks_of_lifted_modules_are_told():
    found = {call.site: call for call in nni.trace(host(Scanned()), X).calls}
    dense = found["wrapped/layers/Dense_0"]
    assert (dense.times, dense.stacked, dense.parameters) == (3, 3, 3 * 12)
    assert "test_linen.py" in dense.source
    assert "test_linen.py" in found["wrapped/layers"].source
    each = {call.site: call for call in nni.trace(host(Mapped()), X).calls}["wrapped/each"]
    assert (each.times, each.stacked, each.parameters) == (1, 5, 5 * (3 * 2 + 2))


def test_an_exception_names_the_linen_site_that_raised():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="second")(nn.Dense(4, name="first")(x)[None] @ jnp.ones((7, 2)))

    model = Host(Failing(), nnx.Rngs(0))
    with pytest.raises(TypeError) as info:
        nni.trace(nnx.bridge.lazy_init, model, X)
    assert any("'wrapped'" in note for note in info.value.__notes__)


@pytest.fixture
def inspector():
    found = nni.Inspector(host(Nested()), X)
    yield found
    found.close()


def layout(inspector) -> dict[str, Any]:
    from nnx_inspector.records.rows import rows_of

    return {site.key: site for site in rows_of(inspector.trace, unseen={})}


def test_linen_sites_have_rows(inspector):
    rows = layout(inspector)
    keys = list(rows)
    assert keys == [
        "", "inner", "wrapped", "wrapped/mlp", "wrapped/mlp/Dense_0", "wrapped/mlp/Dense_1",
        "wrapped/out",
    ]  # fmt: skip
    dense = rows["wrapped/mlp/Dense_0"]
    assert (dense.name, dense.kind, dense.depth) == ("Dense_0", "Dense", 3)
    assert keys[dense.parent] == "wrapped/mlp"
    assert (dense.parameters, dense.calls, dense.output) == (16, 1, "float32[5,4]")
    assert dense.perturbable
    assert not any(row.unseen for row in rows.values())


def test_a_method_of_a_linen_module_has_a_row_below_it():
    with contextlib.closing(nni.Inspector(host(Listed()), X, only=["**", "**:encode"])) as insp:
        rows = layout(insp)
        keys = list(rows)
        row = rows["wrapped:encode"]
        assert (row.name, row.kind, keys[row.parent]) == (":encode", "Listed", "wrapped")
        assert keys[rows["wrapped/heads_a"].parent] == "wrapped"


def test_the_inspector_measures_and_perturbs_linen_sites(inspector):
    plain = inspector.run(X)
    entry = inspector.recording.to_frame().query("site == 'wrapped/mlp/Dense_0'")
    assert len(entry)
    with inspector.perturb("wrapped/mlp", nni.Zero()):
        out = inspector.run(X)
        bias = inside(inspector).core.model.wrapped.out["bias"][...]
        np.testing.assert_allclose(out, jnp.broadcast_to(bias, (5, 3)), atol=1e-6)
    np.testing.assert_allclose(inspector.run(X), plain, rtol=1e-6)
    with pytest.raises(ValueError, match="wrapped/mlp"):
        inspector.perturb("wrapped/mlb", nni.Zero())


def test_a_watched_train_step_sees_and_perturbs_linen_sites(inspector):
    model = inside(inspector).core.model
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for step, x in enumerate(inspector.watch([X] * 4, every=1)):
        if step == 2:
            inspector.perturb("wrapped/mlp", nni.Zero())
        losses.append(float(train_step(model, optimizer, x)))
    bias = 5 * float((model.wrapped.out["bias"][...] ** 2).sum())
    assert losses[0] == losses[1] > 1e-3
    np.testing.assert_allclose(losses[3], bias, atol=1e-6)  # taken over between two steps
    frame = inspector.recording.to_frame()
    seen = frame[frame.site == "wrapped/mlp/Dense_0"]
    assert {"output", "gradient"} <= set(seen.quantity)
    dense = model.wrapped.mlp["Dense_0"]
    mean = (model.inner(X) @ dense["kernel"][...] + dense["bias"][...]).mean()
    np.testing.assert_allclose(seen[seen.quantity == "output"]["mean"].iloc[0], mean, rtol=1e-4)


# ---------------------------------------------------------------- perturbations


def test_a_perturbation_takes_effect_in_a_function_jitted_before_and_goes():
    model = host(Mlp())
    run = nnx.jit(lambda m, x: m(x))
    before = run(model, X)
    with nni.perturb("wrapped/Dense_0", nni.Zero()):
        inside = run(model, X)
    dense = model.wrapped.Dense_1
    np.testing.assert_allclose(inside, jnp.broadcast_to(dense["bias"][...], (5, 2)), rtol=1e-6)
    np.testing.assert_array_equal(run(model, X), before)


def test_a_perturbation_of_every_dense_by_type():
    model = host(Mlp())
    with nni.perturb(nn.Dense, nni.Zero()):
        np.testing.assert_array_equal(model(X), jnp.zeros((5, 2)))


@pytest.mark.parametrize("linen", [Scanned, Rematted, Mapped, Jitted])
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_perturbations_inside_lifted_transforms(linen, transform):
    model = host(linen())
    loss = lambda m, x: (m(x) ** 2).sum()  # noqa: E731
    run = {
        "jit": nnx.jit(loss),
        "grad": lambda m, x: nnx.value_and_grad(loss)(m, x)[0],
        "vmap": lambda m, x: nnx.vmap(loss, in_axes=(None, 0))(m, jnp.stack([x, x]))[0],
    }[transform]
    plain = run(model, X)
    with nni.perturb("wrapped/**", nni.Zero()):
        assert run(model, X) == 0
    np.testing.assert_array_equal(run(model, X), plain)


def test_linens_own_interceptors_take_precedence_as_ours_do():
    model = host(Mlp())

    def double(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        return 2 * out if context.module.name == "Dense_1" else out

    with nn.intercept_methods(double):
        y, record = nni.capture(model)(X)
        with nni.perturb("wrapped/Dense_1", nni.Zero()):
            np.testing.assert_array_equal(model(X), jnp.zeros((5, 2)))
    np.testing.assert_allclose(record["wrapped/Dense_1"].output.mean, y.mean(), rtol=1e-4)


def test_an_interceptor_may_change_skip_and_call_twice():
    class Plain(nn.Module):
        def setup(self):
            self.one = nn.Dense(3)

        def __call__(self, x):
            return self.double(x) + self.one(x)

        def double(self, x):
            return 2 * x

    model = host(Plain())
    entered = model.inner(X)

    def change(next_fun, args, kwargs, context):
        if context.site == "wrapped:double":
            return next_fun(*args) + context.orig_method(2 * args[0])
        return jnp.zeros((5, 3)) if context.site == "wrapped/one" else next_fun(*args)

    with nni.intercept_methods(change):
        np.testing.assert_allclose(model(X), 6 * entered, rtol=1e-6)


# ------------------------------------------------------------------- lazy_init


def test_lazy_init_is_seen():
    model = Host(Nested(), nnx.Rngs(0))
    found = calls(nnx.bridge.lazy_init, model, X)
    assert sorted(found) == ["", "inner", "wrapped", "wrapped/mlp", "wrapped/mlp/Dense_0",
                             "wrapped/mlp/Dense_1", "wrapped/out"]  # fmt: skip
    assert sorted(calls(model, X)) == sorted(found)
    alone = nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0))
    assert sorted(calls(alone.lazy_init, X)) == ["", ":lazy_init", "Dense_0", "Dense_1"]


def test_lazy_init_can_be_traced_and_captured():
    model = Host(Mlp(), nnx.Rngs(0))
    expected = ["", "inner", "wrapped", "wrapped/Dense_0", "wrapped/Dense_1"]
    assert [c.site for c in nni.trace(nnx.bridge.lazy_init, model, X).calls] == expected
    assert "Dense_0" not in vars(model.wrapped)
    _, record = nni.capture(nnx.bridge.lazy_init)(model, X)
    assert sorted(record) == expected
    assert model.wrapped.Dense_0["kernel"].shape == (3, 4)


def test_lazy_init_inside_the_hooks_gives_the_same_parameters():
    plain, watched = Host(Nested(), nnx.Rngs(0)), Host(Nested(), nnx.Rngs(0))
    nnx.bridge.lazy_init(plain, X)
    with nni.intercept_methods(lambda f, a, k, c: f(*a, **k)):
        nnx.bridge.lazy_init(watched, X)
    same(arrays_of(nnx.state(plain)), arrays_of(nnx.state(watched)))


# --------------------------------------------------------------- failing, ending


def linen_is_as_before() -> None:
    from flax.linen import module, transforms

    # flax has no public way to read these two
    assert not module._global_interceptor_stack._storage
    assert vars(transforms._HashableProxy)["from_module"].__func__.__module__.startswith("flax")


def test_an_exception_inside_linen_restores_everything():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x, fail=False):
            y = nn.Dense(3)(x)
            if fail:
                raise ZeroDivisionError("user's")
            return y

    model = host(Failing())
    graphdef = nnx.graphdef(model)
    for run in (lambda: nni.capture(model)(X, fail=True), lambda: model(X, fail=True)):
        with (
            pytest.raises(ZeroDivisionError, match="user's"),
            nni.intercept_methods(lambda f, a, k, c: f(*a, **k)),
        ):
            run()
        linen_is_as_before()
    assert nnx.graphdef(model) == graphdef
    assert calls(model, X)[3:] == ["wrapped/Dense_0"]
    linen_is_as_before()


def test_threads_do_not_see_each_others_calls():
    model, other, found, gate = host(Mlp()), host(Nested()), [], threading.Barrier(2)

    def unhooked():
        gate.wait(10)
        other(X)
        gate.wait(10)

    thread = threading.Thread(target=unhooked)

    def note(next_fun, args, kwargs, context):
        if context.site == "wrapped/Dense_0":
            gate.wait(10)
            gate.wait(10)
        found.append(context.site)
        return next_fun(*args, **kwargs)

    thread.start()
    with nni.intercept_methods(note):
        model(X)
    thread.join(10)
    assert sorted(found) == ["", "inner", "wrapped", "wrapped/Dense_0", "wrapped/Dense_1"]


# --------------------------------------------------------------------- ToLinen


class Small(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))

    def encode(self, x):
        return self.linear(x)


class HoldsNnx(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nnx.bridge.to_linen(Small, 3, name="first")(x)
        return nn.Dense(2)(nnx.bridge.ToLinen(Small, args=(3,), name="second")(x))


def test_tolinen_is_seen_in_init_and_apply():
    linen = nnx.bridge.to_linen(Small, 4)
    variables = linen.init(jax.random.key(0), X)
    expected = ["", "linear", "norm"]
    assert calls(linen.init, jax.random.key(0), X) == expected
    assert calls(linen.apply, variables, X) == expected
    assert calls(jax.jit(linen.apply), variables, X) == expected
    assert calls(linen.apply, variables, X, nnx_method="encode") == [":encode", "linear"]


def test_tolinen_can_be_perturbed_in_functions_jitted_before():
    linen = nnx.bridge.to_linen(Small, 4)
    variables = linen.init(jax.random.key(0), X)
    run = jax.jit(linen.apply)
    before = run(variables, X)
    with nni.perturb("linear", nni.Zero()):
        np.testing.assert_array_equal(run(variables, X), jnp.zeros((5, 4)))
    np.testing.assert_array_equal(run(variables, X), before)


def test_nnx_inside_linen_inside_nnx_has_its_whole_path():
    model = host(HoldsNnx())
    expected = ["", "inner", "wrapped"]
    for name in ("first", "second"):
        expected += [f"wrapped/{name}{part}" for part in ("", "/linear", "/norm")]
    expected.append("wrapped/Dense_0")
    assert calls(model, X, model=model) == expected
    assert calls(model, X) == expected
    _y, record = nni.capture(model)(X)
    assert sorted(record) == sorted(expected)
    assert not record.unseen
    x = X @ model.inner.kernel[...] + model.inner.bias[...]
    for name in ("first", "second"):
        linear = getattr(model.wrapped, name)["linear"]
        x = x @ linear["kernel"][...] + linear["bias"][...]
        norm = np.linalg.norm(np.asarray(x))
        np.testing.assert_allclose(record[f"wrapped/{name}/linear"].output.norm, norm, rtol=1e-4)
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    with nni.perturb("wrapped/second/linear", nni.Zero(), model=model):
        np.testing.assert_allclose(model(X), jnp.zeros((5, 2)) + model.wrapped.Dense_0["bias"][...])


def test_nnx_inside_linen_inside_nnx_inside_linen():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.again = nnx.bridge.ToNNX(Mlp(), rngs=rngs)
            self.again.lazy_init(jnp.ones((1, 3)))

        def __call__(self, x):
            return self.again(x)

    class Holds(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nnx.bridge.to_linen(Deep, name="deep")(x)

    model = host(Holds())
    expected = ["", "inner", "wrapped", "wrapped/deep", "wrapped/deep/again",
                "wrapped/deep/again/Dense_1", "wrapped/deep/again/Dense_0"]  # fmt: skip
    assert sorted(set(calls(model, X, model=model))) == sorted(expected)


def test_modules_of_the_bridge_have_no_sites_of_their_base_class():
    class Scaled(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            return self.param("scale", nn.initializers.ones, ()) * x

    variables = Scaled().init(jax.random.key(0), X)
    assert calls(Scaled().apply, variables, X) == [""]


# ------------------------------------------------------------------ functional


def test_functional_works():
    functional = nnx.bridge.functional(Small)(4)
    state = functional.init(rngs=nnx.Rngs(0))
    run = lambda state, x: functional.apply(state)(x)[0]  # noqa: E731
    plain = run(state, X)
    assert calls(run, state, X) == ["", "linear", "norm"]
    assert calls(jax.jit(run), state, X) == ["", "linear", "norm"]
    with nni.perturb("linear", nni.Zero()):
        np.testing.assert_array_equal(jax.jit(run)(state, X), jnp.zeros((5, 4)))
    np.testing.assert_array_equal(run(state, X), plain)


def test_a_functional_linen_model_keeps_its_sites():
    functional = nnx.bridge.functional(Host)(Mlp())
    model = functional.module_type(*functional.args, rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    functional.graphdef, state = nnx.split(model)
    run = lambda state, x: functional.apply(state)(x)[0]  # noqa: E731
    expected = ["", "inner", "wrapped", "wrapped/Dense_0", "wrapped/Dense_1"]
    assert sorted(calls(run, state, X)) == expected


# ------------------------------------------------------ Linen's own composite layers


def test_the_cell_of_a_linen_rnn_is_seen_from_inside_its_loop():
    model = host(Recurrent())
    found = {call.site: call for call in nni.trace(model, X).calls}
    assert (found["wrapped/cell"].type, found["wrapped/cell"].times) == ("SimpleCell", 5)
    assert {"wrapped/RNN_0", "wrapped/cell/i", "wrapped/cell/h"} <= set(found)
    (_, record), _ = nni.value_and_grad(lambda m, x: (m(x) ** 2).sum())(model, X)
    assert record["wrapped/cell/i"].gradient.norm > 0
    assert not record.unseen


@pytest.mark.parametrize("transform", ["vmap", "scan", "remat"])
def test_nnx_transforms_over_a_tonnx(transform):
    class Stack(nnx.Module):
        def __init__(self, rngs):
            def make(rngs):
                layer = nnx.bridge.ToNNX(Block(), rngs=rngs).lazy_init(X)
                layer.to_nnx__rngs = None  # not to be advanced by every example
                return layer

            self.layers = nnx.vmap(make)(rngs.split(2)) if transform == "scan" else make(rngs)

        def __call__(self, x):
            if transform == "vmap":
                return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.layers, x)
            if transform == "remat":
                return nnx.remat(lambda layer, x: layer(x))(self.layers, x)
            run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return run(self.layers, x)

    model = Stack(nnx.Rngs(0))
    assert calls(model, X, model=model) == ["", "layers", "layers/Dense_0"]
    _, record = nni.capture(model)(X)
    assert record["layers/Dense_0"].output.size == (30 if transform == "scan" else 15)
    assert not record.unseen
