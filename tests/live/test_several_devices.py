"""A watched loop whose programs run on several devices: the record is that of one device.

On four devices the programs ask nothing while they run. One that asked the host within a condition
could stop for good: XLA for a CPU waits there for the other devices, which wait for the host.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives, elements
from compilations import ProgramTexts
from devices import on_four_devices
from flax import nnx
from inside import inside
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_inspector as nni

D, STEPS = 8, 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, D)), jnp.float32)
FIGURES = ("size", "mean", "std", "min", "max", "zeros")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.a(x)))


def trained(mesh: Any, layout: str, loop: str) -> Any:
    """The frame of a loop, and its losses; on one device without a mesh."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x, losses = X, list[float]()
    if mesh is not None:
        for one in (model, optimizer):
            nnx.update(one, jax.device_put(nnx.state(one), NamedSharding(mesh, P())))
        if layout == "tensor":  # each device has some of the hidden units
            for variable, spec in ((model.a.kernel, P(None, "d")), (model.b.kernel, P("d", None))):
                variable[...] = jax.device_put(variable[...], NamedSharding(mesh, spec))
        where = P("d") if layout == "data" else P()
        x = jax.device_put(X, NamedSharding(mesh, where))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)
        optimizer.update(model, grads)
        return loss

    def train(insp: Any = None) -> None:
        for number in range(STEPS):
            if insp is not None and number == 2:
                insp.perturb("a", nni.Scale(0.5))
            losses.append(float(step(model, optimizer, x)))

    if loop == "bare":
        train()
        return None, losses
    if loop == "seldom":
        insp = nni.Inspector(model, x, display=False)
        with insp.watch(every=3 * STEPS):
            train()
            train()
            inside(insp).session.variants.wait()
            train()
        insp.close()
        return None, losses
    if loop == "watch":
        with nni.watch(model, every=1) as recording:
            train()
        return recording.to_frame(), losses
    insp = nni.Inspector(model, x, display=False)
    with insp.watch(every=1):
        train(insp if loop == "perturbed" else None)
    frame = insp.recording.to_frame()
    insp.close()
    return frame[frame["kind"] == "watch"], losses


four = pytest.mark.skipif(jax.device_count() < 4, reason="run again with four devices")


@four
@pytest.mark.parametrize(("layout", "loop"), [("data", "watch"), ("tensor", "perturbed")])
def test_the_record_of_several_devices_is_that_of_one(layout: str, loop: str):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    ours, losses = trained(mesh, layout, loop)
    alone, expected = trained(None, layout, loop)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(ours) == len(alone)
    assert set(ours["quantity"]) >= {"output", "gradient"}
    assert list(ours["site"]) == list(alone["site"])
    for name in FIGURES:
        np.testing.assert_allclose(ours[name], alone[name], rtol=1e-4, atol=1e-6, err_msg=name)


@four
def test_an_unmeasured_step_exchanges_what_it_does_bare_and_a_measured_one_a_little_more():
    """By the texts of their programs: one exchange has what all sites have seen, and two more say
    whether the examples differ.
    """
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    with ProgramTexts() as unwatched:
        trained(mesh, "data", "bare")
    with ProgramTexts() as watched:
        trained(mesh, "data", "seldom")
    (bare,) = map(collectives, unwatched.of["step"])
    more = [collectives(text) - bare for text in watched.of["step"]]
    (one,) = [one for one in more if one]
    assert len(more) > 1  # the user's own program, compiled in a thread
    gathered = [name for name in one if name.startswith("all-reduce u32[")]
    assert len(set(one) - set(gathered)) <= 1, one
    assert sum(one.values()) <= 3, one
    assert sum(elements(name) > 4096 for name in one) == 1, one


@pytest.mark.skipif(jax.device_count() > 1, reason="this is the process of several devices")
def test_on_four_devices():
    """Starting such a process takes long, so those of other files run in it too."""
    tests = pathlib.Path(__file__).parents[1]
    beside = (
        tests / "live" / "test_parameter_stats_of_models.py",
        tests / "program" / "test_position_masks.py",
    )
    names = "is_that_of_one", "exchanges_what", "as_a_whole", "test_devices_hold_parts"
    on_four_devices(__file__, *names, beside=beside)
