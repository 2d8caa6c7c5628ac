"""Every kind of perturbation through every transform, values and gradients, against plain loops.

The models by hand use no transforms: loops over layers and examples, and the taken branch of a
cond. The whole matrix runs with `--long`; a few kinds of each transform always run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni

X = batch(4, 4) + 0.5
UNITS = jnp.array([1.0, 0.0, 0.5, 1.0])
DIRECTION = jnp.array([1.0, -1.0, 0.5, 0.0])


def noise(name, shape):
    return jax.random.normal(
        jax.random.fold_in(jax.random.key(3), zlib.crc32(name.encode())), shape
    )


def backward(change):
    """The identity with a changed gradient."""

    @jax.custom_vjp
    def identity(a, data):
        return a

    identity.defvjp(lambda a, d: (a, d), lambda d, ct: (change(ct, d), jnp.zeros_like(d)))
    return lambda a, data, name: identity(a, data)


def clipped(ct, norm):
    return ct * jnp.minimum(1.0, norm / jnp.linalg.norm(ct.ravel()))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind: how to make it from data, and its effect on an array by hand."""

    data: Any
    make: Callable[[Any], Any]
    by_hand: Callable[[Any, Any, str], Any]
    of_parameters: bool = False


f32 = jnp.float32
KINDS = {
    "zero": Kind(f32(0), lambda d: nni.Zero(), lambda a, d, _: 0.0 * a),
    "scale": Kind(f32(0.5), nni.Scale, lambda a, d, _: d * a),
    "shift": Kind((DIRECTION, f32(3)), lambda d: nni.Shift(*d), lambda a, d, _: a + d[1] * d[0]),
    "noise": Kind(
        f32(0.3), lambda d: nni.Noise(d, seed=3), lambda a, d, name: a + d * noise(name, a.shape)
    ),
    "clamp": Kind(
        (f32(-0.3), f32(0.4)),
        lambda d: nni.Clamp(*d),
        lambda a, d, _: jnp.where(a < d[0], d[0], jnp.where(a > d[1], d[1], a)),
    ),
    "mask": Kind(UNITS, nni.Mask, lambda a, d, _: a * d),
    "boolean mask": Kind(
        f32(0), lambda d: nni.Mask(UNITS > 0), lambda a, d, _: jnp.where(UNITS > 0, a, 0.0)
    ),
    "mask of the first axis": Kind(
        UNITS, lambda d: nni.Mask(d, axis=0), lambda a, d, _: (a.T * d).T
    ),
    "mean": Kind(f32(0), lambda d: nni.Mean(), lambda a, d, _: 0.0 * a + a.sum(0) / a.shape[0]),
    "mean of all": Kind(
        f32(0), lambda d: nni.Mean(axis=-1), lambda a, d, _: 0.0 * a + a.sum(-1, keepdims=True) / 4
    ),
    "recorded mean": Kind(DIRECTION, nni.Mean, lambda a, d, _: 0.0 * a + d),
    "patch": Kind(DIRECTION, nni.Patch, lambda a, d, _: 0.0 * a + d),
    "patch of a part": Kind(
        DIRECTION,
        lambda d: nni.Patch(d, UNITS == 1.0),
        lambda a, d, _: jnp.where(UNITS == 1.0, d, a),
    ),
    "cast": Kind(
        f32(0), lambda d: nni.Cast(jnp.bfloat16), lambda a, d, _: jax.lax.reduce_precision(a, 8, 7)
    ),
    "apply": Kind(UNITS, lambda d: nni.Apply(jnp.arctan2, (d,)), lambda a, d, _: jnp.arctan2(a, d)),
    "scale gradient": Kind(f32(3), nni.ScaleGradient, backward(lambda ct, d: d * ct)),
    "reverse gradient": Kind(f32(2), nni.ReverseGradient, backward(lambda ct, d: -d * ct)),
    "stop gradient": Kind(f32(0), lambda d: nni.StopGradient(), backward(lambda ct, d: 0.0 * ct)),
    "clip gradient": Kind(f32(0.01), nni.ClipGradient, backward(clipped)),
    "two of a kind": Kind(
        (f32(0.5), DIRECTION),
        lambda d: [nni.Shift(d[1]), nni.Scale(d[0]), nni.Shift(d[1])],
        lambda a, d, _: (a + d[1]) * d[0] + d[1],
    ),
    "clipped twice": Kind(
        f32(0.01),
        lambda d: [nni.ClipGradient(0.5 * d), nni.ScaleGradient(3.0), nni.ClipGradient(d)],
        backward(lambda ct, d: clipped(3.0 * clipped(ct, d), 0.5 * d)),
    ),
    "prune": Kind(UNITS, nni.PruneMask, lambda k, d, _: k * d, True),
    "parameter noise": Kind(
        f32(0.3),
        lambda d: nni.ParameterNoise(d, seed=3),
        lambda k, d, name: k + d * noise(name, k.shape),
        True,
    ),
}


class Net(nnx.Module):
    def __init__(self, inside=lambda f: f):
        self.up, self.down = nnx.Linear(4, 4, rngs=rngs()), nnx.Linear(4, 2, rngs=rngs())
        self.inside = inside

    def __call__(self, x):
        return self.down(jnp.tanh(self.inside(lambda up, x: up(x))(self.up, x)))


def net_by_hand(model, x, act, of_kernel, name="up/0/0", kernel_name="up/kernel"):
    up, down = model.up, model.down
    a = act(x @ of_kernel(up.kernel[...], kernel_name) + up.bias[...], name)
    return jnp.tanh(a) @ down.kernel[...] + down.bias[...]


