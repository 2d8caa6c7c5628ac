"""A fixed sinusoidal embedding of which most units hardly vary is a note; what is sound is silent.

Positions, rotations, learned frequencies and other fixed maps vary little over the examples by
design, or are no sinusoids.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diagnosis import looped, stepped, watched
from finding_oracle import Oracle
from flax import nnx
from subjects import Subject, gauss

LINES = jnp.linspace(0, 1, 64)


def frequencies(count, period=10000.0):
    return jnp.exp(-jnp.log(period) * jnp.arange(count) / count)


class Sines(nnx.Module):
    """Sines, then cosines."""

    def __init__(self, width=32, period=10000.0):
        self.frequencies = nnx.Variable(frequencies(width // 2, period))

    def __call__(self, t):
        angles = t[:, None] * self.frequencies[...]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class Alternating(nnx.Module):
    """Sines and cosines in turn, as in Vaswani et al. 2017."""

    def __init__(self, width=32):
        self.width = width

    def __call__(self, t):
        angles = t[:, None] * frequencies(self.width // 2)
        out = jnp.zeros((len(t), self.width))
        return out.at[:, 0::2].set(jnp.sin(angles)).at[:, 1::2].set(jnp.cos(angles))


class Stacked(Sines):
    """Pairs of a sine and a cosine, scaled and in bfloat16."""

    def __call__(self, t):
        angles = t[:, None] * self.frequencies[...]
        pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(len(t), -1)
        return (jnp.sqrt(2.0) * pairs).astype(jnp.bfloat16)


class Wrapped(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, t):
        return self.inner(t)


class Denoiser(nnx.Module):
    """A network of images whose channels are shifted by what its time is embedded as."""

    def __init__(self, time, width=32):
        rngs = nnx.Rngs(0)
        self.time, self.film = time, nnx.Linear(width, 16, rngs=rngs)
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

    def __call__(self, batch):
        x, t = batch
        shift = self.film(self.time(t))[:, None, None]
        return self.out(nnx.silu(self.conv(x) + shift))


def denoising(time, t=LINES, width=32):
    batch = gauss(len(t), 4, 4, 1), t
    return Subject(Denoiser(time, width), batch, batch, lambda m, b: ((m(b) - b[0]) ** 2).mean())


def over(model, x):
    return Subject(model, x, x, lambda m, x: (m(x) ** 2).mean())


def field(*layers, x=LINES):
    return over(nnx.Sequential(*layers), x)


def linear(units, seed=0):
    return nnx.Linear(units, 4, rngs=nnx.Rngs(seed))


FAULTY = {
    "a time from 0 to 1": ("time", lambda: denoising(Sines())),
    "alternating": ("time", lambda: denoising(Alternating())),
    "in bfloat16": ("time", lambda: denoising(Stacked())),
    "in another module": ("time", lambda: denoising(Wrapped(Sines()))),
    "256 units": ("time", lambda: denoising(Sines(256), width=256)),
    "a time that is divided": (
        "layers/1",
        lambda: field(lambda t: t / 1000, Sines(), linear(32), x=jnp.arange(200.0)),
    ),
    "a period of a million": (
        "layers/0", lambda: field(Sines(64, 1e6), linear(64), x=jnp.arange(20.0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_a_note_says_how_many_units_hardly_vary(name):
    site, build = FAULTY[name]
    subject = build()
    (one,) = (one for one in stepped(subject) if one.rule == "constant")
    assert (one.severity, one.site) == ("info", site)
    said = re.search(r"^At step 0, (\d+)% of the .* over the (\d+) examples", one.what)
    assert said is not None, one.what
    (y,) = Oracle(subject.model, subject.loss, subject.batch).outputs[site]
    y = y[:: -(-len(y) // 128), :: -(-y.shape[1] // 64)]
    deviations = y.std(axis=0)
    share = (deviations < 0.02 * deviations.max()).mean()
    assert share >= 0.55
    assert float(one.evidence["fraction"]) == pytest.approx(share)
    assert (int(said[1]), int(said[2])) == (round(100 * share), len(y))


@pytest.mark.parametrize("way", [watched, looped])
def test_a_loop_says_it_once_and_its_file_says_the_same(way, tmp_path):
    (one,) = way(denoising(Sines()), tmp_path / "run.nni")
    assert (one.rule, one.site, one.step) == ("constant", "time", 0)


def test_several_embeddings_are_one_note():
    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = Sines(), Sines(64)
            self.of_a, self.of_b = linear(32), linear(64, 1)

        def __call__(self, t):
            return self.of_a(self.a(t)) * self.of_b(self.b(t))

    (one,) = stepped(over(Two(), LINES))
    assert (one.site, one.evidence["others"]) == ("a", 1)
    assert one.what.endswith(f"(also {share_of(64):.0%} of 'b')")


def share_of(width):
    angles = np.linspace(0, 1, 64)[:, None] * np.asarray(frequencies(width // 2), np.float64)
    deviations = np.concatenate([np.sin(angles), np.cos(angles)], 1).std(0)
    return (deviations < 0.02 * deviations.max()).mean()


def test_it_explains_nothing_that_comes_after_it():
    """Weights that are far too small are a fault of their own."""
    small = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    small.kernel[...] = 1e-6 * small.kernel[...]
    found = stepped(field(Sines(), small, nnx.tanh, linear(32)))
    rules = {(one.rule, one.site): one.effects for one in found}
    assert rules["constant", "layers/0"] == ()
    assert ("collapse", "layers/1") in rules


# ------------------------------------------------------------------------ sound


class Added(nnx.Module):
    """Sines of positions that are added to tokens; positions may begin anywhere."""

    def __init__(self, width=32):
        rngs = nnx.Rngs(0)
        self.embed, self.positions = nnx.Embed(40, width, rngs=rngs), Sines(width, 1e6)
        self.out = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, batch):
        ids, at = batch
        return self.out(self.embed(ids) + self.positions(at))


class Counted(nnx.Module):
    """Sines of positions that the model counts itself, as for relative attention."""

    def __init__(self):
        self.sines, self.of_positions, self.of_x = Sines(), linear(32), linear(8, 1)

    def __call__(self, x):
        at = jnp.arange(len(x), dtype=jnp.float32) / 100
        return self.of_x(x) * self.of_positions(self.sines(at))


class Angles(nnx.Module):
    def __call__(self, at):
        angles = at[:, None] * frequencies(32, 1e6)
        return jnp.concatenate([jnp.cos(angles)] * 2, -1), jnp.concatenate(
            [jnp.sin(angles)] * 2, -1
        )


class Rotated(nnx.Module):
    def __init__(self, angles):
        self.angles, rngs = angles, nnx.Rngs(0)
        self.q, self.out = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, batch):
        x, at = batch
        q = self.q(x)
        cos, sin = jnp.split(jnp.concatenate(self.angles(at), -1), 2, -1)
        a, b = jnp.split(q, 2, -1)
        return self.out(q * cos + jnp.concatenate([-b, a], -1) * sin)


class Beside(nnx.Module):
    """A time that enters a layer beside what else the model receives."""

    def __init__(self):
        self.time, self.out = Sines(), linear(40)

    def __call__(self, batch):
        x, t = batch
        return self.out(jnp.concatenate([x, self.time(t)], -1))


class Learned(nnx.Module):
    """Sines with frequencies that are learned."""

    def __init__(self):
        self.frequencies = nnx.Param(frequencies(16))

    def __call__(self, t):
        angles = t[:, None] * self.frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class Sine(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x)


class Bumps(nnx.Module):
    """Distances to centres of which most lie far from all examples."""

    def __call__(self, r):
        return jnp.exp(-10 * (r[:, None] - jnp.linspace(0, 30, 64)) ** 2)


class Flat(nnx.Module):
    def __call__(self, x):
        return x.reshape(len(x), -1)


class OneHot(nnx.Module):
    def __call__(self, ids):
        return jax.nn.one_hot(ids, 64)


def on_white():
    """Images of which most pixels are always white."""
    return jnp.ones((32, 8, 8)).at[:, 3:5, 3:5].set(gauss(32, 2, 2))


def many_columns():
    """Columns of which one varies a thousand times as much as the others."""
    return gauss(64, 32) * jnp.where(jnp.arange(32) == 5, 1000.0, 1.0)


def small_layer():
    model = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), Sine(), linear(32))
    few = jnp.where(jnp.arange(32) < 4, 1.0, 1e-3)
    model.layers[0].kernel[...] = model.layers[0].kernel[...] * few
    return over(model, gauss(64, 8))


HEALTHY = {
    "a time from 0 to 1000": lambda: denoising(Sines(), 1000 * LINES),
    "steps from 0 to 999": lambda: denoising(
        Sines(128), jax.random.randint(jax.random.key(0), (32,), 0, 1000), width=128
    ),
    "a hundred steps": lambda: denoising(Alternating(), jnp.arange(100)),
    "one time for all": lambda: denoising(Sines(), jnp.full(64, 0.5)),
    "few examples": lambda: denoising(Sines(), LINES[:12]),
    "few units": lambda: denoising(Sines(8), width=8),
    "positions added to tokens": lambda: over(
        Added(), (jnp.arange(32) % 40, jnp.arange(32.0))
    ),
    "positions that the model counts": lambda: over(Counted(), gauss(64, 8)),
    "sixteen positions": lambda: field(Sines(), linear(32), x=jnp.arange(16.0)),
    "rotations": lambda: over(Rotated(Angles()), (gauss(32, 8), jnp.arange(32.0))),
    "beside other inputs": lambda: over(Beside(), (gauss(64, 8), LINES)),
    "learned frequencies": lambda: denoising(Learned()),
    "a sine as activation function": small_layer,
    "radial functions": lambda: field(Bumps(), linear(64)),
    "white images": lambda: field(Flat(), linear(64), x=on_white()),
    "columns of unlike size": lambda: field(Flat(), linear(32), x=many_columns()),
    "classes": lambda: field(OneHot(), linear(64), x=jnp.arange(64) % 3),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_sound_is_silent(name):
    notes = [one for one in stepped(HEALTHY[name]()) if one.severity == "info"]
    assert [one for one in notes if "hardly vary" in one.what] == []
