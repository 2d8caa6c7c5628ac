"""The perturbation that a click adds, its text on screen, and the equivalent Python."""

import ast
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from saved_pages import content_for

import nnx_inspector as nni
from nnx_inspector.screen import protocol
from nnx_inspector.screen.python_text import (
    PerturbationMessages,
    mask_of_bits,
    offers,
    perturb_text,
    perturbation_of_click,
    quoted,
    text_of,
)

OFFERS = tuple(offers())

X = np.array([[-3.0, 0.5, 2.0], [1.0, -0.25, 0.0]], np.float32)

OFFERED = [  # (kind, strength, the value that it makes of X by NumPy)
    ("Zero", None, np.zeros_like(X)),
    ("Mean", None, np.broadcast_to(X.mean(0), X.shape)),
    ("Scale", 0.5, X * 0.5),
    ("Shift", -2.0, X - 2.0),
    ("Clamp", 0.75, np.clip(X, -0.75, 0.75)),
    ("Cast", None, X),  # these numbers are bfloat16 already
    ("StopGradient", None, X),
    ("ScaleGradient", 2.0, X),
    ("ReverseGradient", 2.0, X),
    ("ClipGradient", 2.0, X),
]


def handle(perturbation, *, number=1, site="a", sites=("a",), enabled=True, **more):
    return types.SimpleNamespace(
        id=number, site=site, sites=sites, perturbation=perturbation, enabled=enabled, **more
    )


def shown(perturbation, **more):
    (message,) = PerturbationMessages().of([handle(perturbation, **more)], pending=False)
    return message


# ---------------------------------------------------------------------- making


@pytest.mark.parametrize(("kind", "strength", "expected"), OFFERED, ids=lambda v: str(v)[:16])
def test_what_a_click_adds_does_what_its_name_says(kind, strength, expected):
    perturbation = perturbation_of_click(kind, strength, "input")
    assert (type(perturbation).__name__, perturbation.at) == (kind, "input")
    np.testing.assert_allclose(perturbation.apply(jnp.asarray(X)), expected, rtol=1e-6)


def test_every_offer_can_be_made_and_is_shown_as_offered():
    for offer in OFFERS:
        message = shown(perturbation_of_click(offer.kind, None, "output"))
        assert (message.kind, message.acts_on, message.at) == (offer.kind, offer.group, "output")
        assert (message.strength, message.strength_name) == (offer.strength, offer.strength_name)
        assert (message.low, message.high) == (offer.low, offer.high)
        if offer.strength is not None:
            assert offer.low <= offer.strength <= offer.high
            assert offer.least is None or offer.least >= offer.low


def test_the_noise_of_a_click_has_the_strength_as_its_deviation():
    x = jnp.zeros((200, 100))
    assert float(jnp.std(perturbation_of_click("Noise", 0.25, "output").apply(x))) == pytest.approx(
        0.25, rel=0.05
    )


@pytest.mark.parametrize(
    ("kind", "strength", "text"),
    [
        ("Melt", None, "no perturbation 'Melt' on the menu. It has Zero, Mean,"),
        ("Apply", None, "no perturbation 'Apply' on the menu"),
        ("__class__", None, "no perturbation '__class__' on the menu"),
        ("Zero", 1.0, "Zero has no strength to set"),
        ("Clamp", -1.0, "a limit of at least 0.0, got -1.0"),
        ("Noise", -0.5, "Noise takes a number of at least 0.0, got -0.5"),
        ("ClipGradient", -0.5, "ClipGradient takes a number of at least 0.0"),
        ("Scale", 1e39, "a finite float32 number"),
    ],
)
def test_what_cannot_be_added_is_refused_in_words(kind, strength, text):
    with pytest.raises(ValueError, match=text):
        perturbation_of_click(kind, strength, "output")


# ---------------------------------------------------------------------- tuning


@pytest.mark.parametrize("offer", [o for o in OFFERS if o.strength is not None])
def test_tuning_sets_the_strength_that_is_shown_and_nothing_else(offer):
    before = perturbation_of_click(offer.kind, None, "input")
    after = before.tuned(0.375)
    assert shown(after).strength == 0.375
    back = after.tuned(offer.strength)
    assert back.python(short=True) == before.python(short=True)


def test_tuning_keeps_a_direction_and_a_seed():
    direction = jnp.arange(3.0)
    assert nni.Shift(direction, 1.0).tuned(-2.0).offset is direction
    assert nni.Noise(0.1, seed=7).tuned(0.5).seed == 7
    assert nni.ParameterNoise(0.1, seed=7).tuned(0.5) == nni.ParameterNoise(0.5, seed=7)


@pytest.mark.parametrize(
    "perturbation",
    [
        nni.Zero(),
        nni.Clamp(-1.0, 2.0),
        nni.Clamp(high=1.0),
        nni.Scale(jnp.ones(3)),
        nni.Mask(X > 0),
    ],
    ids=lambda one: one.python(short=True),
)
def test_what_has_no_single_strength_shows_none_and_cannot_be_tuned(perturbation):
    message = shown(perturbation)
    assert (message.strength, message.strength_name, message.low, message.high) == (
        None,
        "",
        0.0,
        0.0,
    )
    with pytest.raises(ValueError, match="has no strength that is one number"):
        perturbation.tuned(1.0)


