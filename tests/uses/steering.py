"""Steering: adding a direction to a classifier's activations turns its ones into sevens.

The direction is the difference of the two digits' mean activations; its strength is data, so that
all strengths are tried in one vmapped program.

Source: Turner et al. 2023, "Steering Language Models With Activation Engineering".
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


def main(source=1, target=7):
    pixels, labels = load_digits(return_X_y=True)
    x = jnp.asarray(pixels / 16, jnp.float32)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(100):
        train_step(model, optimizer)

    _, record = nnx.jit(nni.capture(nnx.Sequential.__call__, values=True))(model, x)
    hidden = record["layers/0"].values
    direction = hidden[labels == target].mean(0) - hidden[labels == source].mean(0)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def steered(direction, strength):
        steering = {"layers/0": nni.Shift(direction, strength)}
        return nni.perturbed(model)(steering, x[labels == source]).argmax(-1)

    strengths = jnp.linspace(0.0, 3.0, 7)
    predictions = steered(direction, strengths)
    other = jax.random.permutation(jax.random.key(0), direction)  # as long, and of no meaning
    by_other = steered(other, strengths)
    flipped, by_chance = ((p == target).mean(axis=1) for p in (predictions, by_other))
    figures = {"flipped": flipped, "by_chance": by_chance, "strengths": strengths}
    return {**figures, "direction": direction, "predictions": predictions, "model": model, "x": x}
