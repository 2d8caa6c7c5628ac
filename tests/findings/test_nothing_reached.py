"""Losses that nothing of the model reaches, and loops that only look like them.

A pass that is differentiated with respect to the model's parameters and gives a gradient to none of
them is an error at the model. An evaluation, a model that another one's step calls, gradients of
the input alone, and derivatives in forward mode are silent.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(0), (32, 4))
Y = jnp.zeros((32, 1))


def mlp(*, out=1, seed=0):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(4, 16, rngs=rngs), nnx.relu, nnx.Linear(16, out, rngs=rngs))


class Detached(nnx.Module):
    """A model that cuts its own output, before a layer without parameters."""

    def __init__(self):
        self.body, self.dropout = mlp(), nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dropout(jax.lax.stop_gradient(self.body(x)))


class Critic(nnx.Module):
    """Another model, whose type no part of the watched one has."""

    def __init__(self, width):
        self.weight = nnx.Param(jnp.full((width, 1), 0.3))

    def __call__(self, x):
        return x @ self.weight


def squares(f):
    return (f**2).mean()


def stopped(model, x):
    return squares(jax.lax.stop_gradient(model(x)))


def of_argmax(model, x):
    return squares(jnp.argmax(model(x), axis=-1).astype(jnp.float32))


def rounded(model, x):
    return squares(jnp.round(model(x)))


def unused(model, x):
    model(x)
    return squares(x)


def rematerialised(model, x):
    return jax.checkpoint(lambda x: stopped(model, x))(x)


def jitted(model, x):
    return squares(jax.lax.stop_gradient(nnx.jit(lambda m, x: m(x))(model, x)))


def train_of(loss, tx, *, jit=True, x=X):
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    made = nnx.jit(step) if jit else step

    def loop(model):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return lambda: made(model, optimizer, x)

    return loop


ADAM = optax.adam(1e-2)
FAULTS = {
    "stop_gradient": (mlp, train_of(stopped, ADAM)),
    "argmax": (lambda: mlp(out=3), train_of(of_argmax, ADAM)),
    "round, with weight decay": (mlp, train_of(rounded, optax.adamw(1e-2, weight_decay=0.1))),
    "the result is not used": (mlp, train_of(unused, ADAM)),
    "eager": (mlp, train_of(stopped, ADAM, jit=False)),
    "remat": (mlp, train_of(rematerialised, ADAM)),
    "jit inside": (mlp, train_of(jitted, ADAM)),
    "within the model": (Detached, train_of(lambda m, x: squares(m(x)), ADAM)),
}


def looped(model, step):
    insp = nni.Inspector(model, X, display=False)
    try:
        for _ in insp.watch(range(8), every=2):
            step()
        return insp.findings
    finally:
        insp.close()


def watched(model, step, *, every=2):
    with nni.watch(model, every=every) as recording:
        for _ in range(8):
            step()
    return nni.diagnose(recording)


def at_the_model(findings):
    return [f.severity for f in findings if (f.rule, f.site) == ("no-gradient", "")]


@pytest.mark.parametrize("way", [looped, watched])
@pytest.mark.parametrize("name", FAULTS)
def test_no_gradient_for_any_parameter_is_an_error_at_the_model(name, way):
    build, train = FAULTS[name]
    model = build()
    found = way(model, train(model))
    assert at_the_model(found) == ["error"], found
    assert len([f for f in found if f.rule == "no-gradient"]) == 1
    (one,) = (f for f in found if f.rule == "no-gradient")
    assert one.evidence["parameters"] == 4
    assert one.message.startswith("From step 0 on")


def test_a_part_that_nothing_comes_back_to_is_not_said_to_lack_updates():
    """It may be frozen on purpose, but neither the optimizer nor a dtype is what holds it."""
    rngs = nnx.Rngs(0)
    parts = nnx.Linear(4, 8, rngs=rngs), jax.lax.stop_gradient, nnx.Linear(8, 1, rngs=rngs)
    model = nnx.Sequential(*parts)
    (one,) = watched(model, train_of(lambda m, x: squares(m(x)), ADAM)(model))
    assert (one.rule, one.site, one.severity) == ("no-gradient", "layers/0", "info")
    assert one.evidence["parameters"] == 2
    assert "has no gradient: nothing comes back to it from the loss" in one.what
    assert "optimizer" not in one.message
    assert "dtype" not in one.message


@pytest.mark.parametrize("loss", [stopped, of_argmax, rounded, unused])
def test_a_requested_step_says_the_same(loss):
    insp = nni.Inspector(mlp(), X, display=False)
    insp.step(loss, X)
    assert at_the_model(insp.findings) == ["error"]
    insp.close()


def test_a_file_keeps_it(tmp_path):
    model = mlp()
    step = train_of(stopped, ADAM)(model)
    with nni.watch(model, every=2, save=tmp_path / "run.nni") as recording:
        for _ in range(8):
            step()
    found = nni.diagnose(nni.load(tmp_path / "run.nni"))
    assert at_the_model(found) == ["error"]
    assert found == nni.diagnose(recording)


def evaluation(model):
    made = nnx.jit(lambda m, x: m(x).mean())
    return lambda: made(model, X)


def of_the_input(model):
    made = nnx.jit(lambda m, x: jax.grad(lambda x: m(x).sum())(x))
    return lambda: made(model, X)


def of_another_model(model):
    """A discriminator's step, which calls the watched generator."""
    other = Critic(1)
    optimizer = nnx.Optimizer(other, ADAM, wrt=nnx.Param)

    @nnx.jit
    def step(other, model, optimizer):
        loss = lambda other, model: squares(other(model(X)))  # noqa: E731
        optimizer.update(other, nnx.grad(loss)(other, model))

    return lambda: step(other, model, optimizer)


