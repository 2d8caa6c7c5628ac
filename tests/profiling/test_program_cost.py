"""FLOPs and kept bytes by module: counted by hand, and compared with what jax says it saves."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

import nnx_inspector as nni
from nnx_inspector.profiling.program_cost import ProgramCost, cost_of_program

B, D, H = 8, 4, 16


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(D, H, rngs=rngs)
        self.down = nnx.Linear(H, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.sin(self.up(x)))


def cost(model: Any, loss: Any, *args: Any) -> ProgramCost:
    graphdef, state = nnx.split(model)

    def step(state: Any, *args: Any) -> Any:
        return jax.value_and_grad(lambda s: loss(nnx.merge(graphdef, s), *args))(state)

    with nni.named_scopes(model):
        graphdef, state = nnx.split(model)
        return cost_of_program(jax.make_jaxpr(step)(state, *args))


def saved(f: Any, *args: Any) -> int:
    """The bytes of the residuals that jax prints, without those that are arguments."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(f, *args)
    total = 0
    sizes = {"f32": 4, "bool": 1, "bf16": 2, "i32": 4}
    for line in text.getvalue().splitlines():
        kind, dims, what = re.match(r"(\w+)\[([\d,]*)\] (.*)", line).groups()  # type: ignore[union-attr]
        if not what.startswith(("from the argument", "from a constant", "from a literal")):
            size = sizes[kind]
            for d in dims.split(","):
                size *= int(d or 1)
            total += size
    return total


def test_an_mlp_keeps_the_hidden_values_and_the_output():
    model, x = Mlp(nnx.Rngs(0)), jnp.ones((B, D))
    found = cost(model, lambda m, x: (m(x) ** 2).sum(), x)
    # of the model's own sine its derivative, the cosine; and the sine, for the product after it
    assert found.kept[""] == 2 * B * H * 4
    assert found.kept.get("up", 0) == 0  # a product keeps its operands: the input and the kernel
    assert found.kept[None] + found.kept.get("down", 0) == B * D * 4  # what the square needs
    assert found.backward
    assert found.forward


def test_the_products_of_an_mlp_are_counted_forward_and_backward():
    model, x = Mlp(nnx.Rngs(0)), jnp.ones((B, D))
    found = cost(model, lambda m, x: (m(x) ** 2).sum(), x)
    product = 2 * B * D * H
    # forward, the kernel's gradient, and (not of the first layer) the input's; then the bias
    assert found.flops["up"] == 2 * product + B * H + B * H
    assert found.flops["down"] == 3 * product + B * D + B * D
    assert found.products == {"float32": 5 * product}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mlp(nnx.Rngs(0)),
        lambda: nnx.Sequential(
            nnx.Linear(D, H, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(H, D, rngs=nnx.Rngs(1))
        ),
        lambda: nnx.Sequential(nnx.LayerNorm(D, rngs=nnx.Rngs(0)), nnx.gelu),
        lambda: nnx.MultiHeadAttention(2, D, rngs=nnx.Rngs(0), decode=False, deterministic=True),
    ],
)
def test_all_that_is_kept_is_what_jax_says_it_saves(make: Any):
    model, x = make(), jnp.linspace(-1, 1, B * D).reshape(2, B // 2, D)
    graphdef, state = nnx.split(model)
    found = cost(model, lambda m, x: (m(x) ** 2).sum(), x)
    expected = saved(lambda s: (nnx.merge(graphdef, s)(x) ** 2).sum(), state)
    assert sum(found.kept.values()) == expected


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.linear(jnp.sin(x)))


class Stacked(nnx.Module):
    """Three blocks in a scan, rematerialised or not."""

    def __init__(self, remat: bool, rngs: nnx.Rngs):
        self.remat = remat

        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key: jax.Array) -> Block:
            return Block(nnx.Rngs(key))

        self.layers = make(jax.random.split(rngs.params(), 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        def one(x: jax.Array, block: Block) -> jax.Array:
            return nnx.remat(lambda b, x: b(x))(block, x) if self.remat else block(x)

        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_a_scan_over_layers_keeps_what_each_of_them_keeps():
    model, x = Stacked(False, nnx.Rngs(0)), jnp.ones((B, D))
    found = cost(model, lambda m, x: m(x).sum(), x)
    # of each of three layers two cosines, and the sine that goes into the product
    assert found.kept == {"layers": 3 * 3 * B * D * 4}
    # forward and two products backward, three times
    assert found.flops["layers/linear"] == 3 * (3 * 2 * B * D * D + 2 * B * D)


def test_remat_keeps_the_inputs_of_the_layers_alone():
    model, x = Stacked(True, nnx.Rngs(0)), jnp.ones((B, D))
    found = cost(model, lambda m, x: m(x).sum(), x)
    assert sum(found.kept.values()) == 3 * B * D * 4
    # computed once more
    assert found.flops["layers/linear"] == 3 * (4 * 2 * B * D * D + 3 * B * D)


def test_a_shared_module_counts_at_its_own_path_in_each_call():
    class Twice(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
            self.again = self.first

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(jnp.sin(self.first(x)))

    found = cost(Twice(), lambda m, x: m(x).sum(), jnp.ones((B, D)))
    # NNX calls it by the first of its names; the first call needs no gradient of its input, and
    # the gradients of the two calls are added
    assert found.flops["again"] == 5 * 2 * B * D * D + D * D
    assert "first" not in found.flops


class Calling(nnx.Module):
    """Two matrices, which a test's function calls."""

    def __init__(self, call: Any):
        self.a, self.b = (
            nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(seed)) for seed in range(2)
        )
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(self, x)


def test_a_jitted_part_and_a_vmap_keep_their_modules():
    def call(m: Calling, x: jax.Array) -> jax.Array:
        x = nnx.jit(lambda m, x: m(x))(m.a, x)
        return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m.b, x)

    found = cost(Calling(call), lambda m, x: m(x).sum(), jnp.ones((B, D)))
    assert found.flops["a"] == 2 * 2 * B * D * D
    assert found.flops["b"] == 3 * 2 * B * D * D


def branch(m: Calling, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > 0, lambda m, x: m(m(x)), lambda m, x: m(x), m.a, x)


def loop(m: Calling, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: x.sum() < 9, m.a, x)


@pytest.mark.parametrize(("call", "flops"), [(branch, 2 * 2 * B * D * D), (loop, None)])
def test_of_two_branches_the_longer_one_counts_and_a_while_loop_is_not_known(
    call: Any, flops: float | None
):
    model = Calling(call)
    with nni.named_scopes(model):
        graphdef, state = nnx.split(model)
        jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, jnp.ones((B, D)))
    assert cost_of_program(jaxpr).flops["a"] == flops
