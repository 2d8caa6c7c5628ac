"""A training run that saves while it runs, to be killed: `python killed.py KIND PATH`.

It prints the number of each step at the end of its body, and runs until it is killed. KIND is
"inspector" (`insp.watch` over batches), "region" (`with insp.watch()`) or "watch" (`nni.watch`).
"""

from __future__ import annotations

import itertools
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def main(kind: str, path: str) -> None:
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    def step(number: int) -> None:
        train_step(model, optimizer, X).block_until_ready()
        print(number, flush=True)

    if kind == "watch":
        with nni.watch(model, every=1, save=path):
            for i in itertools.count():
                step(i)
    insp = nni.Inspector(model, X, display=False)
    insp.save(path)
    if kind == "region":
        with insp.watch(every=1):
            for i in itertools.count():
                step(i)
    for i in insp.watch(itertools.count(), every=1):
        loss = train_step(model, optimizer, X)
        insp.metrics(loss=loss)
        loss.block_until_ready()
        print(i, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
