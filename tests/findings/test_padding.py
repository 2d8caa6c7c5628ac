"""An id that fills most positions of a batch is a note with its share; other inputs are silent."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni


class Encoder(nnx.Module):
    def __init__(self, vocabulary=50):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocabulary, 16, rngs=rngs)
        self.types = nnx.Embed(2, 16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, ids, types, mask):
        x = self.embed(ids) + self.types(types)
        return self.out(x * mask[..., None]).mean(axis=1)


def batch(length, *, pad=0, high=50):
    """Ids of which only the first `length` of 24 are tokens, types of segments, and a mask."""
    ids = np.array(jax.random.randint(jax.random.key(0), (8, 24), 1, high))
    ids[:, length:] = pad
    mask = np.ones((8, 24), np.int32)
    return jnp.asarray(ids), jnp.zeros((8, 24), jnp.int32).at[:, 20:].set(1), jnp.asarray(mask)


def found(model, args, loss=None, where=None):
    insp = nni.Inspector(model, *args, where=where, display=False)
    if loss is not None:
        insp.step(loss, *args)
    out = [one for one in insp.findings if one.rule == "padding"]
    insp.close()
    return out


@pytest.mark.parametrize("pad", [0, 49])
@pytest.mark.parametrize("length", [3, 8])
def test_the_share_of_padding_is_a_note_at_the_embedding(length, pad):
    args = batch(length, pad=pad, high=49)
    share = float(np.mean(np.asarray(args[0]) == pad))
    (one,) = found(Encoder(), args)
    assert (one.severity, one.site) == ("info", "embed")
    assert one.evidence["fraction"] == pytest.approx(share)
    assert f"At step 0 id {pad} filled {share:.0%} of the 192 positions" in one.message
    assert f"pass where=lambda tokens, *_: tokens != {pad} to nni." in one.message


def test_its_advice_silences_it():
    where = lambda tokens, *_: tokens != 0  # noqa: E731
    assert found(Encoder(), batch(8), where=where) == []


def test_a_step_says_it_too_and_names_no_target():
    args = batch(8)
    (one,) = found(Encoder(), args, lambda m, *args: m(*args).var())
    assert one.site == "embed"


def test_a_sequence_that_is_mostly_tokens_is_silent():
    """Neither the types of segments nor a mask of ones count."""
    assert found(Encoder(), batch(20)) == []


def test_a_column_of_classes_is_silent():
    class OfClass(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(50, 8, rngs=nnx.Rngs(0))

        def __call__(self, labels):
            return self.embed(labels)

    assert found(OfClass(), [jnp.array([0] * 12 + [1, 2, 3, 4])]) == []


def looped(model, *args, where=None):
    """The findings of a script that trains with one batch."""
    forward = nnx.jit(lambda model, *args: model(*args))
    with nni.watch(model, every=1, gradients=False, where=where) as recording:
        forward(model, *args)
    return [one for one in nni.diagnose(recording) if one.rule == "padding"]


def test_a_loop_tells_the_share_of_id_0():
    args = batch(8)
    share = float(np.mean(np.asarray(args[0]) == 0))
    (one,) = looped(Encoder(), *args)
    assert (one.severity, one.site, one.step) == ("info", "embed", 0)
    assert one.evidence == {"fraction": share, "positions": 192}
    assert f"id 0 filled {share:.0%} of the 192 positions" in one.message
    where = lambda tokens, *_: tokens != 0  # noqa: E731
    assert looped(Encoder(), *args, where=where) == []


class Codes(nnx.Module):
    """A codebook, whose ids the model computes: that most are one is no padding."""

    def __init__(self):
        self.embed = nnx.Embed(50, 8, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.embed(jnp.maximum(ids, 0))


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Encoder(), batch(20)),  # mostly tokens; the types of segments are mostly 0
        (Codes(), batch(8)[:1]),
        (nnx.Embed(50, 8, rngs=nnx.Rngs(0)), [jnp.array([0] * 12 + [1, 2, 3, 4])]),
        (nnx.Embed(50, 8, rngs=nnx.Rngs(0)), [batch(8)[0][:, :1] * 0]),
        (Encoder(), (jnp.tile(jnp.arange(1, 25), (8, 1)), *batch(8)[1:])),
    ],
    ids=["tokens", "codes", "classes", "column", "all different"],
)
def test_a_loop_without_padding_is_silent(model, args):
    assert looped(model, *args) == []
