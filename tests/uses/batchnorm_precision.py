"""BatchNorm in another precision: what rounding around it alone costs a trained classifier.

What BatchNorm receives and returns is rounded, in training as well as after it, while every other
layer computes in float32.

Source: Micikevicius et al. 2018, "Mixed Precision Training", which keeps BatchNorm in float32.
"""

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.hidden(x))))


def rounded(dtype):
    return {"norm": [nni.Cast(dtype, at="input"), nni.Cast(dtype)]}


def main():
    pixels, labels = load_digits(return_X_y=True)
    x = jnp.asarray(pixels / 16, jnp.float32)

    @nnx.jit(static_argnums=2)
    def train_step(model, optimizer, dtype):
        def loss(model):
            logits = nni.perturbed(model)(rounded(dtype), x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    accuracy, errors = {}, {}
    for dtype in (jnp.bfloat16, jnp.float32):
        model = Classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        for _ in range(50):
            train_step(model, optimizer, dtype)
        trained = nnx.view(model, use_running_average=True)
        accuracy[dtype] = jnp.mean(trained(x).argmax(-1) == labels)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn):
        change = nni.perturbed(trained)(rounded(dtype), x) - trained(x)
        errors[dtype] = jnp.linalg.norm(change) / jnp.linalg.norm(trained(x))
    return {"accuracy": accuracy, "errors": errors, "model": trained, "x": x}
