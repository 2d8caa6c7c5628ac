"""A Linen module inside a ToNNX: every reading of its site has the parameters of the trace."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8, name="wide")(x)))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Encoder(name="inner")(nn.LayerNorm()(x))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(6, name="dense")(x), None


class Net(nnx.Module):
    def __init__(self, module: Any, x: Any, *, rngs: nnx.Rngs):
        self.encoder = nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), x)
        self.head = nnx.Linear(self.encoder(x).shape[-1], 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.encoder(x))


X = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)


@pytest.mark.parametrize("linen", [Encoder, Deep, Scanned])
@pytest.mark.parametrize("bare", [True, False])
def test_what_the_trace_counts_is_listed(inspect, linen: Any, bare: bool):
    model: Any = Net(linen(), X, rngs=nnx.Rngs(0))
    model = model.encoder if bare else model
    insp = inspect(model, X)
    counts = insp.trace.to_frame().set_index("site").parameters
    sites = [site for site in counts.index if counts[site] and insp.parameters(site)]
    assert sites == [site for site in counts.index if counts[site]]
    assert len(sites) > (1 if bare else 3)
    facts = insp.recording.facts.parameters
    for site in sites:
        listed = insp.parameters(site)
        assert sum(one.size for one in listed.values()) == counts[site], site
        assert all(not site or path.startswith(site + "/") for path in listed)
        held = insp.values(site, part="parameter")  # and other Variables, such as keys
        paths = {"/".join(filter(None, (site, name))): x for name, x in held.items()}
        assert sum(np.size(paths[path]) for path in listed) == counts[site]
        of_site = [one.path for one in facts if one.site == site]
        assert of_site == [p for p in listed if p.rpartition("/")[0] == site], site


def test_the_case_of_the_issue_and_a_site_without_parameters(inspect):
    insp = inspect(Net(Encoder(), X, rngs=nnx.Rngs(0)), X)
    kernel = insp.model.encoder.wide["kernel"][...]
    found = insp.parameters("encoder/wide")["encoder/wide/kernel"]
    np.testing.assert_allclose(found.std, np.std(kernel), rtol=1e-5)
    assert insp.parameters("encoder").keys() > insp.parameters("encoder/wide").keys()
    with pytest.raises(ValueError, match="closest"):
        insp.parameters("encoder/narrow")
