"""Traps of dispatch and paths that have no test elsewhere; `test_traps_table.py` names them all."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pathlib
import threading
import warnings

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from interceptors import CallLog, call_model, double_output, loss_fn, pass_through, watch_session
from leftovers import nothing_left
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector._compat import jit
from nnx_inspector.hooks import hook
from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.activations import Scale
from nnx_inspector.perturbations.perturb import perturb
from nnx_inspector.records.capture import capture, value_and_grad


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    with nothing_left():
        yield


# ------------------------------------- where nnx.capture and nnx.perturb do not work


def test_texts_and_functions_that_a_module_returns_under_jit():
    """A string or function returned under jit: TypeError."""

    class Reads(nnx.Module):
        def __init__(self, rngs):
            self.words = models.Words(rngs)

        def __call__(self, x):
            name, function, number, y = self.words(x)
            assert (name, function, number) == ("logits", jnp.tanh, 3)
            return function(y)

    model, x, log = Reads(rngs()), batch(4, 3), CallLog()
    run = nnx.jit(call_model)
    plain = run(model, x)
    with intercept_methods(log, model=model), watch_session(model) as session:
        np.testing.assert_allclose(run(model, x), plain, rtol=1e-6)
    assert log.sites == ["", "words", "words/linear"]
    assert session.arrived["words"]["output"].size == 4 * 3
    y, record = nnx.jit(lambda m, x: capture(m)(x))(model, x)
    np.testing.assert_allclose(y, plain, rtol=1e-6)
    assert record["words"].output[3].size == 4 * 3


OUTSIDE = nnx.Linear(3, 3, rngs=nnx.Rngs(5))


def test_a_module_outside_of_the_tree_has_no_path_and_is_told():
    """The same class outside the tree: ValueError."""

    class Uses(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return OUTSIDE(self.linear(x))

    model, x, log = Uses(rngs()), batch(4, 3), CallLog()
    with intercept_methods(log):
        model(x)
    assert log.sites == ["", "linear", None]
    _, record = capture(model)(x)
    assert set(record) == {"", "linear"}
    assert list(record.unseen) == ["(Linear)"]


def test_the_model_need_not_be_the_first_argument():
    """Model not the first argument: silently empty."""
    model, x, log = models.MLP(rngs()), batch(4, 3), CallLog()
    run = nnx.jit(lambda x, m: m(x))
    with intercept_methods(log, model=model):
        y = run(x, model)
    assert log.sites == ["", "up", "down"]
    z, record = capture(run)(x, model)
    np.testing.assert_allclose(z, y, rtol=1e-6)
    assert set(record) == {"", "up", "down"}


def test_a_jit_partial_made_before_is_not_taken_for_the_model():
    """`jit_partial`: silently empty. Its graphdef is an older one: the hooks fire and say so."""
    model, x, log = models.MLP(rngs()), batch(4, 3), CallLog()
    run = nnx.jit_partial(call_model, model, graph_updates=False)
    plain = run(x)
    with pytest.warns(nni.InspectorWarning, match="could not be attributed"):
        with intercept_methods(log, model=model):
            np.testing.assert_array_equal(run(x), plain)
    assert log.sites == []
    with intercept_methods(double_output, only="down"):
        np.testing.assert_allclose(run(x), 2.0 * plain, rtol=1e-6)
    np.testing.assert_array_equal(run(x), plain)


@pytest.mark.parametrize("jit", [True, False])
def test_vmap_with_the_model_unmapped(jit):
    """vmap(in_axes=None): raises."""
    model, x = models.MLP(rngs()), batch(4, 3)
    run = nnx.vmap(call_model, in_axes=(None, 0))
    run = nnx.jit(run) if jit else run
    y, record = capture(run)(model, x)
    np.testing.assert_allclose(y, model(x), atol=1e-6)
    assert record["up"].output.size == 4 * 4
    np.testing.assert_allclose(record["up"].output.mean, model.up(x).mean(), rtol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_branches_that_are_not_alike(sign):
    """cond with unlike branches: raises."""

    class Unlike(nnx.Module):
        def __init__(self, rngs):
            self.shallow = nnx.Linear(3, 2, rngs=rngs)
            self.deep = models.MLP(rngs)

        def __call__(self, x):
            branches = (lambda m, x: m.shallow(x), lambda m, x: m.deep(x))
            return nnx.cond(x.sum() > 0, *branches, self, x)

    model, x = Unlike(rngs()), sign * jnp.ones((4, 3))
    y, record = capture(model)(x)
    np.testing.assert_allclose(y, model.shallow(x) if sign > 0 else model.deep(x), atol=1e-6)
    taken = {"shallow"} if sign > 0 else {"deep", "deep/up", "deep/down"}
    assert {site for site, entry in record.items() if entry.output is not None} == {"", *taken}
    assert record[min(taken)].output.size == 4 * 2


def test_a_site_called_with_two_shapes_has_the_gradient_of_each():
    """perturb called twice with different shapes: the forward value is wrong."""
    model = nnx.Linear(3, 2, rngs=rngs())
    a, b = batch(4, 3), batch(1, 3, seed=1)

    def loss(model, a, b):
        return (model(a) ** 2).sum() + 3.0 * model(b).sum()

    (value, record), _ = value_and_grad(loss)(model, a, b)
    np.testing.assert_allclose(value, loss(model, a, b), rtol=1e-6)
    first, second = record[""].calls
    assert (first.gradient.size, second.gradient.size) == (4 * 2, 1 * 2)
    np.testing.assert_allclose(first.gradient.mean, (2 * model(a)).mean(), rtol=1e-5)
    np.testing.assert_allclose(second.gradient.mean, 3.0, rtol=1e-6)


@pytest.mark.usefixtures("after_tabulate")
@pytest.mark.filterwarnings(r"ignore:\s*Using 'Module.sow")
def test_sow_is_seen_once_where_tabulate_has_copied_it_onto_the_class():
    """nnx.tabulate leaves inherited methods, `sow` among them, copied onto subclasses for good."""

    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "features", x)
            return jnp.tanh(x)

    class Heir(Sows):
        pass

    model, x, log = Heir(), batch(4, 3), CallLog()
    nnx.tabulate(model, x)
    assert "sow" in vars(Heir)
    with intercept_methods(log, model=model):
        _, sown = nnx.capture(model, nnx.Intermediate)(x)
    assert log.sites == [""]
    assert len(sown["features"]) == 1
    with watch_session(model) as session:
        nnx.capture(model, nnx.Intermediate)(x)
    assert session.arrived["features"]["output"].size == 4 * 3


# --------------------------------------------------------------- dispatch and paths


def test_slots_are_refused_by_nnx_with_hooks_as_without():
    """`__slots__`: an empty one is fine (a kind of generated model), others NNX has none of."""

    def define():
        class Slotted(nnx.Module):
            __slots__ = ("hidden",)

            def __call__(self, x):
                return x

        return Slotted()

    with pytest.raises(TypeError, match="does not support __slots__"):
        define()
    with (
        pytest.raises(TypeError, match="does not support __slots__"),
        intercept_methods(pass_through),
    ):
        define()


def test_a_submodule_added_or_deleted_while_hooked():
    """A submodule added or deleted later."""

    class Chain(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, x, log = Chain(rngs()), batch(4, 3), CallLog()
    run = nnx.jit(call_model)
    with intercept_methods(log):
        run(model, x)
        model.blocks.append(nnx.Linear(3, 3, rngs=rngs(1)))
        longer = run(model, x)
        del model.blocks[0]
        run(model, x)
    assert log.sites == ["", "blocks/0", "", "blocks/0", "blocks/1", "", "blocks/0"]
    model.blocks.insert(0, nnx.Linear(3, 3, rngs=rngs()))
    np.testing.assert_allclose(model(x), longer, rtol=1e-6)


@pytest.mark.parametrize("by", ["nnx", "jax"])
def test_an_executable_compiled_before_is_told(by):
    """AOT-compiled executables made before the hooks cannot see them: never stay silent."""
    model, x, log = models.MLP(rngs()), batch(4, 3), CallLog()
    if by == "nnx":
        compiled = nnx.jit(call_model).lower(model, x).compile()
        run = functools.partial(compiled, model, x)
    else:
        graphdef, state = nnx.split(model)
        run = functools.partial(
            jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x).compile(),
            state,
            x,
        )
    plain = run()
    with pytest.warns(nni.InspectorWarning, match="1 call of executables .* ahead of time"):
        with intercept_methods(log, model=model):
            np.testing.assert_array_equal(run(), plain)
    assert log.sites == []
    with pytest.warns(nni.InspectorWarning, match="ahead of time"):
        with perturb("down", Scale(2.0), model=model):
            np.testing.assert_array_equal(run(), plain)


def test_an_executable_compiled_inside_is_no_cause_for_a_warning():
    model, x, log = models.MLP(rngs()), batch(4, 3), CallLog()
    with intercept_methods(log, model=model):
        nnx.jit(call_model).lower(model, x).compile()(model, x)
    assert log.sites == ["", "up", "down"]


def test_calls_of_an_older_graphdef_are_told():
    """Older graphdefs cannot be seen: detect and warn."""
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)
    with pytest.warns(nni.InspectorWarning, match=r"1 of MLP, 2 of Linear"):
        with intercept_methods(pass_through, model=model):
            jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def test_nothing_is_told_where_everything_was_seen():
    model, x = models.MLP(rngs()), batch(4, 3)
    twin = models.MLP(rngs(1))
    run = nnx.jit(call_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with intercept_methods(pass_through, model=model), perturb("up", Scale(1.0), model=model):
            run(model, x)
            run(twin, x)
            model(x)


ADAM = optax.adam(0.1)


def train(steps, around):
    """The weights after some steps with an exponential average kept beside them, some hooked."""
    model = models.MLP(rngs())
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    ema = jax.tree.map(jnp.copy, model)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    for number in range(steps):
        with around(number, model):
            step(model, optimizer, batch(4, 3, seed=number))
            ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, model)
            if number == 1:
                ema = nnx.clone(ema)
    return model, ema, optimizer


@pytest.mark.parametrize("look", ["intercept", "perturb", "watch"])
def test_training_with_donation_an_average_and_an_optimizer_is_the_plain_one(look):
    """A tagged model and an older clone cannot be tree-mapped; a clone made while tagged stays
    unequal: EMA by jax.tree.map, clones made before, during and after, donation, nnx.Optimizer.
    """

    def around(number, model):
        if number % 2 == 0:
            return contextlib.nullcontext()
        if look == "intercept":
            return intercept_methods(pass_through, model=model)
        return perturb("up", Scale(1.0), model=model) if look == "perturb" else watch_session(model)

    plain = train(4, lambda *_: contextlib.nullcontext())
    for found, expected in zip(train(4, around), plain, strict=True):
        assert nnx.graphdef(found) == nnx.graphdef(expected)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    after = jax.tree.map(lambda a, b: (a + b) / 2, nnx.clone(plain[0]), train(2, around)[0])
    assert np.isfinite(after(batch(4, 3))).all()


def test_checkpoints_and_copies_made_while_hooked_are_like_any_others(tmp_path):
    """Pickling, deepcopy and orbax see no tag."""
    ocp = pytest.importorskip("orbax.checkpoint")
    model, x = models.MLP(rngs()), batch(4, 3)
    plain = model(x)
    with intercept_methods(pass_through, model=model), ocp.StandardCheckpointer() as checkpointer:
        nnx.jit(call_model)(model, x)
        state = nnx.state(model)
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(state))
        copied = copy.deepcopy(model)
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "model", nnx.to_pure_dict(state))
    fresh = models.MLP(rngs(3))
    restored = nnx.state(fresh)
    nnx.replace_by_pure_dict(restored, loaded)
    nnx.update(fresh, restored)
    for other in (copied, fresh):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        np.testing.assert_array_equal(other(x), plain)


def test_nothing_global_is_set_so_that_other_threads_keep_their_programs():
    """`set_global` on a user context invalidates every jit in the process."""
    package = pathlib.Path(nni.__file__).parent
    assert not [p.name for p in package.rglob("*.py") if "set_global" in p.read_text()]
    model, x, traces = models.MLP(rngs()), batch(4, 3), []

    @jax.jit
    def run(state, x):
        traces.append(None)
        return nnx.merge(graphdef, state)(x)

    graphdef, state = nnx.split(model)
    run(state, x)
    entered, leave = threading.Event(), threading.Event()

    def hooks():
        with intercept_methods(pass_through):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=hooks)
    thread.start()
    assert entered.wait(60)
    run(state, x)
    leave.set()
    thread.join(60)
    run(state, x)
    assert len(traces) == 1


@pytest.mark.parametrize("of_model", [True, False])
def test_fifty_equal_regions_grow_no_cache(of_model):
    """Fresh ids grow caches: key by what the hooks are."""
    model, x, traces = models.MLP(rngs()), batch(4, 3), []
    graphdef, state = nnx.split(model)

    @jax.jit
    def by_jax(state, x):
        traces.append(None)
        return nnx.merge(graphdef, state)(x)

    @nnx.jit
    def by_nnx(model, x):
        traces.append(None)
        return model(x)

    def region(number):
        scope = {"model": model} if of_model else {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(intercept_methods(pass_through, only="up", **scope))
            stack.enter_context(perturb("down", Scale(float(number)), **scope))
            by_nnx(model, x)
            if not of_model:  # of an older graphdef
                by_jax(state, x)

    region(0)
    gc.collect()
    # neither jax nor a hook has a public count of its programs
    before = (len(traces), by_jax._cache_size(), len(hook._keys))
    for number in range(50):
        region(number)
    gc.collect()
    assert (len(traces), by_jax._cache_size(), len(hook._keys)) == before


def test_both_branches_are_traced_and_an_interceptor_says_so_while_a_record_does_not():
    """`cond` traces both branches, `fori_loop` its body twice: call counts must not come from
    tracing alone.
    """

    class Loops(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            turn = lambda i, carry: (carry[0], jnp.tanh(carry[0](carry[1])))  # noqa: E731
            return nnx.fori_loop(0, 5, turn, (self.linear, x))[1]

    _, record = capture(Loops(rngs()))(batch(4, 3))
    assert record["linear"].output.size == 5 * 4 * 3
    model, x, log = models.Cond(rngs()), jnp.ones((4, 3)), CallLog()
    with intercept_methods(log):
        model(x)
    assert set(log.sites) == {"", "positive", "negative"}
    _, record = capture(model)(x)
    assert record["positive"].output.size == 4 * 2
    assert record["negative"].output is None


@pytest.mark.parametrize("look", ["intercept", "perturb", "watch"])
def test_an_eager_call_compiles_nothing_the_second_time(look):
    """Eager calls: `lax.cond` and `while_loop` recompile on every call: plain Python instead."""
    model, x, events = models.MLP(rngs()), batch(4, 3), []
    session = Session(model)

    def region(strength):
        if look == "intercept":
            return intercept_methods(pass_through, model=model)
        if look == "perturb":
            return perturb("up", Scale(strength), model=model)
        return session.open()

    for strength in (0.5, 0.25):
        with region(strength):
            model(x)
    undo = jit.compilation_events(lambda kind, *_: events.append(kind))
    try:
        for strength in (0.75, 1.5):
            with region(strength):
                model(x)
        session.take()
    finally:
        undo()
        session.close()
    assert events == []
