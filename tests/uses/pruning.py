"""Pruning by magnitude: how many of a classifier's weights can go, and training what is left.

The masks are an argument, so one program tries all sparsities; fine-tuning under a mask leaves
the weights that are masked out as they are, for their gradient is zero.

Source: Zhu and Gupta 2017, "To Prune, or Not to Prune"; masks as in SparseML.
"""

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


def masks(model, sparsity):
    """For each kernel, False at the smallest weights."""
    size = {f"layers/{i}/kernel": jnp.abs(model.layers[i].kernel[...]) for i in (0, 2)}
    return {key: nni.PruneMask(w > jnp.quantile(w, sparsity)) for key, w in size.items()}


def main():
    pixels, labels = load_digits(return_X_y=True)
    x = jnp.asarray(pixels / 16, jnp.float32)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))

    def loss(model, pruned):
        logits = nni.perturbed(model)(pruned, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @nnx.jit
    def train_step(model, optimizer, pruned):
        optimizer.update(model, nnx.grad(loss)(model, pruned))

    def train(model, pruned, steps):
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        for _ in range(steps):
            train_step(model, optimizer, pruned)

    @nnx.jit
    def accuracy(model, pruned):
        return jnp.mean(nni.perturbed(model)(pruned, x).argmax(-1) == labels)

    train(model, {}, steps=100)
    dense = nnx.clone(model)
    accuracies = {s: accuracy(model, masks(model, s)) for s in (0.0, 0.3, 0.5, 0.7, 0.9)}
    pruned = masks(model, 0.7)
    train(model, pruned, steps=100)
    tuned = accuracy(model, pruned)
    return {"accuracies": accuracies, "tuned": tuned, "dense": dense, "model": model, "x": x}
