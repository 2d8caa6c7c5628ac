"""Class activation maps: where in an image a CNN sees the digit that it names.

CAM weighs the last feature maps by the head's weights; Grad-CAM by the gradient of the class's
logit, which is that with respect to a shift by zero.

Source: Zhou et al. 2016, "Learning Deep Features for Discriminative Localization"; Selvaraju et
al. 2017, "Grad-CAM".
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


class CNN(nnx.Module):
    def __init__(self, rngs):
        first, second = (nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in ((1, 8), (8, 16)))
        self.features = nnx.Sequential(first, nnx.relu, second, nnx.relu)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.features(x).mean(axis=(1, 2)))


def main():
    digits, rng = load_digits(), np.random.default_rng(0)
    labels, corners = digits.target[:256], rng.integers(0, 9, (256, 2))
    x = np.zeros((256, 16, 16, 1), np.float32)  # each digit somewhere on a larger canvas
    for canvas, image, (i, j) in zip(x, digits.images, corners, strict=False):
        canvas[i : i + 8, j : j + 8, 0] = image / 16
    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(100):
        train_step(model, optimizer)

    run = nnx.jit(nni.capture(CNN.__call__, only="features", values=True))
    logits, record = run(model, x)
    maps, named = record["features"].values, logits.argmax(-1)
    cam = jnp.einsum("bhwc,cb->bhw", maps, model.head.kernel[...][:, named])

    def logit(offset):
        y = nni.perturbed(model)({"features": nni.Shift(offset)}, x)
        return jnp.take_along_axis(y, named[:, None], axis=1).sum()

    weights = jax.jit(jax.grad(logit))(jnp.zeros_like(maps)).mean(axis=(1, 2), keepdims=True)
    grad_cam = nnx.relu((weights * maps).sum(-1))
    digits = (x, labels, corners)
    return {"cam": cam, "grad_cam": grad_cam, "named": named, "model": model, "digits": digits}
