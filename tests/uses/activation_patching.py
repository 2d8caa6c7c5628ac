"""Activation patching (causal tracing): where a transformer keeps the token that it must recall.

The answer at the last position is the token at position 2. A run with another token there is
patched, one layer and position at a time, with the value of the clean run.

Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT".
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_inspector as nni

LENGTH, SOURCE = 6, 2
SITES = ("token", "blocks/layers/0", "blocks/layers/1")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.attention(x, mask=nnx.make_causal_mask(x[..., 0])))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.token, self.place = (nnx.Embed(n, 32, rngs=rngs) for n in (8, LENGTH))
        self.blocks = nnx.Sequential(Block(rngs), Block(rngs))
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, tokens):
        x = self.blocks(self.token(tokens) + self.place(jnp.arange(LENGTH)))
        return self.head(x[:, -1])


def loss(logits, answers):
    return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()


def main():
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
        optimizer.update(model, nnx.grad(lambda m: loss(m(tokens), tokens[:, SOURCE]))(model))

    for tokens in jax.random.randint(jax.random.key(0), (120, 64, LENGTH), 0, 8):
        train_step(model, optimizer, tokens)

    answers, corrupted = tokens[:, SOURCE], tokens.at[:, SOURCE].add(1) % 8
    run = nnx.jit(nni.capture(Transformer.__call__, only=SITES, inputs=False, values=True))
    logits, record = run(model, tokens)
    worst, best = loss(model(corrupted), answers), loss(logits, answers)

    def recovered(site, where):
        patch = {site: nni.Patch(record[site].values, where)}
        return (worst - loss(nni.perturbed(model)(patch, corrupted), answers)) / (worst - best)

    at_each_position = jax.jit(jax.vmap(recovered, in_axes=(None, 0)), static_argnums=0)
    traced = {s: at_each_position(s, jnp.eye(LENGTH, dtype=bool)[:, :, None]) for s in SITES}
    return {"traced": traced, "best": best, "model": model, "tokens": tokens}