def each_row_by_hand(model, x, act, of_kernel):
    return jnp.stack([net_by_hand(model, row, act, of_kernel) for row in x])


def true_by_hand(model, x, act, of_kernel):
    # calls are numbered as lax.cond's branches are: that of False first
    return net_by_hand(model, x, act, of_kernel, name="up/1/0")


def stack_by_hand(chosen):
    def by_hand(model, x, act, of_kernel):
        kernels = model.layers.kernel[...]
        if chosen is None:
            kernels = of_kernel(kernels, "layers/kernel")
        for layer in range(3):
            kernel, it = kernels[layer], chosen in (None, layer)
            if chosen == layer:
                kernel = of_kernel(kernel, f"layers/kernel[{layer}]")
            a = x @ kernel + model.layers.bias[...][layer]
            x = jnp.tanh(act(a, "layers/0/0") if it else a)
        return x

    return by_hand


def if_true(f):
    return lambda up, x: nnx.cond(x.sum() > 0, f, lambda up, x: 2.0 * up(x), up, x)


def if_false(f):
    return lambda up, x: nnx.cond(x.sum() < 0, lambda up, x: 2.0 * up(x), f, up, x)


@dataclasses.dataclass(frozen=True)
class Way:
    """A model, a way of calling it, and the same by hand."""

    model: Callable[[], nnx.Module]
    key: str = "up"
    run: Callable[..., Any] = lambda model, what, x: nni.perturbed(model)(what, x)
    by_hand: Callable[..., Any] = net_by_hand
    jitted: bool = True


def _mapped(model, x):
    return jax.vmap(model)(x)


WAYS = {
    "eager": Way(Net, jitted=False),
    "nnx.jit": Way(Net, run=nnx.jit(lambda model, what, x: nni.perturbed(model)(what, x))),
    "jax.jit": Way(Net),
    "nnx.jit inside": Way(lambda: Net(nnx.jit)),
    "nnx.remat": Way(lambda: Net(nnx.remat)),
    "nnx.cond": Way(lambda: Net(if_true), by_hand=true_by_hand),
    "nnx.cond of False": Way(lambda: Net(if_false)),
    "jax.vmap": Way(
        Net,
        run=lambda model, what, x: nni.perturbed(_mapped)(what, model, x),
        by_hand=each_row_by_hand,
    ),
    "nnx.vmap": Way(
        lambda: Net(lambda f: nnx.vmap(f, in_axes=(None, 0))), by_hand=each_row_by_hand
    ),
    "scan": Way(lambda: models.ScannedLinears(rngs()), "layers", by_hand=stack_by_hand(None)),
    "one layer of a scan": Way(
        lambda: models.ScannedLinears(rngs()), "layers[1]", by_hand=stack_by_hand(1)
    ),
    "scan of remat": Way(
        lambda: models.ScannedLinears(rngs(), inside=nnx.remat),
        "layers[-1]",
        by_hand=stack_by_hand(2),
    ),
    "perturbed inside a scan": Way(
        Net,
        run=lambda model, what, x: jax.lax.scan(
            lambda _, row: (None, nni.perturbed(model)(what, row)), None, x
        )[1],
        by_hand=each_row_by_hand,
    ),
}
ALWAYS = {"patch of a part", "noise", "clip gradient", "prune"}
PLAIN = {"eager", "nnx.jit"}
"""The ways in which every kind runs."""


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(way, kind, marks=() if kind in ALWAYS or way in PLAIN else pytest.mark.long)
        for way in WAYS
        for kind in KINDS
    ],
)
def test_a_kind_through_a_transform_is_the_model_by_hand(way, kind):
    how, what = WAYS[way], KINDS[kind]
    graphdef, state = nnx.split(how.model())
    key = f"{how.key}/kernel" if what.of_parameters else how.key
    assert X.sum() > 0  # the branch that is taken

    def found(state, data, x):
        return how.run(nnx.merge(graphdef, state), {key: what.make(data)}, x)

    def expected(state, data, x):
        same = lambda a, name: a  # noqa: E731
        change = lambda a, name: what.by_hand(a, data, name)  # noqa: E731
        act, of_kernel = (same, change) if what.of_parameters else (change, same)
        return how.by_hand(nnx.merge(graphdef, state), x, act, of_kernel)

    def both(f):
        def loss(state, data, x):
            y = f(state, data, x)
            return (jnp.sin(y) * y).sum(), y

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)

    run = jax.jit(both(found)) if how.jitted else both(found)
    results = run(state, what.data, X), jax.jit(both(expected))(state, what.data, X)
    rough = {"rtol": 2e-2, "atol": 2e-2} if kind == "cast" else {"rtol": 2e-5, "atol": 2e-6}
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, **rough)


@pytest.mark.parametrize("kind", [k for k, kind in KINDS.items() if not kind.of_parameters])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_perturb_does_in_a_region_what_perturbed_does(kind, jitted):
    model, one = Net(), KINDS[kind].make(KINDS[kind].data)
    several = one if isinstance(one, list) else [one]
    loss = lambda model, x: (model(x) ** 2).sum()  # noqa: E731
    run = nnx.value_and_grad(loss, argnums=1)
    run = nnx.jit(run) if jitted else run
    clean = run(model, X)
    with contextlib.ExitStack() as stack:
        for each in several[::-1]:  # of regions the one opened last acts first
            stack.enter_context(nni.perturb("up", each))
        found = run(model, X)
    wanted = jax.value_and_grad(lambda x: (nni.perturbed(model)({"up": several}, x) ** 2).sum())(X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(run(model, X)), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
