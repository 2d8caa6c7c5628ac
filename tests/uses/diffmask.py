"""Differentiable masking: which inputs a classifier of digits needs, learned by gradient descent.

Half of the features are pixels of some other image, so a mask that keeps the model's predictions
and is as small as possible must drop them.

Source: De Cao et al. 2020, "How do Decisions Emerge across Layers in Neural Models?
Interpretation with Differentiable Masking".
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


def main():
    pixels, labels = load_digits(return_X_y=True)
    pixels = jnp.asarray(pixels / 16, jnp.float32)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(128, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def beside_another(key):
        return jnp.concatenate([pixels, jax.random.permutation(key, pixels)], axis=1)

    @nnx.jit
    def train_step(model, optimizer, key):
        def loss(model):
            x = beside_another(key)
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(100):
        train_step(model, optimizer, rngs())

    x = beside_another(rngs())
    clean = jax.nn.softmax(model(x))

    def masked(mask):
        return nni.perturbed(model)({"layers/0": nni.Mask(mask, at="input")}, x)

    def objective(gates):
        mask = jax.nn.sigmoid(gates)
        divergence = optax.kl_divergence(jax.nn.log_softmax(masked(mask)), clean).mean()
        return divergence + 0.5 * mask.mean()

    gates, adam = jnp.full(128, 2.0), optax.adam(0.1)

    def learn(state, _):
        value, gradient = jax.value_and_grad(objective)(state[0])
        updates, moments = adam.update(gradient, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    (gates, _), losses = jax.lax.scan(learn, (gates, adam.init(gates)), length=200)
    kept = jax.nn.sigmoid(gates) > 0.5
    accuracy = [jnp.mean(y.argmax(-1) == labels) for y in (clean, masked(kept))]
    return {"kept": kept, "losses": losses, "accuracy": accuracy, "model": model, "x": x}
