"""A BatchNorm with running statistics where neighbouring positions differ, as after an upsampling.

A layer that doubles the resolution gives even and odd positions other means. Its running statistics
are those of all positions, so a sample that meets only the even ones would say that they do not
fit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finding_oracle import Oracle, batch_norm_offsets, close
from flax import nnx
from subjects import Subject, mse

import nnx_inspector as nni


class Generator(nnx.Module):
    """Noise, upsampled twice, with a BatchNorm after each layer."""

    def __init__(self, size: tuple[int, ...], kernel: int, stride: int):
        rngs = nnx.Rngs(0)
        self.size = size
        self.inlet = nnx.Linear(8, int(np.prod(size)) * 8, rngs=rngs)
        how: Any = {"kernel_size": (kernel,) * len(size), "strides": (stride,) * len(size)}
        self.ups = nnx.List([nnx.ConvTranspose(8, 8, **how, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(3)])
        self.out = nnx.Conv(8, 3, (3,) * len(size), rngs=rngs)

    def __call__(self, z: Any) -> Any:
        x = self.inlet(z).reshape(len(z), *self.size, 8)
        x = nnx.relu(self.norms[0](x))
        for up, norm in zip(self.ups, self.norms[1:], strict=True):
            x = nnx.relu(norm(up(x)))
        return self.out(x)


def subject(size: tuple[int, ...], kernel: int, stride: int, *, passes: int) -> Subject:
    """A generator in evaluation, after some passes in training that learn its statistics."""
    model: Any = Generator(size, kernel, stride)
    for norm in model.norms:
        norm.bias[...] = jnp.full(8, 0.5)  # so that the layer after it gets a mean
    z = jax.random.normal(jax.random.key(1), (32, 8))
    learn = nnx.jit(lambda model, z: model(z))
    for _ in range(passes):
        y = learn(model, z)
    model.eval()
    y = jnp.zeros(jax.eval_shape(model, z).shape)
    return Subject(model, z, (z, y), mse)


SHAPES = [((8, 8), 3, 2), ((8, 8), 4, 2), ((16,), 2, 2), ((4, 8), 4, 4)]


def of_modes(one: Subject) -> list[Any]:
    insp = nni.Inspector(one.model, one.x, display=False)
    try:
        insp.step(one.loss, one.batch)
        return [f for f in insp.findings if f.rule == "mode"]
    finally:
        insp.close()


@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_statistics_that_are_learnt_fit_an_upsampled_output(size, kernel, stride):
    one = subject(size, kernel, stride, passes=400)
    oracle = Oracle(one.model, one.loss, one.batch)
    for number in range(3):
        site = f"norms/{number}"
        whole = [x.reshape(len(x), -1, 8) for x in oracle.outputs[site]]
        off = batch_norm_offsets(whole, oracle.parameters(), site)
        assert off["shifted"] < 0.2  # so nothing is wrong
        assert 0.5 < off["scaled"] < 2
    assert of_modes(one) == []


@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_statistics_that_were_never_learnt_are_off_by_what_is_said(size, kernel, stride):
    one = subject(size, kernel, stride, passes=0)
    (found,) = of_modes(one)
    oracle = Oracle(one.model, one.loss, one.batch)
    calls = oracle.examined(found.site)
    assert calls is not None
    assert f" {calls[0].shape[0] * calls[0].shape[1]} values examined " in found.what
    off = batch_norm_offsets(calls, oracle.parameters(), found.site)
    for name, before in {"shifted": "was off by ", "scaled": "by a factor of "}.items():
        said = found.what.partition(before)[2].split()[0].rstrip(")")
        assert close(said, off[name]), found.what
