"""A region around the calls of a small model, and the mean of the model's output by NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.inspector.script.watch import _Recorder  # what a loop without an inspector has
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import Region
from nnx_inspector.recordings.recording import Recording


class Net(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.float32(2.0))
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale


def once(model: Net, x: jax.Array) -> jax.Array:
    return model(x)


def twice(model: Net, x: jax.Array) -> jax.Array:
    return model(x) + model(x + 0.5)


def batch(step: int, rows: int = 2) -> jax.Array:
    return jnp.full((rows, 3), float(step))


def mean_of(model: Net, x: jax.Array) -> float:
    kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.linear.kernel, model.linear.bias)
    )
    return float(((np.asarray(x, np.float64) @ kernel + bias) * float(model.scale[...])).mean())


class WatchedRegion:
    """A region in which each call may wait until the variants that it wants are compiled."""

    def __init__(self, model: nnx.Module, every: int):
        self.recording, self.session = Recording(), Session(model)
        self._region = Region(_Recorder(self.recording), self.session, every)

    def __enter__(self) -> WatchedRegion:
        self._region.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._region.__exit__(*error)
        self.session.close()

    def run(self, step: Any, *args: Any, wait: bool = True) -> Any:
        out = jax.block_until_ready(step(*args))
        if wait:
            self.session.variants.wait()
        return out

    @property
    def steps(self) -> list[int]:
        return [one.step for one in self.recording.passes]

    def means(self) -> dict[int, float]:
        """Step -> the mean of the model's output in its pass."""
        found = ((one.step, one.summary("")) for one in self.recording.passes)
        return {step: summary.mean for step, summary in found if summary is not None}

    def check(self, wanted: dict[int, float]) -> None:
        """The passes are those of these steps, with these means, and nothing has failed."""
        found = self.means()
        assert list(found) == list(wanted)
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
        assert not self.session.errors
