"""Noise on the parameters: how far the loss moves when a trained classifier's weights do.

Each seed is another noise, and the seeds are vmapped over: one program runs 32 noisy models.

Source: Plappert et al. 2018, "Parameter Space Noise for Exploration".
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(std=0.1, count=32):
    pixels, labels = load_digits(return_X_y=True)
    x = jnp.asarray(pixels / 16, jnp.float32)
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        grads = nnx.grad(lambda model: cross_entropy(model(x), labels))(model)
        optimizer.update(model, grads)

    for _ in range(100):
        train_step(model, optimizer)

    @jax.jit
    @jax.vmap
    def noisy_loss(seed):
        logits = nni.perturbed(model)({"": nni.ParameterNoise(std, seed)}, x)
        return cross_entropy(logits, labels)

    losses = noisy_loss(jnp.arange(count))
    return {"losses": losses, "clean": cross_entropy(model(x), labels), "model": model, "x": x}
