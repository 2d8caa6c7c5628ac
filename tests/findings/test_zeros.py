"""Zeros that a site receives are an effect: what made them is named, and harmless ones are not."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportOptionalSubscript=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

D, E, N = 8, 4, 64
X = jax.random.normal(jax.random.key(0), (N, D))


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed)


def stepped(model: Any, *args: Any, passes: int = 3) -> list[Any]:
    insp = nni.Inspector(model, *args, display=False)
    for _ in range(passes):
        insp.step(lambda m, *args: ((m(*args) - 1) ** 2).mean(), *args)
    found = insp.findings
    insp.close()
    return found


def alarms(found: list[Any]) -> list[str]:
    return [f"{one.rule} at {one.site}: {one.message}" for one in found if one.severity != "info"]


class Expert(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, trained: bool = False):
        self.up, self.down = nnx.Linear(D, 16, rngs=rngs), nnx.Linear(16, D, rngs=rngs)
        if trained:
            self.up.bias[...] = jax.random.normal(jax.random.key(3), (16,))
            self.down.bias[...] = jax.random.normal(jax.random.key(4), (D,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


class Experts(nnx.Module):
    """A router that never chooses the third expert, unless it is healthy."""

    def __init__(self, how: str, *, trained: bool = False, healthy: bool = False):
        self.embed, self.router = nnx.Linear(D, D, rngs=rngs(1)), nnx.Linear(D, E, rngs=rngs())
        self.router.bias[...] = jnp.array([0.0, 0.0, 0.0 if healthy else -1e4, 0.0])
        self.how = how
        if how == "list":
            each = [Expert(rngs=rngs(i), trained=trained) for i in range(E)]
            self.experts = nnx.List(each)
        else:

            @nnx.split_rngs(splits=E)
            @nnx.vmap(axis_size=E)
            def make(rngs: nnx.Rngs) -> Expert:
                return Expert(rngs=rngs, trained=trained)

            self.experts = make(rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embed(x)
        gate = jax.nn.softmax(self.router(h))
        if self.how == "list":
            top, which = jax.lax.top_k(gate, 2)
            y = jnp.zeros_like(h)
            for number, expert in enumerate(self.experts):
                mask = which == number
                share = (top * mask).sum(-1, keepdims=True)
                y += expert(jnp.where(mask.any(-1, keepdims=True), h, 0)) * share
            return y
        one = jax.nn.one_hot(gate.argmax(-1), E)
        if self.how == "all":
            received, back = jnp.einsum("ne,nd->end", one, h), one.T[:, :, None] * gate.T[..., None]
            out = nnx.vmap(lambda m, x: m(x))(self.experts, received)
            return (out * back).sum(0)
        place = jax.nn.one_hot(((jnp.cumsum(one, 0) * one).max(-1) - 1).astype(int), N // 2)
        sent = one[:, :, None] * place[:, None, :]
        out = nnx.vmap(lambda m, x: m(x))(self.experts, jnp.einsum("nec,nd->ecd", sent, h))
        return jnp.einsum("nec,ecd->nd", sent * gate.max(-1)[:, None, None], out)


@pytest.mark.parametrize(
    ("how", "trained", "site"),
    [
        ("list", True, "experts/2/up"),
        pytest.param("list", False, "experts/2/up", marks=pytest.mark.long),
        ("all", False, "experts/up[2]"),
        pytest.param("capacity", True, "experts/up[2]", marks=pytest.mark.long),
        pytest.param("capacity", False, "experts/up[2]", marks=pytest.mark.long),
    ],
)
def test_the_router_that_never_chooses_an_expert_is_named(
    how: str, trained: bool, site: str
) -> None:
    (finding,) = stepped(Experts(how, trained=trained), X)
    if how == "list":  # here the choice itself is seen, and what it leaves out follows from it
        assert (finding.rule, finding.severity) == ("dead-experts", "warning")
        assert "nothing reaches expert 2 of the 4" in finding.message
        assert (finding.effects[0].rule, finding.effects[0].site) == ("dead-units", site)
        return
    assert (finding.rule, finding.site, finding.severity) == ("dead-units", site, "warning")
    assert "what 'router' returns decides what reaches it" in finding.message
    assert "bias" not in finding.message.replace("bias' has", "")


@pytest.mark.parametrize(
    "how",
    [
        "list",
        pytest.param("all", marks=pytest.mark.long),
        pytest.param("capacity", marks=pytest.mark.long),
    ],
)
def test_experts_that_are_all_chosen_raise_no_alarm(how: str) -> None:
    assert alarms(stepped(Experts(how, healthy=True, trained=True), X)) == []


def test_an_expert_in_a_branch_that_is_not_taken_is_not_blamed() -> None:
    class Branch(nnx.Module):
        def __init__(self) -> None:
            self.router, self.out = nnx.Linear(D, E, rngs=rngs()), nnx.Linear(D, 2, rngs=rngs(3))
            self.router.bias[...] = jnp.array([0.0, 0.0, -1e4, 0.0])
            self.a, self.b = Expert(rngs=rngs(1)), Expert(rngs=rngs(2))

        def __call__(self, x: jax.Array) -> jax.Array:
            which = self.router(x).mean(0).argmax() == 2
            y = nnx.cond(which, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x)
            return self.out(y)

    found = stepped(Branch(), X)
    assert {one.site for one in found} <= {"router"}  # it gets no gradient through the argmax


class RMSNorm(nnx.Module):
    def __init__(self, width: int, dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * self.scale


class Normed(nnx.Module):
    def __init__(self, size: float, dtype: Any, *, module: bool):
        how: Any = dict(dtype=dtype, param_dtype=dtype)
        self.body = nnx.Linear(D, 16, rngs=rngs(), **how)
        self.body.kernel[...] *= size
        self.norm = RMSNorm(16, dtype) if module else None
        self.head = nnx.Linear(16, 4, rngs=rngs(1), **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.body(x)
        if self.norm is None:
            return self.head(h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True)))
        return self.head(self.norm(h))


@pytest.mark.parametrize(("module", "site"), [(True, "norm"), (False, "head")])
def test_a_norm_whose_square_overflows_is_the_cause_of_zeros_behind_it(
    module: bool, site: str
) -> None:
    model, x = Normed(600, jnp.float16, module=module), X.astype(jnp.float16)
    (finding,) = stepped(model, x)
    assert (finding.rule, finding.site, finding.severity) == ("dead-units", site, "error")
    h = np.asarray(model.body(x), np.float64)
    assert f"'body' returned values up to {np.abs(h).max():.3g}" in finding.message
    assert (h**2).sum(-1).mean() > 65504
    assert "exceeds the largest number of its dtype, 6.55e+04" in finding.message
    assert "reset the bias" not in finding.message


def test_a_value_that_is_too_large_explains_the_zeros_of_the_norm() -> None:
    (finding,) = stepped(Normed(1e20, jnp.float32, module=True), X)
    assert (finding.rule, finding.site) == ("overflow", "body")
    assert "dead-units" in [one.rule for one in finding.effects]


def test_a_norm_of_usual_values_raises_no_alarm() -> None:
    assert alarms(stepped(Normed(1.0, jnp.float32, module=True), X)) == []


class Chain(nnx.Module):
    """Layers a, b and c, and a head behind them."""

    def __init__(self, run: Any, **changes: Any):
        self.a, self.b, self.c = (nnx.Linear(D, D, rngs=rngs(i)) for i in range(3))
        self.head, self.alpha = nnx.Linear(D, 2, rngs=rngs(3)), nnx.Param(jnp.zeros(()))
        self.cell, self.run = nnx.LSTMCell(D, D, rngs=rngs(4)), run

    def __call__(self, x: jax.Array, *more: jax.Array) -> jax.Array:
        return self.head(self.run(self, x, *more))


def factor(m: Any, x: jax.Array) -> jax.Array:
    h = m.a(x)
    return jnp.tanh(m.b(h * 0.0) + h)


def rezero(m: Any, x: jax.Array) -> jax.Array:
    h = m.a(x)
    return jnp.tanh(m.b(m.alpha * h) + h)


def first_state(m: Any, x: jax.Array) -> jax.Array:
    _, y = m.cell((jnp.zeros((N, D)), jnp.zeros((N, D))), x)
    return y


def lora(m: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(m.a(x) + m.c(m.b(x)))


def condition(m: Any, x: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.tanh(m.a(x) + m.c(jax.nn.relu(m.b(c))))


def test_a_factor_of_0_between_two_layers_is_said() -> None:
    found = stepped(Chain(factor), X)
    (finding,) = [one for one in found if one.severity == "error"]
    assert (finding.rule, finding.site) == ("dead-units", "b")
    assert "what 'a' returns is not 0, so the model makes zeros of it in between" in finding.message


@pytest.mark.parametrize("run", [rezero, first_state, lora, condition])
def test_zeros_that_are_meant_raise_no_alarm(run: Any) -> None:
    model = Chain(run)
    used = {"rezero": "ab", "first_state": ("cell",), "lora": "abc", "condition": "abc"}
    for name in {"a", "b", "c", "cell"} - set(used[run.__name__]):
        delattr(model, name)
    if run is lora:
        model.c.kernel[...] = 0
    more = [jnp.zeros((N, D))] if run is condition else []
    assert alarms(stepped(model, X, *more)) == []


def test_a_layer_that_its_bias_turns_off_is_still_named_and_those_behind_it_are_not() -> None:
    model = Chain(lambda m, x: m.c(m.b(jax.nn.relu(m.a(x)))))
    del model.cell
    del model.alpha
    model.a.bias[...] = -50.0
    (finding,) = stepped(model, X)
    assert (finding.rule, finding.site, finding.evidence["others"]) == ("dead-units", "a", 0)
    assert "reset the bias" in finding.message
    size = np.sqrt(np.mean(np.asarray(model.a(X), np.float64) ** 2))
    assert 0.8 * size <= 50 <= 1.1 * size  # as the advice says, the bias is as large as the output


class FewTokens(nnx.Module):
    """A wide layer, and an expert that gets some tokens of the batch, of one direction at will."""

    def __init__(self, tokens: int, *, copies: bool):
        self.tokens, self.copies = tokens, copies
        self.body, self.expert = nnx.Linear(D, 24, rngs=rngs()), nnx.Linear(24, 24, rngs=rngs(1))
        self.head = nnx.Linear(24, D, rngs=rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.body(x)
        given = jnp.broadcast_to(x[:1], x.shape) * jnp.arange(len(x))[:, None] if self.copies else x
        chosen = jnp.arange(len(x))[:, None] < self.tokens
        return self.head(x + self.expert(jnp.where(chosen, given, 0.0)))


@pytest.mark.parametrize("tokens", [0, 1, 2, N])
def test_the_rank_of_what_one_token_makes_is_no_collapse(tokens: int):
    found = stepped(FewTokens(tokens, copies=False), X)
    assert not [one for one in found if one.rule == "collapse"]


def test_tokens_along_one_direction_are_a_collapse():
    found = stepped(FewTokens(N, copies=True), X)
    assert [one.site for one in found if one.rule == "collapse"] == ["expert"]
