"""The Python text of a click does what the click does: run on a twin, and compared."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.inspector.commands import answer
from nnx_inspector.screen import protocol
from nnx_inspector.screen.expressions import addition, perturbation_text, quoted, text_of
from nnx_inspector.screen.python_text import made


@pytest.mark.parametrize(
    "one",
    [
        *(made(offer.kind, None, "output") for offer in protocol.OFFERS),
        *(made(offer.kind, None, "input") for offer in protocol.OFFERS),
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
    again = eval(perturbation_text(one), {"nni": nni})
    assert jax.tree.structure(again) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize(
    "one",
    [nni.Shift(jnp.ones(3)), nni.Mask(np.array([0.5, 1.0])), nni.Apply(jnp.tanh)],
    ids=["array", "learned mask", "function"],
)
def test_what_holds_the_users_own_has_no_text(one):
    assert perturbation_text(one) == ""
    assert addition("a", ("a",), one) == ""


@pytest.mark.parametrize(
    "text",
    ["a/b", 'a"b', "a\\[b", "a\nb", "ü\u2028", "\U0001f600", "\U0001f600\n\x00", "\udc80", "'"],
)
def test_a_name_is_a_python_literal(text):
    assert ast.literal_eval(quoted(text)) == text


def test_a_selection_that_was_no_glob_is_told_by_its_sites():
    text = addition("a, b[1]", ("a", "b"), nni.Zero())
    assert text == 'insp.perturb(["a", "b"], nni.Zero())'
    assert addition("a*", ("a1", "a2"), nni.Zero()) == 'insp.perturb("a*", nni.Zero())'


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


def looks(insp):
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
    monkeypatch.setattr(clicked._view.screen, "reply", lambda *said: replies.append(said))
    for click in CLICKS:
        answer(click, clicked, clicked._handles, clicked._view)
        exec(clicked._view.python, {"insp": typed, "nni": nni})
        assert looks(typed) == looks(clicked), clicked._view.python
    assert replies == [(click.id,) for click in CLICKS]
    assert clicked._view._state().python == "insp.perturbations[1].enabled = True"
    (state,) = [p.python for p in clicked._view._state().perturbations][:1]
    assert state == 'insp.perturb("first", nni.Scale(factor=0.1))'
