"""Watching a user's step: figures against activations computed by hand; nothing is left."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Jaxpr
from linear_stack import LinearStack
from models import TwoLayers
from record_checks import assert_summary
from training import Call, figures, loss_of, numbers_of

import nnx_inspector as nni
from nnx_inspector._compat import native
from nnx_inspector.live import pass_start
from nnx_inspector.live.session import Session

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def make_step(traces):
    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    return step


ADAM = optax.adam(1e-2)  # its functions are part of a step's cache key


def adam(model):
    return nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def activations(model, x):
    """Outputs and cotangents of the sites in float64, by hand: (site, quantity) -> array."""
    return figures(Call(numbers_of(model), x))


@pytest.mark.parametrize("jit", [True, False])
def test_every_figure_of_a_watched_step_is_that_of_a_hand_written_one(jit):
    model = TwoLayers(nnx.Rngs(0))
    expected = activations(model, X)
    session = Session(model, parameters=False)
    f = nnx.value_and_grad(loss_of)
    with session.open():
        (nnx.jit(f) if jit else f)(model, X)
    got = session.take()
    assert list(got) == ["", "a", "b"]
    for (site, quantity), array in expected.items():
        assert_summary(got[site][quantity], array)
    session.close()


def test_a_step_jitted_before_is_watched_and_its_training_is_the_same():
    models = TwoLayers(nnx.Rngs(0)), TwoLayers(nnx.Rngs(0))
    optimizers = [adam(m) for m in models]
    traces: list[int] = []
    step = make_step(traces)
    session = Session(models[0])
    for i in range(6):
        bare = step(models[1], optimizers[1], X)
        if i % 2:
            with session.open():
                loss = step(models[0], optimizers[0], X)
            assert set(session.take()[""]) == {"output", "gradient"}
        else:
            loss = step(models[0], optimizers[0], X)
        np.testing.assert_allclose(loss, bare, rtol=1e-6)
    assert len(traces) == 2, "one program without and one with the hook"
    assert nnx.graphdef(models[0]) == nnx.graphdef(models[1])
    session.close()


def test_layers_of_a_scan_are_each_seen_once_also_under_remat():
    model = LinearStack(nnx.Rngs(0), layers=4, remat=True)
    session = Session(model)
    with session.open():
        nnx.jit(nnx.value_and_grad(loss_of))(model, X)
    got = session.take()["layers"]
    kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.layers.kernel, model.layers.bias)
    )
    h, outputs = np.asarray(X, np.float64), []
    for k, b in zip(kernel, bias, strict=True):
        outputs.append(h @ k + b)
        h = np.tanh(outputs[-1])
    assert_summary(got["output"], np.stack(outputs))
    assert got["gradient"].size == 4 * X.size
    session.close()


def test_a_vmapped_pass_is_summarised_as_one_batch():
    model = TwoLayers(nnx.Rngs(0))
    expected = activations(model, X)
    session = Session(model)

    @nnx.jit
    def f(model, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x)

    with session.open():
        f(model, X)
    assert_summary(session.take()["a"]["output"], expected["a", "output"])
    session.close()


def _call(model, x):
    return model(x)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit, nnx.remat, nnx.vmap])
@pytest.mark.parametrize("power", [2, 1], ids=["squares", "a sum"])
def test_per_example_gradients_add_up(power, around):
    """Also where the loss is linear and sends the same gradient to each example."""
    model = TwoLayers(nnx.Rngs(0))
    session = Session(model)
    twice = around is nnx.vmap
    call = nnx.vmap(_call, in_axes=(None, 0)) if twice else around(_call)

    @nnx.jit
    def f(model, x):
        one = lambda m, x: nnx.grad(lambda m: (call(m, x[None]) ** power).sum())(m)  # noqa: E731
        return nnx.vmap(one, in_axes=(None, 0))(model, x)

    with session.open():
        f(model, X)
    got = session.take()
    y = activations(model, X)["", "output"]
    assert_summary(got[""]["gradient"], 2 * y if power == 2 else np.ones_like(y))
    session.close()


def test_integers_keys_and_several_arrays_are_watched_without_disturbing_the_step():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            y = self.inner(x)
            return {"y": y, "best": y.argmax(-1), "sure": y > 0, "key": jax.random.key(0)}, "text"

    model = Mixed(nnx.Rngs(0))
    f = nnx.jit(nnx.value_and_grad(lambda m, x: (m(x)[0]["y"] ** 2).mean()))
    bare = f(model, X)[0]
    session = Session(model)
    with session.open():
        loss = f(model, X)[0]
    np.testing.assert_allclose(loss, bare, rtol=1e-6)
    got = session.take()
    y = np.asarray(model.inner(X), np.float64)
    assert_summary(got[""]["output"], y)
    assert_summary(got["(0.best)"]["output"], y.argmax(-1))
    assert_summary(got["(0.sure)"]["output"], y > 0)
    assert "gradient" not in got["(0.best)"] | got["(0.sure)"]
    assert got[""]["gradient"].size == y.size
    session.close()


def test_the_turns_of_a_while_loop_add_up_and_do_not_break_the_gradient():
    class Looped(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.head = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            y = nnx.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, self.inner(s[1])), (0, x))[
                1
            ]
            return self.head(x + jax.lax.stop_gradient(y))

    model = Looped(nnx.Rngs(0))
    f = nnx.jit(nnx.value_and_grad(loss_of))
    bare = f(model, X)[0]
    session = Session(model)
    with session.open():
        loss = f(model, X)[0]
    np.testing.assert_allclose(loss, bare, rtol=1e-6)
    turns, x = [], X
    for _ in range(3):
        x = model.inner(x)
        turns.append(np.asarray(x))
    assert not session.unseen
    found = session.take()
    assert_summary(found["inner"]["output"], np.stack(turns))
    assert "gradient" not in found["inner"], "none leaves a while loop"
    assert "gradient" in found["head"]
    session.close()


def test_an_exception_in_the_step_is_the_users_own_and_leaves_nothing():
    class Broken(TwoLayers):
        def __call__(self, x):
            super().__call__(x)
            raise ZeroDivisionError("mine")

    model = Broken(nnx.Rngs(0))
    before = dict(vars(Broken)), nnx.graphdef(model)
    session = Session(model)
    with pytest.raises(ZeroDivisionError, match="mine"), session.open():
        nnx.jit(lambda m, x: m(x))(model, X)
    assert (dict(vars(Broken)), nnx.graphdef(model)) == before
    session.take()
    session.close()


def test_an_error_while_receiving_is_counted_and_never_reaches_the_step(monkeypatch):
    model = TwoLayers(nnx.Rngs(0))
    session = Session(model)

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(session.inbox, "receive", broken)
    with session.open():
        out = nnx.jit(lambda m, x: m(x))(model, X)
    assert np.isfinite(out).all()
    assert session.take() == {}
    assert session.errors == ["OSError: disk full"]
    session.close()


def test_a_program_that_outlives_its_session_still_runs():
    model = TwoLayers(nnx.Rngs(0))
    f = nnx.jit(lambda m, x: m(x))
    session = Session(model)
    with session.open():
        expected = f(model, X)
        session.close()
        np.testing.assert_array_equal(f(model, X), expected)
    assert session.number not in pass_start.open_sessions


def test_sessions_share_programs_one_after_the_other_alone():
    model, traces = TwoLayers(nnx.Rngs(0)), []
    step, optimizer = make_step(traces), adam(model)
    first, second = Session(model), Session(model)
    for one, scale in ((first, 1), (second, 2)):  # both are open
        with one.open():
            step(model, optimizer, scale * X)
    assert len(traces) == 2
    found = [one.take()[""]["output"] for one in (first, second)]
    assert found[0].size == found[1].size
    assert found[0].mean != found[1].mean
    first.finish()
    third = Session(model)
    expected = model(3 * X)
    with third.open():
        step(model, optimizer, 3 * X)
    assert len(traces) == 2
    assert third.take()[""]["output"].mean == pytest.approx(float(expected.mean()), rel=1e-5)
    assert not first.take()
    first.begin()
    assert len({one.number for one in (first, second, third)}) == 3


def test_a_session_whose_program_calls_a_twin_lets_no_other_use_it():
    model, twin = TwoLayers(nnx.Rngs(0)), TwoLayers(nnx.Rngs(1))
    step = nnx.jit(lambda model, twin, x: model(x) + twin(x))
    numbers = []
    for _ in range(2):
        session = Session(model)
        with session.open():
            step(model, twin, X)
        assert session.unattributed
        session.take()
        session.finish()
        numbers.append(session.number)
    assert len(set(numbers)) == 2


def test_a_dropped_session_is_freed():
    session = Session(TwoLayers(nnx.Rngs(0)))
    number = session.number
    with session.open():
        session.model(X)
    session.take()
    del session
    gc.collect()
    assert number not in pass_start.open_sessions


@pytest.mark.parametrize("in_c", [True, False])
def test_a_session_leaves_hardly_more_behind_than_what_jax_keeps_of_the_model_s_own_code(
    in_c, monkeypatch
):
    if not in_c:
        monkeypatch.setattr(native, "can_call_on", lambda _: False)

    def watched():
        model = TwoLayers(nnx.Rngs(0))
        session = Session(model)
        with session.open():
            nnx.jit(nnx.value_and_grad(loss_of))(model, X)
        session.take()
        session.close()

    def kept():
        gc.collect()
        return sum(isinstance(x, Jaxpr) for x in gc.get_objects())

    watched()
    before = kept()
    for _ in range(3):
        watched()
    # 550 for each session when our arithmetic was traced for each again, now some 40
    assert kept() - before < 3 * 60


def test_a_watched_program_keeps_nothing_of_its_trace():
    def tracers():
        gc.collect()
        return [x for x in gc.get_objects() if isinstance(x, jax.core.Tracer)]

    model = TwoLayers(nnx.Rngs(0))
    step = nnx.jit(nnx.value_and_grad(loss_of))
    session = Session(model)
    before = tracers()  # of other tests in this process, kept here so that no id is used again
    with session.open():
        step(model, X)
    session.take()
    known = set(map(id, before))
    assert not [x for x in tracers() if id(x) not in known]
    session.close()


def test_a_step_that_is_computed_again_has_outputs_and_gradients():
    """Outside jit, jax evaluates the forward half after the model's call has returned; in jit, the
    loop "checkpoint in the loss" of `test_training_loops` does it.
    """
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def step(model, x):
        loss = lambda model, x: jax.checkpoint(lambda x: loss_of(model, x))(x)  # noqa: E731
        return nnx.value_and_grad(loss)(model, x)

    with nni.watch(model, every=1) as recording:
        for n in (1, 2):
            step(model, n * X)
    assert [one.step for one in recording.passes] == [0, 1]
    for i in range(2):
        y = (i + 1) * np.asarray(X, np.float64) @ np.asarray(model.kernel[...], np.float64)
        found = recording.summary("", index=i), recording.summary("", "gradient", index=i)
        for summary, values in zip(found, (y, 2 * y / y.size), strict=True):
            assert_summary(summary, values, rtol=1e-4)
