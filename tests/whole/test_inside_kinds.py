"""All sixteen perturbations at an operation, its units and recordings, and what more sites cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector._compat import jaxprs
from tests.models.explicit import MODELS, D

X = jax.random.normal(jax.random.key(0), (3, D))
UNITS = jnp.array([1.0, 0.0, 0.5])  # the keys of the softmax

KINDS: dict[str, Any] = {
    "zero": nni.Zero(),
    "scale": nni.Scale(0.5),
    "shift": nni.Shift(UNITS, 2.0),
    "noise": nni.Noise(0.1, seed=3),
    "clamp": nni.Clamp(0.1, 0.3),
    "mask": nni.Mask(UNITS),
    "mean": nni.Mean(),
    "patch": nni.Patch(UNITS),
    "cast": nni.Cast(jnp.bfloat16),
    "apply": nni.Apply(jnp.multiply, (UNITS,)),
    "scale gradient": nni.ScaleGradient(0.5),
    "reverse gradient": nni.ReverseGradient(2.0),
    "stop gradient": nni.StopGradient(),
    "clip gradient": nni.ClipGradient(0.1),
}
LEAST = 2e-5


@pytest.mark.parametrize("site", ["@softmax", "@attention"])
@pytest.mark.parametrize("name", KINDS)
def test_a_perturbation_of_an_operation_is_that_of_its_value(name: str, site: str) -> None:
    one, model = KINDS[name], MODELS[0](nnx.Rngs(1))

    def explicit(x: jax.Array) -> jax.Array:
        # a softmax is the only value between the scores and the second product
        change = lambda s, v: one.apply_at(v, f"{site}/0/0") if s == "@softmax" else v  # noqa: E731
        return (model.explicit(x, change) ** 2).sum()

    wanted = jax.value_and_grad(explicit)(X)
    ours = lambda x: (nni.perturbed(model)({site: one}, x) ** 2).sum()  # noqa: E731
    found = jax.value_and_grad(ours)(X)
    with nni.perturb(site, one, model=model):
        live = nnx.jit(lambda m, x: jax.value_and_grad(lambda x: (m(x) ** 2).sum())(x))(model, X)
    for each in (found, live):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=LEAST, atol=LEAST), each, wanted
        )


@pytest.mark.parametrize("one", [nni.ParameterNoise(0.1), nni.PruneMask(UNITS > 0)])
def test_an_operation_has_no_parameters(one: Any) -> None:
    with pytest.raises(ValueError, match="'@softmax' matches no site"):
        nni.perturbed(MODELS[0](nnx.Rngs(1)))({"@softmax": one}, X)


def test_units_of_an_operation_are_those_of_its_value() -> None:
    model = MODELS[0](nnx.Rngs(1))
    _, record = nni.capture(model, only=["@softmax", "@attention"], values=True, units=-1)(X)
    for entry in (record["@softmax"], record["@attention"]):
        np.testing.assert_allclose(entry.units.mean, entry.values.mean(0), rtol=1e-5)


def recorded(tmp_path: Any, name: str, seed: int) -> nni.Recording:
    model = MODELS[0](nnx.Rngs(seed))
    insp = nni.Inspector(model, X, only=["**", "@attention", "@softmax"], display=False)
    insp.step(lambda m, x: (m(x) ** 2).sum(), X)
    insp.recording.save(tmp_path / name)
    insp.close()
    return nni.load(tmp_path / name)


def test_a_recording_keeps_operations_and_compares_them(tmp_path: Any) -> None:
    a, b = recorded(tmp_path, "a.nni", 1), recorded(tmp_path, "b.nni", 2)
    for quantity in ("output", "gradient"):
        _, found = a.series("@attention", quantity)
        assert found[-1].size == 9
    frame = nni.compare(a, b)
    assert {"@attention", "@softmax"} <= set(frame.site)
    assert set(frame[frame.site == "@attention"].quantity) == {"output", "gradient"}


def test_more_operations_cost_their_own_measuring_and_no_more() -> None:
    model = MODELS[0](nnx.Rngs(1))

    def equations(*operations: str) -> int:
        run = nni.capture(model, only=["", *operations])
        jaxpr = jax.make_jaxpr(lambda x: run(x)[0:2])(X)
        return sum(1 for _ in every(jaxpr.jaxpr))

    def every(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs.sub_jaxprs(equation):
                yield from every(jaxprs.open_jaxpr(inner)[0])

    none, one = equations(), equations("@softmax")
    both, three = equations("@softmax", "@div"), equations("@softmax", "@div", "@attention")
    assert one - none > 0
    assert abs((both - one) - (one - none)) <= 4  # the packing of a record has a few for all
    assert three - both <= (one - none) + 8  # and an attention turns its axes


def test_a_loop_watches_an_attention() -> None:
    model = MODELS[0](nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    insp = nni.Inspector(model, X, only="@attention", display=False)
    patterns = []
    for batch in insp.watch([X, X], every=1):
        patterns.append(nni.capture(model, only="@attention", values=True)(batch)[1])
        step(model, optimizer, batch)
    _, found = insp.recording.series("@attention", "output")
    insp.close()
    wanted = [float(one["@attention"].values.std()) for one in patterns]
    assert [s.std for s in found][-2:] == pytest.approx(wanted, rel=1e-4)


def test_a_sweep_and_the_flow_have_operations() -> None:
    model, sites = MODELS[0](nnx.Rngs(1)), ["q", "@softmax", "@attention"]
    loss_fn = lambda model, x: (model(x) ** 2).sum()  # noqa: E731
    frame = nni.sweep(
        model, loss_fn, X, sites=sites, perturbation=nni.Scale(0.5), progress=False
    ).set_index("site")
    assert set(frame.index) == set(sites)
    for site in sites[1:]:
        wanted = (model.explicit(X, lambda s, v: v / 2 if s == "@softmax" else v) ** 2).sum()
        assert frame.loss[site] == pytest.approx(float(wanted), rel=1e-5)
    trace = nni.trace(model, X, only=["**", *sites])
    edges = {(edge.producer, edge.consumer) for edge in trace.edges}
    assert edges == {("q", "@softmax"), ("k", "@softmax"), ("@softmax", "@attention")}
