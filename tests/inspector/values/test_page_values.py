"""A page keeps the values that the screen has shown, and no more of them than it may."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers

from nnx_inspector.inspector.export import content_of
from nnx_inspector.inspector.values import page_values
from nnx_inspector.inspector.values.page_values import answer_key
from nnx_inspector.screen import protocol

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


@pytest.fixture
def insp(inspect):
    made = inspect(TwoLayers(nnx.Rngs(0)), X)
    made.run()
    return made


def shown(site):
    return protocol.ShowValues(id=1, site=site, part="output", clean=False)


def read(array, *, row=0, exact=False):
    return protocol.ReadValues(
        id=2, array=array, index=(row, 0), axes=(-1, -1, 1), starts=(0, 0, 0), ends=(1, 1, 4),
        most=(1, 1, 64), norm_over=-1, component="value", exact=exact,
    )  # fmt: skip


def asked(insp, *requests):
    for request in requests:
        inside(insp).commands.answer(request)
    inside(insp).commands.wait()
    return inside(insp).core.page_values.answers()


def number_in(answers, request):
    return answers[answer_key(request)][0].arrays[0].number


def test_a_page_keeps_what_was_opened_and_read(insp):
    first = asked(insp, shown("a"))
    array = number_in(first, shown("a"))
    answers = asked(insp, read(array), read(array, row=3), read(array, exact=True))
    assert list(answers) == [
        '["a","output",false]',
        *(answer_key(read(array, row=r)) for r in (0, 3)),
    ]
    message, values = answers[answer_key(read(array, row=3))]
    assert message.index == (3, 0)
    expected = X @ insp.model.a.kernel[...] + insp.model.a.bias[...]
    found = np.frombuffer(values, np.float32)[: expected.shape[1]]
    np.testing.assert_allclose(found, expected[3], rtol=1e-5, atol=1e-6)
    told = content_of(inside(insp).core, [])
    assert told.answers["values"] == answers
    assert told.missing == ("compare",)


def test_the_window_of_an_array_that_was_opened_anew_is_left_out(insp):
    array = number_in(asked(insp, shown("a")), shown("a"))
    asked(insp, read(array))
    insp.run(X + 1)
    answers = asked(insp, shown("a"))
    assert number_in(answers, shown("a")) != array
    assert list(answers) == [answer_key(shown("a"))]


def test_the_oldest_values_make_room(insp, monkeypatch):
    array = number_in(asked(insp, shown("a")), shown("a"))
    asked(insp, read(array, row=0))
    size = sum(len(one[1]) for one in inside(insp).core.page_values.answers().values() if one[1])
    monkeypatch.setattr(page_values, "MOST_BYTES", 2 * size)
    answers = asked(insp, *(read(array, row=r) for r in range(4)))
    assert list(answers)[1:] == [answer_key(read(array, row=r)) for r in (2, 3)]
    assert (
        "Left out: 2 of the slices of values that were opened"
        in content_of(inside(insp).core, []).note
    )
    asked(insp, read(array, row=1))  # has room again, in place of another
    assert inside(insp).core.page_values.left_out() == 2
    insp.run(X + 1)
    asked(insp, shown("a"))  # what was left out is that of an array that no page shows
    assert "Left out" not in content_of(inside(insp).core, []).note


def test_a_page_keeps_comparisons(insp, tmp_path: pathlib.Path):
    insp.run(2 * X)
    inside(insp).commands.answer(protocol.Compare(id=1, number=1, pinned=0))
    inside(insp).commands.wait()
    before = nnx.clone(insp.model)
    told = content_of(inside(insp).core, [])
    ((pair, compared),) = told.answers["compare"].items()
    assert pair == "1 0"
    assert not isinstance(compared, str)
    assert compared[0].rows
    assert told.missing == ("values",)
    insp.compare(before)
    insp.to_html(tmp_path / "page.html")
    weights = inside(insp).view.last_message("weights")
    assert content_of(inside(insp).core, [weights]).kept == (weights,)
