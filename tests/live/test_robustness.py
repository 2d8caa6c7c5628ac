"""Traps of callbacks and live knobs that have no test elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from devices import FLAG, UNOPTIMIZED
from flax import nnx
from interceptors import call_model, double_output, loss_fn, watch_session
from jax import export
from models import batch, rngs
from record_checks import assert_summary

from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.places import SCALE
from nnx_inspector.records.capture import capture, value_and_grad

# ------------------------------------------------------------------------ callbacks


pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_value_that_no_turn_of_a_loop_changes_counts_once():
    """jax moves it out of a scan that is differentiated (jax 16637), and computes it once."""

    class Invariant(nnx.Module):
        def __init__(self, rngs):
            self.constant = nnx.Linear(3, 3, rngs=rngs)
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            def body(carry, _):
                constant, linear, y = carry
                return constant, linear, jnp.tanh(linear(y)) + constant(x)

            scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan((self.constant, self.linear, x), jnp.arange(3))[2]

    model, x = Invariant(rngs()), batch(4, 3)
    _, record = capture(model)(x)
    assert record["constant"].output.size == 3 * 4 * 3
    step = nnx.jit(nnx.grad(loss_fn))
    with watch_session(model, parameters=False) as session:
        step(model, x)
    sizes = {site: found["output"].size for site, found in session.arrived.items()}
    assert sizes["linear"] == 3 * 4 * 3
    assert sizes["constant"] == 4 * 3


def test_an_interrupt_while_receiving_reaches_the_user_with_the_next_program(monkeypatch):
    model, x = models.MLP(rngs()), batch(4, 3)
    session = Session(model)
    step = nnx.jit(call_model)

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.inbox, "receive", broken)

    def interrupted():
        with session.open():
            step(model, x)
            jax.effects_barrier()
            monkeypatch.undo()
            step(model, x)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not session.errors
    session.take()
    session.close()


def test_a_function_can_be_exported_beside_the_hooks():
    """`jax.export` cannot serialise callbacks: what needs none is exported, inside and after."""
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    run = jax.jit(lambda leaves, x: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(x))
    with intercept_methods(double_output, only="down"):
        inside = export.export(run)(leaves, x)
    other = models.TwoLayers(rngs())
    with watch_session(other):
        other(batch(2, 3))
        watched = export.export(run)(leaves, x)  # of another model
    after = export.export(run)(leaves, x)
    plain = model(x)
    for exported, factor in ((inside, 2.0), (watched, 1.0), (after, 1.0)):
        assert "callback" not in exported.mlir_module()
        np.testing.assert_allclose(exported.call(leaves, x), factor * plain, rtol=1e-6)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
from nnx_inspector.records.capture import capture
from nnx_inspector.live.session import Session

model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.arange(24.0).reshape(8, 3)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
plain = np.asarray(model(x))
graphdef, state = nnx.split(model)
call = lambda m, x: m(x)
pmapped = nnx.pmap(call, in_axes=(None, 0), out_axes=0)
runs = {
    "sharded jit": (nnx.jit(call), (jax.device_put(x, jax.NamedSharding(mesh, P("data"))),)),
    "shard_map": (
        nnx.jit(nnx.shard_map(call, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))),
        (x,),
    ),
    "pmap": (
        lambda m, x: pmapped(m, x.reshape(4, 2, 3)).reshape(8, 2),
        (x,),
    ),
}
for name, (run, args) in runs.items():
    session = Session(model, gradients=False)
    with session.open():
        y = run(model, *args)
    found = session.take()[""]["output"]
    np.testing.assert_allclose(y, plain, rtol=1e-5)
    assert session.errors == [], (name, session.errors)
    assert found.size == 16, (name, found.size)
    np.testing.assert_allclose(found.mean, plain.mean(), rtol=1e-5)
    session.close()
    print(name, "fine")

def move(x):
    return jax.device_put(x, jax.devices()[1])

model = nnx.Sequential(model, move, nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
last = model.layers[2]
weights = np.asarray(last.kernel[...], np.float64)
nnx.update(last, move(nnx.state(last)))
session = Session(model)
with session.open():
    nnx.grad(lambda m, x: (m(x) ** 2).sum())(model, x)
found = session.take()
assert session.errors == [], session.errors
out = plain @ weights
for site, one, slope in (("", out, 2 * out), ("layers/0", plain, 2 * out @ weights.T)):
    np.testing.assert_allclose(found[site]["output"].norm, np.linalg.norm(one), rtol=1e-5)
    np.testing.assert_allclose(found[site]["gradient"].norm, np.linalg.norm(slope), rtol=1e-5)
session.close()
print("two devices", "fine")

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
jax.set_mesh(mesh)
model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))  # the other's arrays lie on a mesh of pmap's
x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
session = Session(model)
with session.open():
    nnx.jit(nnx.grad(lambda m, x: (m(x) ** 2).sum()))(model, x)
found = session.take()[""]
assert session.errors == [], session.errors
np.testing.assert_allclose(found["output"].norm, np.linalg.norm(plain), rtol=1e-5)
np.testing.assert_allclose(found["gradient"].norm, np.linalg.norm(2 * plain), rtol=1e-5)
print("explicit", "fine")

each = lambda m, x: jax.vmap(jax.grad(lambda x: (m(x) ** 2).sum()))(x)
for run in (nnx.jit(each), each):
    with session.open():
        run(model, x)
    found = session.take()[""]
    assert session.errors == [], session.errors
    np.testing.assert_allclose(found["output"].norm, np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_allclose(found["gradient"].norm, np.linalg.norm(2 * plain), rtol=1e-5)
print("each example, explicit", "fine")
"""


