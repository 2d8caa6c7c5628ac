"""Networks that learn, solve, recur or call the host within a call."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from network import Network, gauss

WIDTH = 4


class FastWeights(nnx.Module):
    """Test-time training: for each token, a step of gradient descent on the layer's own weights."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.key, self.query = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.inner = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.rate = nnx.Param(jnp.full((), 0.1))

    def __call__(self, x: Any) -> Any:
        graphdef, fast = nnx.split(self.inner)

        def error(fast: Any, k: Any, v: Any) -> Any:
            return jnp.square(nnx.merge(graphdef, fast)(k) - v).mean()

        def token(fast: Any, both: Any) -> Any:
            k, v, q = both
            grads = jax.grad(error)(fast, k, v)
            fast = jax.tree.map(lambda w, g: w - self.rate[...] * g, fast, grads)
            return fast, nnx.merge(graphdef, fast)(q)

        _, out = jax.lax.scan(token, fast, (self.key(x), x, self.query(x)))
        return out


def layer_that_learns_while_it_is_called() -> Network:
    return Network(FastWeights(rngs=nnx.Rngs(0)), (gauss(5, WIDTH),))


class TreeNode(nnx.Module):
    """A recursive network: a sentence is a tree of nested tuples, which decides the calls."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.words = nnx.Embed(7, WIDTH, rngs=rngs)
        self.join = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def encode(self, tree: Any) -> Any:
        if isinstance(tree, tuple):
            return jnp.tanh(self.join(jnp.concatenate([self.encode(part) for part in tree])))
        return self.words(jnp.asarray(tree))

    def __call__(self, trees: list[Any]) -> Any:
        return jnp.stack([self.encode(tree) for tree in trees])


def recursion_over_nested_tuples() -> Network:
    return Network(TreeNode(rngs=nnx.Rngs(0)), ([((1, 2), 3), (4, (5, (6, 0)))],))


class Slots(nnx.Module):
    """Slot attention: a GRU cell in a fori loop of NNX, with noise in the first slots."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.key, self.value = (nnx.Linear(3, WIDTH, rngs=rngs) for _ in range(2))
        self.query, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
        self.mean = nnx.Param(gauss(WIDTH, seed=3))
        self.rngs = rngs.fork()

    def __call__(self, x: Any, turns: int = 2) -> Any:
        keys, values = self.key(x), self.value(x)
        slots = self.mean + 0.1 * jax.random.normal(self.rngs.slots(), (2, WIDTH))

        def turn(_: Any, carried: Any) -> Any:
            me, slots = carried
            weights = jax.nn.softmax(me.query(me.norm(slots)) @ keys.T, 0)
            return me, me.cell(slots, weights @ values)[0]

        return nnx.fori_loop(0, turns, turn, (self, slots))[1]


def slots_in_a_fori_loop_of_nnx() -> Network:
    return Network(Slots(rngs=nnx.Rngs(0, slots=1)), (gauss(5, 3),))


class Solved(nnx.Module):
    """A layer that solves a linear system, with the gradient of the implicit function."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.matrix, self.inward = nnx.Linear(3, 9, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        a = jnp.eye(3) * 4 + self.matrix(x).reshape(3, 3)

        def solve(matvec: Any, b: Any) -> Any:
            return jax.lax.fori_loop(0, 8, lambda _, y: y + 0.2 * (b - matvec(y)), b)

        return jax.lax.custom_linear_solve(
            lambda y: a @ y, self.inward(x), solve, transpose_solve=solve
        )


def linear_system_in_a_layer() -> Network:
    return Network(Solved(rngs=nnx.Rngs(0)), (gauss(3),))


class Named(nnx.Module):
    """Named residuals, scopes and a policy that keeps only those; a function from a partial."""

    def __init__(self, act: Callable[..., Any], *, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(3, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 3, rngs=rngs)
        self.act = act
        policy = jax.checkpoint_policies.save_only_these_names("up")
        self.block = nnx.remat(type(self).inner, policy=policy)

    def inner(self, x: Any) -> Any:
        with jax.named_scope("inner"):
            return self.down(self.act(checkpoint_name(self.up(x), "up")))

    def __call__(self, x: Any) -> Any:
        return jax.named_call(lambda x: x + self.block(self, x), name="residual")(x)


def remat_with_a_policy_of_names() -> Network:
    act = functools.partial(nnx.leaky_relu, negative_slope=0.2)
    return Network(Named(act, rngs=nnx.Rngs(0)), (gauss(2, 3),))


class Hosted(nnx.Module):
    """A callback to the host in the pass, and state that is written in a branch of `nnx.cond`."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.inward, self.out = nnx.Linear(3, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.largest = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        h = self.inward(x)
        kind = jax.ShapeDtypeStruct(h.shape, h.dtype)
        h += jax.pure_callback(lambda a: a * 0.5, kind, jax.lax.stop_gradient(h))

        def louder(me: Any, top: Any) -> None:
            me.largest[...] = top

        nnx.cond(h.max() > self.largest[...], louder, lambda me, top: None, self, h.max())
        return self.out(h / self.largest[...])


def host_callback_and_state_in_a_branch() -> Network:
    return Network(Hosted(rngs=nnx.Rngs(0)), (gauss(2, 3),))


LOOPS: list[Callable[[], Network]] = [
    layer_that_learns_while_it_is_called,
    recursion_over_nested_tuples,
    slots_in_a_fori_loop_of_nnx,
    linear_system_in_a_layer,
    remat_with_a_policy_of_names,
    host_callback_and_state_in_a_branch,
]
