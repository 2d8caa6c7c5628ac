"""What needs whole arrays is refused within a `shard_map`, with the reason that applies; around it
it is there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx_inspector as nni

WITHIN = r"'b' .*called within jax\.shard_map, .* \(float32\[2,3\]\)"


class Divided(nnx.Module):
    """Its second layer runs within a `shard_map`."""

    def __init__(self, mesh: Any, *, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.mesh = mesh

    def __call__(self, x: Any) -> Any:
        graphdef, state = nnx.split(self.b)

        def part(state: Any, x: Any) -> Any:
            return nnx.merge(graphdef, state)(x)

        return jax.shard_map(part, mesh=self.mesh, in_specs=(P(), P("d")), out_specs=P("d"))(
            state, self.a(x)
        )


@pytest.fixture(scope="module")
def insp():
    mesh = jax.make_mesh((1,), ("d",), (AxisType.Auto,), devices=jax.devices()[:1])
    found = nni.Inspector(Divided(mesh, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), display=False)
    yield found
    found.close()


def test_the_reason_is_the_shard_map(insp: Any):
    with pytest.raises(nni.InspectorError, match=WITHIN):
        insp.units("b")
    _, record = nni.capture(insp.model, units=-1)(jnp.ones((2, 4)))
    assert record["b"].units is None


@pytest.mark.parametrize(
    "read",
    [
        lambda insp, x: nni.attribute(insp.model, x, site="b"),
        lambda insp, x: nni.top_examples(insp.model, [x], "b", progress=False),
        lambda insp, x: insp.examples(None, "b", 0, progress=False),
        lambda insp, x: insp.sweep("b", units=-1, progress=False),
    ],
    ids=["attribute", "top_examples", "examples", "sweep"],
)
def test_what_needs_whole_arrays_says_why_there_are_none(insp: Any, read: Any):
    with pytest.raises((nni.InspectorError, ValueError), match=WITHIN):
        read(insp, jnp.ones((2, 4)))


def test_of_several_sites_a_sweep_of_units_leaves_out_those_within(insp: Any):
    frame = insp.sweep(["a", "b"], units=-1, progress=False)
    assert list(frame[frame.site == "b"].why_not.str.contains("jax.shard_map")) == [True]
    assert len(frame[frame.site == "a"]) == 6
    assert set(insp.sweep(["a", "b"], progress=False).site) == {"a", "b"}


@pytest.mark.parametrize("site", ["a", ""])
def test_what_is_around_it_has_units(insp: Any, site: str):
    model, x = insp.model, jnp.ones((2, 4))
    wanted = model.a(x) if site == "a" else model.b(model.a(x))
    np.testing.assert_allclose(insp.units(site).mean, np.mean(wanted, 0), rtol=1e-5)


def test_another_reason_stays_that_reason(insp: Any):
    with pytest.raises(nni.InspectorError, match="no array of numbers with an axis 5"):
        insp.units("a", axis=5)