def forward_mode(model):
    @nnx.jit
    def step(model):
        graphdef, params = nnx.split(model)
        f = lambda params: squares(nnx.merge(graphdef, params)(X))  # noqa: E731
        ones = jax.tree.map(jnp.ones_like, params)
        return jax.jvp(f, (params,), (ones,))[1]

    return lambda: step(model)


def forward_gradients(model):
    """Trained by derivatives in forward mode, through a program of its own."""

    @nnx.jit
    def step(model):
        graphdef, params = nnx.split(model)
        f = jax.jit(lambda params: squares(nnx.merge(graphdef, params)(X)))
        along = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)
        slope = jax.jvp(f, (params,), (along,))[1]
        nnx.update(model, jax.tree.map(lambda x, v: x - 1e-3 * slope * v, params, along))

    return lambda: step(model)


def of_its_parameters(model):
    """A loss of the parameters alone, beside a call for the metrics."""

    def loss(model, x):
        size = sum((jnp.abs(p - 0.1)).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return size + 0 * jax.lax.stop_gradient(model(x)).mean()

    return train_of(loss, ADAM)(model)


def partly_stopped(model):
    """Its own output is the target of the next call, as in learning from differences in time."""
    td = lambda m, x: squares(m(x) - jax.lax.stop_gradient(m(2 * x)))  # noqa: E731
    return train_of(td, optax.adam(1e-3))(model)


SOUND = {
    f.__name__: f
    for f in (
        evaluation, of_the_input, of_another_model, forward_mode, forward_gradients,
        of_its_parameters, partly_stopped,
    )
}  # fmt: skip


@pytest.mark.parametrize("way", [looped, watched])
@pytest.mark.parametrize("name", SOUND)
def test_a_loop_that_wants_no_such_gradient_is_silent(name, way):
    model = mlp()
    assert at_the_model(way(model, SOUND[name](model))) == []


def test_a_generator_is_named_only_where_its_own_step_is_detached():
    """Two optimizers: the discriminator's step is right, the generator's is cut."""
    generator, critic = mlp(out=4), Critic(4)
    tx = {"wrt": nnx.Param}
    g_opt, c_opt = nnx.Optimizer(generator, ADAM, **tx), nnx.Optimizer(critic, ADAM, **tx)

    @nnx.jit
    def step(generator, critic, g_opt, c_opt, x):
        of_critic = lambda c, g: squares(c(x) - 1) + squares(c(g(x)))  # noqa: E731
        c_opt.update(critic, nnx.grad(of_critic)(critic, generator))
        cut = lambda g, c: squares(c(jax.lax.stop_gradient(g(x))) - 1)  # noqa: E731
        g_opt.update(generator, nnx.grad(cut)(generator, critic))

    run = lambda: step(generator, critic, g_opt, c_opt, X)  # noqa: E731
    assert at_the_model(watched(generator, run, every=1)) == ["error"]
    assert at_the_model(watched(critic, run, every=1)) == []


class Adapted(nnx.Module):
    """A frozen layer with an adapter whose second factor begins at 0."""

    def __init__(self):
        self.a = nnx.LoRALinear(4, 16, lora_rank=2, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(16, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def test_an_adapter_that_was_looked_at_before_training_leaves_no_warning():
    """Its first factor has a gradient of 0 until the second one has moved."""
    model = Adapted()
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: squares(m(X))  # noqa: E731
        optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model))

    insp = nni.Inspector(model, X, display=False)
    insp.step(lambda m, x: squares(m(x)), X)
    assert insp.findings == []
    for _ in insp.watch(range(12), every=2):
        step(model, optimizer)
    assert insp.findings == []
    insp.step(lambda m, x: squares(m(x)), X)
    assert insp.findings == []
    insp.close()


# ------------------------------------------------------------------ empty batches


class Positions(nnx.Module):
    """What one of its layers returns does not depend on the batch."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.ids, self.positions = nnx.Embed(9, 16, rngs=rngs), nnx.Embed(12, 16, rngs=rngs)
        self.head = nnx.Linear(16, 9, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.ids(ids) + self.positions(jnp.arange(ids.shape[1])))


class Loss(nnx.Module):
    """Returns a number, of no examples too."""

    def __init__(self):
        self.body = mlp()

    def __call__(self, x):
        return (self.body(x) ** 2).sum()


EMPTY = {
    "rows": (mlp, jnp.zeros((0, 4))),
    "positions": (lambda: mlp(out=3), jnp.zeros((2, 0, 4))),
    "ids": (Positions, jnp.zeros((0, 12), int)),
    "a loss in the model": (Loss, jnp.zeros((0, 4))),
}


def total(model, x):
    return (model(x) ** 2).sum()


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_is_no_fault(name):
    build, x = EMPTY[name]
    insp = nni.Inspector(build(), x, display=False)
    insp.step(total, x)
    assert insp.findings == []
    insp.close()
    model = build()
    assert watched(model, train_of(total, ADAM, x=x)(model)) == []


def test_an_empty_batch_hides_no_fault_of_the_others():
    insp = nni.Inspector(mlp(), X[:0], display=False)
    insp.step(stopped, X[:0])
    assert insp.findings == []
    insp.step(stopped, X)
    assert at_the_model(insp.findings) == ["error"]
    assert insp.findings[0].evidence["passes"] == 1
    insp.close()
