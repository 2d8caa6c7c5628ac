"""Tiny models as users write them: healthy ones raise no alarm, each fault is named first.

Every run judges a few; the long tests judge all, in one pass or in a watched loop.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools

import pytest
from flax import nnx
from judging import stepped, watched
from strange import gauss
from tiny_faults import FAULTS, TRAINED
from tiny_healthy import HEALTHY, MaskedAutoencoder

import nnx_inspector as nni

loop = functools.partial(watched, steps=24, every=2)
LOOPED = {
    "a regression with two weights and a large step",
    "a last layer of zeros",
    "low rank adapters",
    "low rank adapters and a head",
    "a learning rate that warms up from zero",
    "gradients that are added up over eight steps",
    "a network of which only the head is trained",
}
"""Faults that only a loop shows, or that a loop shows differently."""
ALWAYS = (
    "a diffusion transformer that begins at zero, stepped",
    "a masked autoencoder without a mask, stepped",
    "a learning rate that warms up from zero, watched",
)


def cases(table, *, looped=()):
    ways = [(name, "watched" if name in looped else "stepped") for name in table]
    return [
        pytest.param(
            name,
            loop if label == "watched" else stepped,
            id=(one := f"{name}, {label}"),
            marks=() if one in ALWAYS else pytest.mark.long,
        )
        for name, label in ways
    ]


def alarms(found):
    return [f"{one.severity} {one.rule}: {one.message}" for one in found if one.severity != "info"]


@pytest.mark.parametrize(("name", "way"), cases(HEALTHY, looped=LOOPED))
def test_what_is_healthy_raises_no_alarm(name, way):
    assert alarms(way(HEALTHY[name]())) == []


@pytest.mark.parametrize(("name", "way"), cases(FAULTS))
def test_a_fault_is_named_first(name, way):
    rules, build = FAULTS[name]
    found = way(build())
    assert [one.rule for one in found[:1]] in [[rule] for rule in rules], alarms(found)


@pytest.mark.parametrize(("name", "way"), cases(TRAINED, looped=TRAINED))
def test_a_fault_of_training_is_named_first(name, way):
    rules, build = TRAINED[name]
    found = way(build())
    assert [one.rule for one in found[:1]] in [[rule] for rule in rules], alarms(found)


def test_a_mask_token_is_information_in_a_pass_that_masks_nothing():
    subject = HEALTHY["a masked autoencoder without a mask"]()
    (finding,) = stepped(subject)
    assert (finding.rule, finding.severity) == ("no-gradient", "info")
    assert "'mask_token' takes no part in this pass" in finding.message
    assert isinstance(subject.model, MaskedAutoencoder)


def test_a_batch_norm_in_evaluation_is_no_alarm():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
    model.eval()
    insp = nni.Inspector(model, 7 + 5 * gauss(16, 6), display=False)
    insp.run(7 + 5 * gauss(16, 6, seed=1))
    assert insp.findings == []
    insp.close()


def test_what_an_encoder_leaves_out_is_information():
    """An example that runs only a part of the model is not evidence against the rest."""
    model = MaskedAutoencoder()
    insp = nni.Inspector(model, gauss(6, 5, 4), display=False)
    assert {one.severity for one in insp.findings} <= {"info"}
    insp.close()
