"""The ways in which the rules judge a model: in one pass, and in each kind of loop.

A subject has `model`, `x`, `batch`, `loss(model, batch)`, `wrt` and `optimizer()`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from flax import nnx

import nnx_inspector as nni


def trainer(subject):
    @nnx.jit
    def train(model, optimizer, batch):
        differentiated = nnx.DiffState(0, subject.wrt)
        loss, grads = nnx.value_and_grad(subject.loss, argnums=differentiated)(model, batch)
        optimizer.update(model, grads)
        return loss

    optimizer = subject.optimizer()
    return lambda: train(subject.model, optimizer, subject.batch)


def stepped(subject, path=None, *, steps=0):
    """The findings of `insp.step` on a fresh inspector, after some steps of training."""
    train = trainer(subject)
    for _ in range(steps):
        train()
    insp = nni.Inspector(subject.model, subject.x, display=False)
    try:
        insp.step(subject.loss, subject.batch)
        return insp.findings
    finally:
        insp.close()


def watched(subject, path=None, *, steps=30, every=5):
    """The findings of a watched loop; the file that it was saved to must give the same."""
    train = trainer(subject)
    with nni.watch(subject.model, every=every, save=path) as recording:
        for _ in range(steps):
            train()
    found = nni.diagnose(recording)
    assert path is None or nni.diagnose(nni.load(path)) == found
    return found


def looped(subject, path=None, *, steps=30, every=5):
    """The findings of an inspector's own loop."""
    train = trainer(subject)
    insp = nni.Inspector(subject.model, subject.x, display=False)
    try:
        for _ in insp.watch(range(steps), every=every):
            train()
        return insp.findings
    finally:
        insp.close()
