"""What is not finite, and what made it: parameters, ids, metrics and values that reach nothing.

Each kind is tried in real loops, with NumPy's counts as the oracle, and beside each there is a
healthy program in which nothing is found.
"""

# pyright: reportOptionalSubscript=false

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.findings.findings import Finding, diagnose

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32, width: int = 16):
        kw: Any = {"rngs": rngs, "param_dtype": dtype, "dtype": dtype}
        self.a = nnx.Linear(4, width, **kw)
        self.b = nnx.Linear(width, width, **kw)
        self.out = nnx.Linear(width, 2, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.b(jnp.tanh(self.a(x)))))


def mse(model: Any, x: jax.Array) -> jax.Array:
    return (model(x).astype(jnp.float32) ** 2).mean()


@nnx.jit
def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(mse)(model, x)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def forward(model: Any, x: jax.Array) -> Any:
    return model(x)


def trained(tx: Any, steps: int, *, model: Any = None, every: int = 1, screen: bool = True) -> Any:
    """The findings after a loop, without the metrics' own."""
    model = MLP(nnx.Rngs(0)) if model is None else model
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = X.astype(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    if not screen:
        with nni.watch(model, every=every) as recording:
            for _ in range(steps):
                step(model, optimizer, x)
        return diagnose(recording)
    insp = nni.Inspector(model, x, display=False)
    for batch in insp.watch([x] * steps, every=every):
        step(model, optimizer, batch)
    with contextlib.closing(insp):
        return insp.findings


def seen(model: Any, batches: Any, example: Any = None) -> list[Finding]:
    insp = nni.Inspector(model, batches[0] if example is None else example, display=False)
    for x in insp.watch(batches, every=1):
        forward(model, x)
    with contextlib.closing(insp):
        return insp.findings


def of_rule(found: list[Finding], rule: str = "nonfinite") -> list[Finding]:
    every = [*found, *(effect for one in found for effect in one.effects)]
    return [one for one in every if one.rule == rule]


# -------------------------------------------------------------- every element


def spoiled(where: str, dtype: Any) -> MLP:
    """A model of which some elements of a kernel are NaN, between those of any sample."""
    model = MLP(nnx.Rngs(0), dtype, width=256)
    kernel = np.array(model.b.kernel[...].astype(jnp.float32))
    index: Any = {"element": (77, 101), "row": 77, "column": (slice(None), 101)}[where]
    kernel[index] = np.nan
    model.b.kernel[...] = jnp.asarray(kernel, dtype)
    return model


@pytest.mark.parametrize("where", ["element", "row", "column"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_nan_anywhere_in_a_parameter_is_counted_and_named(where: str, dtype: Any) -> None:
    model = spoiled(where, dtype)
    count = int(np.isnan(np.asarray(model.b.kernel[...], np.float64)).sum())
    (finding,) = of_rule(seen(model, [X.astype(dtype)]))
    assert f"the parameter 'b/kernel' ({count} NaN among 65536 elements) was not" in finding.message
    assert (finding.site, finding.step, finding.severity) == ("b", 0, "error")
    assert "Inf - Inf" not in finding.message, "more is known"


def test_in_stacked_layers_and_in_the_last_layer() -> None:
    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(3))
            self.last = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            run = nnx.scan(lambda x, b: jnp.tanh(b(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.last(run(x, self.blocks))

    model = Stack(nnx.Rngs(0))
    model.blocks.kernel[...] = model.blocks.kernel[...].at[1, 2, 3].set(jnp.nan)
    (finding,) = of_rule(seen(model, [X]))
    assert "'blocks/kernel' (1 NaN among 48 elements)" in finding.message
    model = Stack(nnx.Rngs(0))
    model.last.bias[...] = jnp.array([0.0, jnp.nan])
    (finding,) = of_rule(seen(model, [X]))
    assert "'last/bias' (1 NaN among 2 elements)" in finding.message
    assert finding.site == "last"
    assert of_rule(seen(Stack(nnx.Rngs(0)), [X])) == []


def normed() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
    return nnx.Sequential(nnx.Linear(4, 16, rngs=rngs), norm, nnx.Linear(16, 2, rngs=rngs))


def test_an_inf_of_the_data_is_told_with_the_nan_that_it_becomes() -> None:
    model, bad = normed(), np.array(X)
    bad[3, 1] = np.inf
    (finding,) = of_rule(seen(model, [X, jnp.asarray(bad)]))
    kernel, bias = (
        np.asarray(x[...], np.float64) for x in (model.layers[0].kernel, model.layers[0].bias)
    )
    out = bad.astype(np.float64) @ kernel + bias
    counts = f"{(out == np.inf).sum()} +Inf and {(out == -np.inf).sum()} -Inf among {out.size}"
    assert f"(the output of 'layers/1' before it held {counts} values)" in finding.what
    assert (finding.site, finding.step, finding.evidence["nan"]) == ("layers/2", 1, 2)


def test_a_running_statistic_that_is_nan_is_told_with_what_it_makes_nan() -> None:
    model = normed()
    model.layers[1].mean[...] = model.layers[1].mean[...].at[5].set(jnp.nan)
    (finding,) = of_rule(seen(model, [X]))
    assert finding.what == (
        "At the beginning of step 0, the statistic 'layers/1/mean' (1 NaN among 16 elements) was "
        "not finite, and the output of 'layers/1' held 8 NaN among 128 values"
    )
    assert (finding.site, finding.severity) == ("layers/1", "error")
    assert "can make it" not in finding.message
    model = normed()
    model.layers[1].use_running_average = False
    model.layers[1].mean[...] = model.layers[1].mean[...].at[5].set(jnp.nan)
    bad = X.at[:, 0].set(jnp.inf)  # makes NaN in the variance, whatever the statistic is
    found = of_rule(seen(model, [bad], X))
    assert [one.site for one in found if "statistic" in one.what] == ["layers/1"]
    assert not any("statistic" in one.what and "output" in one.what for one in found)


def test_a_mask_among_the_parameters_is_left_alone() -> None:
    class Masked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.mask = nnx.Param(jnp.where(jnp.tri(4, dtype=bool), 0.0, -jnp.inf))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.nn.softmax(self.mask[...]) @ self.linear(x[:4])

    assert seen(Masked(nnx.Rngs(0)), [X, X]) == []


# ------------------------------------------------------------- the optimizer


def by_schedule(at: int) -> Any:
    return optax.sgd(lambda count: jnp.where(jnp.asarray(count) >= at, jnp.nan, 1e-3))


def by_norm_of_zero() -> Any:
    """Clips by a norm that it loses."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = 0 * sum(jnp.sum(g * g) for g in jax.tree.leaves(updates))
        return jax.tree.map(lambda g: 0 * g / norm, updates), state

    return optax.GradientTransformation(lambda params: (), update)


class TwoHeads(nnx.Module):
    """The second head has a gradient of exactly 0."""

    def __init__(self, dtype: Any):
        kw: Any = {"rngs": nnx.Rngs(0), "param_dtype": dtype, "dtype": dtype}
        self.body, self.head, self.unused = (nnx.Linear(4, n, **kw) for n in (4, 2, 2))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(self.body(x))
        return self.head(h) + 0 * self.unused(h)


MADE = {  # the step whose update makes it, the optimizer, a parameter
    "a division by a deviation of 0": (
        0, lambda: optax.chain(optax.scale_by_rms(eps=0.0), optax.scale(-1e-3)), "unused/kernel"
    ),
    "float16 loses eps": (
        0, lambda: optax.chain(optax.scale_by_rms(), optax.scale(-1e-3)), "unused/kernel"
    ),
    "a schedule": (2, lambda: by_schedule(2), "body/kernel"),
    "a norm": (0, by_norm_of_zero, "body/bias"),
}  # fmt: skip


@pytest.mark.parametrize("screen", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_what_the_update_made_is_said_with_step_and_parameters(
    name: str, last: bool, screen: bool
) -> None:
    at, make, path = MADE[name]
    model = TwoHeads(jnp.float16 if "float16" in name else jnp.float32)
    found = trained(make(), at + (1 if last else 3), model=model, screen=screen)
    (finding,) = [one for one in of_rule(found) if "parameters" in one.evidence]
    assert finding.severity == "error"
    assert f"{path!r}" in finding.message
    assert f"so the update of step {at} made it: usually the optimizer" in finding.message
    assert "first_nan" not in finding.message
    assert finding.step == (at if last else at + 1)
    began = f"After step {at}, the last of" if last else f"At the beginning of step {at + 1},"
    assert finding.message.startswith(began)


def test_between_measured_steps_no_step_is_accused() -> None:
    for screen in (True, False):
        (finding,) = of_rule(trained(by_schedule(13), 25, every=10, screen=screen))
        assert finding.step == 20
        assert "at the beginning of step 10 they were finite" in finding.message
        assert "one of the steps 10 to 19 made it" in finding.message
        (finding,) = of_rule(trained(by_schedule(3), 8, every=10, screen=screen))
        assert finding.step == 7
        assert "one of the steps 0 to 7 made it" in finding.message


def test_a_nan_of_the_gradient_is_not_blamed_on_the_update() -> None:
    class Rooted(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.first(x)
            return h + jnp.sqrt((0 * h * h).sum())

    found = of_rule(trained(optax.sgd(0.1), 3, model=Rooted()))
    assert [(one.step, one.evidence.get("backward")) for one in found] == [(0, 1)]


@pytest.mark.parametrize("screen", [True, False])
@pytest.mark.parametrize(
    "tx", [optax.adam(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))]
)
def test_a_healthy_optimizer_is_not_accused(tx: Any, screen: bool) -> None:
    assert of_rule(trained(tx, 4, screen=screen)) == []


def test_donated_parameters_are_not_asked_after_the_last_step() -> None:
    model = MLP(nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def run(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda s: mse(nnx.merge(graphdef, s), x))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    donating = jax.jit(run, donate_argnums=0)
    insp = nni.Inspector(model, X, display=False)
    for x in insp.watch([X] * 3, every=1):
        state = donating(state, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))
    assert of_rule(insp.findings) == []
    insp.close()


def test_a_file_keeps_what_was_not_finite_after_the_last_step(tmp_path: Any) -> None:
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, by_schedule(2), wrt=nnx.Param)
    with nni.watch(model, every=1, save=tmp_path / "run.nni") as recording:
        for _ in range(3):
            step(model, optimizer, X)
    told = [one.message for one in diagnose(recording)]
    assert [one.message for one in diagnose(nni.load(tmp_path / "run.nni"))] == told
    assert any("After step 2" in text for text in told)


# ------------------------------------------------------------ enclosing calls


class Own(nnx.Module):
    """The root takes the log itself, between two calls."""

    def __init__(self) -> None:
        self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.log(self.a(x)))


class Block(nnx.Module):
    def __init__(self) -> None:
        self.inner = Own()
        self.last = nnx.Linear(4, 2, rngs=nnx.Rngs(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.inner(x + jnp.exp(-jnp.abs(x))))


class Looped(nnx.Module):
    """The log is made of what an earlier iteration of a scan carries."""

    def __init__(self) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=0, out_axes=0)
        self.blocks = make(nnx.Rngs(0).split(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: Any, block: Any) -> Any:
            return jnp.log(block(x))

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("make", [Own, Block, Looped])
def test_the_operations_of_enclosing_calls_are_among_the_candidates(make: Any) -> None:
    model = make()
    for layer in (m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)):
        layer.kernel[...] = jnp.abs(layer.kernel[...]) + 1
        layer.bias[...] = layer.bias[...] + 9  # of which a log stays positive
    fine = jnp.ones((8, 4))
    (finding,) = of_rule(seen(model, [fine, -99 * fine], fine))
    assert finding.step == 1
    assert "these operations between the last finite outputs and this one can make it" in (
        finding.message
    )
    listed = finding.message.partition("can make it: ")[2].partition(". nni.first_nan")[0]
    assert [one.partition(",")[0] for one in listed.split("; ")] == ["log"]
    assert "Inf - Inf" not in finding.message


# ------------------------------------------------------- what reaches nothing


class Log(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.log(x)


class Branches(nnx.Module):
    def __init__(self, how: str):
        self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.log, self.how = Log(), how

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.a(x)
        if self.how == "safe":
            return jnp.where(h > 0, self.log(jnp.where(h > 0, h, 1.0)), h)
        made = self.log(h)
        if self.how == "selected away":
            return jnp.where(h > 0, made, h)
        return h if self.how == "not used" else h + made


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("how", ["selected away", "not used", "used", "safe"])
def test_a_nan_that_reaches_neither_output_nor_gradient_is_a_note(how: str, trains: bool) -> None:
    model = Branches(how)
    ones = jnp.ones((8, 4))
    model.a.kernel[...], model.a.bias[...] = jnp.eye(4), jnp.zeros(4)
    insp = nni.Inspector(model, ones, display=False)
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    for x in insp.watch([ones, X], every=1):
        step(model, optimizer, x) if trains else forward(model, x)
    found = of_rule(insp.findings)
    insp.close()
    if how == "safe":
        assert found == []
        return
    first = min(found, key=lambda one: one.evidence["pass"])
    assert (first.site, first.severity) == ("log", "error" if how == "used" else "info")
    said = "all gradients were free of NaN" if trains else "no gradient was measured"
    assert (said in first.message) == (how != "used")


def test_a_nan_that_reaches_a_gradient_is_none() -> None:
    class Trap(nnx.Module):
        """Selected away forward, but the derivative of the root is infinite."""

        def __init__(self) -> None:
            self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.log = Log()

        def __call__(self, x: jax.Array) -> jax.Array:
            h = jnp.maximum(self.a(x), 0.0)
            return jnp.where(h > 0, self.log(h - 0.5 * (h == 0)) * jnp.sqrt(h), h)

    found = of_rule(trained(optax.sgd(0.1), 2, model=Trap()))
    assert "error" in {one.severity for one in found}


# ------------------------------------------------------------------------ ids


class Doubled(nnx.Embed):
    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        return 2 * super().__call__(inputs)


class Language(nnx.Module):
    def __init__(self, cls: Any = nnx.Embed, count: int = 50):
        self.embed = cls(count, 8, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.out(self.embed(ids))


FINE = jnp.array([[1, 2, -1], [0, 49, -50]])


@pytest.mark.parametrize("cls", [nnx.Embed, Doubled])
@pytest.mark.parametrize("one", [-100, 50, 2**24 + 1, -51])
def test_an_id_out_of_range_is_named_as_that(cls: Any, one: int) -> None:
    ids = FINE.at[0, 1].set(one)
    found = of_rule(seen(Language(cls), [FINE, ids, FINE]))
    (finding,) = found
    assert (finding.site, finding.step) == ("embed", 1)
    low, high = int(np.min(ids)), int(np.max(ids))
    assert "it has 50 embeddings, for the ids 0 to 49 (-50 to -1 count from the end), and " in (
        finding.message
    )
    assert f"received ids from {low} to {high}," in finding.message
    assert "NaN in the data" not in finding.message


def test_an_id_out_of_range_in_a_pass_of_the_inspector() -> None:
    for low in (-100, -123457):
        insp = nni.Inspector(Language(count=10), jnp.array([3, low]), display=False)
        (finding,) = of_rule(insp.findings)
        said = f"gather at [2 values from {low} to 3] along an axis of length 10"
        assert said in finding.message
        assert "it has 10 embeddings" in finding.message
        made = insp.first_nan()
        assert made is not None
        assert made.operands[1].low == low
        insp.close()


class Table(nnx.Module):
    def __init__(self, take: bool):
        self.table = nnx.Param(jnp.ones((10, 4)))
        self.out, self.take = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), take

    def __call__(self, ids: Any) -> Any:
        table = self.table[...]
        return self.out(jnp.take(table, ids, axis=0) if self.take else table[ids])


def test_a_look_up_of_the_users_own_is_listed_and_exact() -> None:
    fine, bad = jnp.array([1, -2]), jnp.array([-100, 3])
    (finding,) = of_rule(seen(Table(take=True), [fine, bad], fine))
    assert "can make it: gather along an axis of length 10 (NaN outside of it)" in finding.message
    insp = nni.Inspector(Table(take=True), bad, display=False)
    (finding,) = of_rule(insp.findings)
    assert "gather at [2 values from -100 to 3] along an axis of length 10" in finding.message
    assert "correct the ids" in finding.message
    insp.close()
    assert of_rule(seen(Table(take=False), [fine, bad], fine)) == [], "table[ids] is clamped"


@pytest.mark.parametrize("ids", [FINE, jnp.array([[7]]), jnp.array([[-50, 49]], jnp.int8)])
def test_ids_in_range_are_healthy(ids: Any) -> None:
    assert of_rule(seen(Language(), [ids, ids])) == []


def test_an_embedding_with_a_nan_is_not_blamed_on_its_ids() -> None:
    model = Language()
    model.embed.embedding[...] = model.embed.embedding[...].at[2, 0].set(jnp.nan)
    (finding,) = of_rule(seen(model, [FINE]))
    assert "the parameter 'embed/embedding' (1 NaN among 400 elements)" in finding.message
    assert "ids" not in finding.message


# -------------------------------------------------------------------- metrics


def with_metrics(values: dict[str, list[float]], every: int = 1) -> nni.Inspector:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    count = len(next(iter(values.values())))
    insp = nni.Inspector(model, X, display=False)
    for i, x in enumerate(insp.watch([X] * count, every=every)):
        forward(model, x)
        insp.metrics(**{name: of[i] for name, of in values.items()})
    return insp


@pytest.mark.parametrize("every", [1, 7])
def test_metrics_that_are_not_finite_are_counted_from_their_first_step(every: int) -> None:
    loss = [1.0 if i % 5 == 0 else math.nan for i in range(26)]
    insp = with_metrics({"loss": loss, "fine": [0.5] * 26}, every)
    (finding,) = of_rule(insp.findings, "metrics")
    assert "'loss' was NaN in 20 of 26 values, first at step 1" in finding.message
    assert (finding.step, finding.severity) == (1, "warning")
    assert "fine" not in finding.message
    assert ("was free of NaN, so what follows the model made it" in finding.message) == (every == 1)
    insp.close()


def test_infinite_metrics_and_several() -> None:
    several = {"a": [1.0, math.inf, 2.0], "b": [-math.inf, math.nan, 1.0], "c": [1.0, 2.0, 3.0]}
    insp = with_metrics(several)
    (finding,) = of_rule(insp.findings, "metrics")
    assert "'b' was NaN or infinite in 2 of 3 values, first at step 0; 'a' was infinite in 1" in (
        finding.message
    )
    assert finding.evidence == {"metrics": 2, "nan": 1, "infinite": 2}
    insp.close()


def test_metrics_that_are_finite_are_healthy() -> None:
    insp = with_metrics({"loss": [1e300, -1e300, 0.0]})
    assert insp.findings == []
    insp.close()


def test_the_count_stays_exact_when_points_are_dropped_and_in_files(tmp_path: Any) -> None:
    random = np.random.default_rng(0)
    values = np.where(random.uniform(size=3000) < 0.3, np.nan, 1.0)
    values[:50] = 2.0
    recording = nni.Recording(max_steps=2, max_bytes=2**20)
    recording.attach(tmp_path / "run.nni", print)
    for i, value in enumerate(values.tolist()):
        recording.add_metrics(i, {"loss": value, "other": 1.0})
        if i == 1500:
            recording.save(tmp_path / "run.nni")  # written anew: most points are dropped
    recording.detach()
    recording.save(tmp_path / "whole.nni")
    assert recording.thinned_points > 2000
    count, first = int(np.isnan(values).sum()), int(np.flatnonzero(np.isnan(values))[0])
    for one in (recording, nni.load(tmp_path / "run.nni"), nni.load(tmp_path / "whole.nni")):
        (finding,) = diagnose(one)
        assert f"'loss' was NaN in {count} of 3000 values, first at step {first}" in finding.message


def test_a_number_beyond_floats_is_left_out_once_warned_of() -> None:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)

    def loop() -> int:
        return sum(insp.metrics(big=-(10**400), fine=10**300) is None for _ in insp.watch([X] * 4))

    with pytest.warns(nni.InspectorWarning, match=r"'big' is not .* beyond the largest float"):
        steps = loop()
    assert steps == 4
    assert list(insp.recording.curves()) == ["fine"]
    assert of_rule(insp.findings, "metrics") == []
    with pytest.raises(TypeError, match="too large for a float"):
        insp.recording.add_metrics(0, {"big": 10**400})
    insp.close()