def test_a_number_on_the_device_is_a_strength():
    assert shown(nni.Scale(jnp.float32(0.5))).strength == 0.5
    assert shown(nni.Clamp(jnp.float32(-2), jnp.float32(2))).strength_name == "limit"


# --------------------------------------------------------------------- showing


@pytest.mark.parametrize(
    ("perturbation", "text"),
    [
        (nni.Zero(), "nni.Zero()"),
        (nni.Zero(at="input"), "nni.Zero(at='input')"),
        (nni.Scale(2.0), "nni.Scale(factor=2.0)"),
        (nni.Scale(1 / 3), "nni.Scale(factor=0.333333)"),
        (nni.Scale(1e-20), "nni.Scale(factor=1e-20)"),
        (nni.Scale(1e20), "nni.Scale(factor=1e+20)"),
        (nni.Shift(np.ones(64, np.float32), 0.5), "nni.Shift(offset=float32[64], strength=0.5)"),
        (nni.Shift(jnp.ones((2, 3))), "nni.Shift(offset=float32[2,3], strength=1.0)"),
        (nni.Noise(0.1), "nni.Noise(std=0.1)"),
        (nni.Noise(0.1, seed=3), "nni.Noise(std=0.1, seed=3)"),
        (nni.Clamp(high=1.5), "nni.Clamp(high=1.5)"),
        (nni.Clamp(-1.0, 1.0), "nni.Clamp(low=-1.0, high=1.0)"),
        (nni.Cast(jnp.bfloat16), "nni.Cast(dtype=bfloat16)"),
        (nni.Mean(), "nni.Mean()"),
        (nni.Mean(axis=(0, 1)), "nni.Mean(axis=(0, 1))"),
        (nni.Mask(np.ones(8, bool), axis=1), "nni.Mask(mask=bool[8], axis=1)"),
        (nni.Patch(X, where=X > 0), "nni.Patch(value=float32[2,3], where=bool[2,3])"),
        (nni.Apply(jnp.tanh), "nni.Apply(fn=tanh)"),
        (nni.Apply(jnp.add, (jnp.ones(3),)), "nni.Apply(fn=add, args=(float32[3],))"),
        (nni.ReverseGradient(), "nni.ReverseGradient(factor=1.0)"),
        (nni.ParameterNoise(0.5), "nni.ParameterNoise(std=0.5)"),
        (nni.PruneMask(X > 0), "nni.PruneMask(mask=bool[2,3])"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_python_text(perturbation, text):
    assert perturbation.python(short=True) == text


@pytest.mark.parametrize(
    ("perturbation", "at", "acts_on"),
    [
        (nni.Zero(), "output", "value"),
        (nni.StopGradient(at="input"), "input", "gradient"),
        (nni.ParameterNoise(0.1), "parameter", "parameter"),
        (nni.PruneMask(X > 0), "parameter", "parameter"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_where_it_acts_and_on_what(perturbation, at, acts_on):
    message = shown(perturbation)
    assert (message.at, message.acts_on) == (at, acts_on)
    state = dataclasses.replace(content_for(("",)).state, perturbations=(message,))
    assert protocol.from_header(protocol.to_header(state)) == state


@pytest.mark.parametrize(
    ("mask", "units"),
    [
        (np.array([True, False, True, False, False]), (5, 3)),
        (jnp.ones(4, bool), (4, 0)),
        (np.array([1.0, 0.0]), (0, 0)),  # perhaps a learned mask: not switches
        (np.eye(2, 3) > 0, (6, 4)),
        (np.ones((2, 3, 4), bool), (0, 0)),
    ],
)
def test_a_boolean_mask_of_units_says_how_many_are_off(mask, units):
    message = shown(nni.Mask(mask))
    assert (message.units, message.units_off) == units
    bits = "".join(f"{int(byte, 16):04b}" for byte in message.mask)
    assert bits.count("1") == units[0] - units[1]
    if message.mask:
        assert (
            mask_of_bits(message.mask, units[0], message.columns).tolist()
            == np.asarray(mask).tolist()
        )


def test_a_pattern_names_its_sites_up_to_a_limit():
    sites = tuple(f"blocks/{i}" for i in range(250))
    message = shown(nni.Zero(), site="blocks/*", sites=sites)
    assert (message.site, message.reach) == ("blocks/*", 250)
    assert message.sites == sites[: protocol.MOST_SITES]


def test_what_changes_is_shown_and_the_rest_is_looked_at_once():
    class Looked:
        """A mask that counts how often it is fetched."""

        times = 0

        def __array__(self, dtype=None, copy=None):
            Looked.times += 1
            return np.array([True, False])

    mask = nni.Mask(np.array([True, False]))
    object.__setattr__(mask, "mask", Looked())
    showing, one = PerturbationMessages(), handle(mask, compiling=True)
    (first,) = showing.of([one], pending=True)
    times, Looked.times = Looked.times, 0
    one.enabled, one.compiling = False, False
    (second,) = showing.of([one], pending=False)
    assert (times, Looked.times) == (2, 0), "for its bits and for its text"
    assert (first.enabled, first.pending, first.compiling) == (True, True, True)
    assert (second.enabled, second.pending, second.compiling) == (False, False, False)
    assert dataclasses.replace(first, enabled=False, pending=False, compiling=False) == second
    one.perturbation = nni.Scale(0.5)
    assert showing.of([one], pending=False)[0].strength == 0.5


# ----------------------------------------------------------- as Python text


@pytest.mark.parametrize(
    "one",
    [
        *(perturbation_of_click(offer.kind, None, "output") for offer in OFFERS),
        *(perturbation_of_click(offer.kind, None, "input") for offer in OFFERS),
        nni.Scale(0.1 + 0.2),
        nni.Scale(jnp.float32(0.3)),
        nni.Noise(1e-30, seed=7),
        nni.Clamp(None, 2.0),
        nni.Mean(axis=(0, 1)),
        nni.Mask(np.array([True, False, True])),
        nni.Mask(np.zeros(9, np.bool_), axis=1, at="input"),
        nni.Cast(jnp.float16),
    ],
    ids=repr,
)
def test_the_text_makes_an_equal_perturbation(one):
    again = eval(one.python(), {"nni": nni})
    assert jax.tree.structure(again) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize(
    "one",
    [nni.Shift(jnp.ones(3)), nni.Mask(np.array([0.5, 1.0])), nni.Apply(jnp.tanh)],
    ids=["array", "learned mask", "function"],
)
def test_what_holds_the_users_own_has_no_text(one):
    assert one.python() == ""
    assert perturb_text("a", ("a",), one) == ""


@pytest.mark.parametrize(
    "text",
    ["a/b", 'a"b', "a\\[b", "a\nb", "ü\u2028", "\U0001f600", "\U0001f600\n\x00", "\udc80", "'"],
)
def test_a_name_is_a_python_literal(text):
    assert ast.literal_eval(quoted(text)) == text


def test_a_selection_that_was_no_glob_is_told_by_its_sites():
    text = perturb_text("a, b[1]", ("a", "b"), nni.Zero())
    assert text == 'insp.perturb(["a", "b"], nni.Zero())'
    assert perturb_text("a*", ("a1", "a2"), nni.Zero()) == 'insp.perturb("a*", nni.Zero())'


# ------------------------------------------------------------- clicks, on a twin


class Two(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))


@pytest.fixture(scope="module")
def twins():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    pair = [nni.Inspector(Two(nnx.Rngs(0)), x, display=False) for _ in range(2)]
    yield pair
    for one in pair:
        one.close()


def seen(insp):
    handles = [(h.site, repr(h.perturbation), h.enabled) for h in insp.perturbations]
    return insp.selected, handles, insp.effect, dict(insp.modes)


CLICKS = [
    protocol.Select(id=1, site="first"),
    protocol.Perturb(id=2, site="first", kind="Scale", strength=0.3, at="output"),
    protocol.Perturb(id=3, site="last", kind="Noise", strength=None, at="input"),
    protocol.Adjust(id=4, perturbation=1, enabled=True, strength=0.1),
    protocol.Adjust(id=5, perturbation=2, enabled=False, strength=None),
    protocol.Adjust(id=6, perturbation=2, enabled=True, strength=0.7),
    protocol.SetMask(id=7, perturbation=None, site="first", units=6, mask="b4"),
    protocol.SetMask(id=8, perturbation=3, site="first", units=6, mask="fc"),
    protocol.SwitchAll(id=9, enabled=False),
    protocol.Remove(id=10, perturbation=2),
    protocol.SwitchMode(id=12, module="drop", name="deterministic", value=True),
    protocol.SwitchMode(id=13, module="drop", name="deterministic", value=None),
    protocol.Adjust(id=11, perturbation=3, enabled=True, strength=None),
]


@pytest.mark.parametrize("name", ["only", "class", "a b", "ﬁeld"])
def test_a_mode_whose_name_is_no_keyword_is_set_by_one(name):
    text = text_of(protocol.SwitchMode(id=1, module="a", name=name, value=False), ())
    call = ast.parse(text, mode="eval").body
    assert [ast.literal_eval(k) for k in call.keywords[0].value.keys] == [name]


def test_each_click_and_its_text_do_the_same(twins, monkeypatch):
    clicked, typed = twins
    replies = []
    monkeypatch.setattr(inside(clicked).view.screen, "reply", lambda *said: replies.append(said))
    for click in CLICKS:
        inside(clicked).commands.answer(click)
        exec(inside(clicked).view.python, {"insp": typed, "nni": nni})
        assert seen(typed) == seen(clicked), inside(clicked).view.python
    assert replies == [(click.id,) for click in CLICKS]
    assert inside(clicked).state.python == "insp.perturbations[1].enabled = True"
    (state,) = [p.python for p in inside(clicked).state.perturbations][:1]
    assert state == 'insp.perturb("first", nni.Scale(factor=0.1))'
