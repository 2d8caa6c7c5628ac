"""Variables that are references (`ref=True`, `hijax=True`): writes in place are not lost."""

from __future__ import annotations

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.inspector import Inspector
from nnx_inspector.program.analysis.trace import trace
from nnx_inspector.records.capture import capture, value_and_grad


class Count(nnx.Variable):
    pass


class Counts(nnx.Module):
    """Counts its calls in a Variable of the given kind."""

    def __init__(self, rngs, **kind):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.count = Count(jnp.zeros(()), **kind)

    def __call__(self, x):
        self.count[...] += 1.0
        return self.linear(x) * self.count[...]


def loss(model, x):
    return (model(x) ** 2).sum()


def captured(model, x):
    return capture(model)(x)


def graded(model, x):
    (value, record), _ = value_and_grad(loss)(model, x)
    return value, record


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("run", [captured, graded])
def test_what_a_call_writes_to_a_reference_is_kept(run, jitted):
    x = batch(4, 3)
    plain, model = Counts(rngs(), ref=True), Counts(rngs(), ref=True)
    reference = model.count.get_raw_value()
    call = nnx.jit(run) if jitted else run
    for times in (1, 2):
        expected = plain(x)
        result, record = call(model, x)
        if run is captured:
            np.testing.assert_allclose(result, expected, rtol=1e-6)
        np.testing.assert_allclose(record[""].output.mean, np.mean(expected), rtol=1e-5)
        assert float(model.count[...]) == times == float(plain.count[...])
        assert "ref=True" in record.unseen["count"]
    assert model.count.get_raw_value() is reference


def test_a_parameter_may_be_a_reference():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.full((3,), 2.0), ref=True)

        def __call__(self, x):
            return x * self.scale[...]

    model, x = Scaled(), batch(4, 3)
    (_, record), grads = value_and_grad(loss)(model, x)
    np.testing.assert_allclose(grads["scale"][...], (2 * x * x * 2.0).sum(0), rtol=1e-5)
    np.testing.assert_allclose(record[""].gradient.mean, np.mean(4.0 * x), rtol=1e-5)
    np.testing.assert_array_equal(model.scale[...], 2.0)


def test_a_pass_that_must_not_change_the_model_leaves_references_alone():
    model = Counts(rngs(), ref=True)
    insp = Inspector(model, batch(4, 3))
    insp.run(batch(4, 3))
    insp.close()
    assert "ref=True" in trace(model, batch(4, 3)).unseen["count"]
    assert float(model.count[...]) == 0.0


def test_what_nnx_cannot_update_under_a_transform_is_refused_and_nothing_changes():
    """flax 0.12.8 traces such a write and loses it; newer ones raise their own error."""
    model = Counts(rngs(), hijax=True)
    with pytest.raises((InspectorError, flax.errors.FlaxError), match="ref=True"):
        capture(model)(batch(4, 3))
    assert float(model.count[...]) == 0.0
    assert jax.tree.leaves(nnx.state(model, nnx.Param))