def test_sharded_passes_are_summarised_once():
    """Sharded: a callback fires once (per device in shard_map; ordered raises)."""
    # four devices can be had of the CPU only, wherever the other tests run
    flags = f"{FLAG} {UNOPTIMIZED}"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = ("sharded jit", "shard_map", "pmap", "two devices", "explicit", "each example, explicit")
    assert done.stdout.splitlines() == [f"{name} fine" for name in told]


# --------------------------------------------------------------------- live knobs


def test_a_knob_turned_between_a_forward_pass_and_its_recomputation():
    """Under `jax.checkpoint` the knobs are read twice; a flip between the two gave loss 1.68 and
    gradient 0.
    """
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)

    @jax.checkpoint
    def run(state, x):
        return nnx.merge(graphdef, state)(x)

    with watch_session(model, gradients=False) as session:
        graphdef, state = nnx.split(model)
        session.perturb({"up": (SCALE, 2.0)})
        y, back = jax.vjp(run, state, x)
        expected = back(jnp.ones_like(y))
        y, back = jax.vjp(run, state, x)
        session.perturb({"up": (SCALE, -3.0)})  # waits for programs under way; there are none
        found = back(jnp.ones_like(y))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_flips_during_a_jitted_step_with_remat_act_on_whole_steps():
    """The same within one program: all reads of one execution return the same word."""
    model, x = models.MLP(rngs()), batch(4, 3)
    step = nnx.jit(nnx.value_and_grad(lambda m, x: (nnx.remat(call_model)(m, x) ** 2).sum()))

    def outcome():
        value, grads = step(model, x)
        return np.concatenate([np.ravel(value), *map(np.ravel, jax.tree.leaves(grads))])

    knobs = ({}, {"up": (SCALE, -2.0)})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    stop = threading.Event()
    with watch_session(model, gradients=False) as session:
        allowed = []
        for rows in knobs:
            session.perturb(rows)
            allowed.append(outcome())

        def flip():
            number = 0
            while not stop.is_set():
                session.perturb(knobs[number % 2])
                number += 1

        thread = threading.Thread(target=flip)
        thread.start()
        try:
            for _ in range(1000):
                found = outcome()
                assert any(np.allclose(found, whole, rtol=1e-5, atol=1e-6) for whole in allowed)
        finally:
            stop.set()
            thread.join(60)
            sys.setswitchinterval(interval)


def test_the_extremes_of_two_calls_of_one_site_are_those_of_both():
    """The gradients of both are summarised, not their sum."""
    model, x = models.Shared(rngs()), batch(4, 3)
    (_, record), _ = value_and_grad(loss_fn)(model, x)

    def by_hand(first, second):
        return ((second + model.second(jnp.tanh(first + model.first(x)))) ** 2).sum()

    zeros = jnp.zeros((4, 3))
    cotangents = np.stack(jax.grad(by_hand, argnums=(0, 1))(zeros, zeros))
    gradient = record["first"].gradient
    assert_summary(gradient, cotangents)
