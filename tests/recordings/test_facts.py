"""What rules need goes into columns and comes back; what does not belong together is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.facts import (
    KINDS,
    Facts,
    Figures,
    Observed,
    ParameterFacts,
    SiteFacts,
    flaw_in,
)
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.gauges import BYTES, MASKS, PARAMETER_FIGURES, SITE_FIGURES
from nnx_inspector.stats.summary import empty

NAMES = st.text(max_size=6)
SOME = st.lists(NAMES, max_size=3, unique=True)
FLAGS = st.integers(-1, 1)
SITES = st.builds(
    SiteFacts, site=NAMES, type=NAMES, order=st.integers(-1, 99), activation=st.sampled_from(KINDS),
    made_by=st.sampled_from(KINDS), entering=NAMES, leaving=NAMES, declared=NAMES,
    examples=st.integers(-1, 2**40), running=FLAGS, deterministic=FLAGS, rate=st.floats(0, 1),
)  # fmt: skip
PARAMETERS = st.builds(
    ParameterFacts, path=NAMES, site=NAMES, type=NAMES, dtype=NAMES, size=st.integers(0, 2**40),
    needed=FLAGS, axes=st.integers(0, 5),
)  # fmt: skip


def figures(sites=("a", "b[1]"), parameters=("a/kernel",), seed=0, varied=1):
    random = np.random.default_rng(seed)
    rows = random.exponential(size=(len(sites), len(SITE_FIGURES))).astype(np.float32)
    for name in ("examples", "units", "looked", "positions"):
        rows[:, SITE_FIGURES.index(name)] = 64 if name == "units" else random.integers(1, 64)
    states = random.exponential(size=(len(parameters), len(PARAMETER_FIGURES))).astype(np.float32)
    return Figures(
        sites=tuple(sites),
        rows=rows,
        masks=random.integers(0, 256, (len(sites), len(MASKS), BYTES), np.uint8),
        parameters=tuple(parameters),
        parameter_rows=states,
        varied=varied,
    )


def same(a, b):
    assert (a.sites, a.parameters, a.varied) == (b.sites, b.parameters, b.varied)
    for name in ("rows", "masks", "parameter_rows"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@given(
    facts=st.none()
    | st.builds(
        Facts,
        sites=st.lists(SITES, max_size=3).map(tuple),
        parameters=st.lists(PARAMETERS, max_size=3).map(tuple),
    ),
    many=st.lists(
        st.tuples(
            st.lists(NAMES, max_size=3, unique=True), st.lists(NAMES, max_size=3, unique=True)
        ),
        max_size=3,
    ),
)
def test_columns_come_back_as_they_were(facts, many):
    items = [figures(s, p, seed) for seed, (s, p) in enumerate(many)]
    one = Observed(facts=facts, numbers=tuple(range(3, 3 + len(items))), figures=tuple(items))
    columns = one.to_columns()
    assert all(isinstance(c, np.ndarray) and c.dtype.kind in "fiu" for c in columns.values())
    again = Observed.from_columns(columns)
    assert (again.facts, again.numbers) == (one.facts, one.numbers)
    for a, b in zip(again.figures, one.figures, strict=True):
        same(a, b)


def some():
    site = SiteFacts(site="a", type="Linear", order=0, activation="relu", examples=4)
    parameter = ParameterFacts(path="a/kernel", site="a", type="Param", dtype="float32", size=12)
    return Observed(
        facts=Facts(sites=(site,), parameters=(parameter,)),
        numbers=(1, 4),
        figures=(figures(), figures(seed=1)),
    ).to_columns()


@pytest.mark.parametrize("name", sorted(some()))
def test_a_column_that_is_missing_or_of_another_kind_is_refused(name):
    missing = () if name == "parameter_in_loss" else (None,)  # recordings once lacked it
    for other in (*missing, np.array(["x"], object), np.zeros((2, 2, 2), np.complex64), "text"):
        broken = {**some(), name: other}
        with pytest.raises(InspectorError, match="columns"):
            Observed.from_columns({k: v for k, v in broken.items() if v is not None})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("numbers", lambda a: a[::-1].copy()),
        ("rows_in", lambda a: a * -1),
        ("row_name", lambda a: a + 1000),
        ("state_name", lambda a: a - 1000),
        ("names_ends", lambda a: a[::-1].copy()),
        ("names_ends", lambda a: a + 5),
        ("names", lambda a: np.full_like(a, 0xFF)),
        ("rows", lambda a: a[:-1].copy()),
        ("masks", lambda a: a[:, :, :-1].copy()),
        ("site_activation", lambda a: np.frombuffer(b"evil", np.uint8)),
        ("site_order", lambda a: np.concatenate([a, a])),
        ("varied", lambda a: a[:1].copy()),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(name, change):
    columns = some()
    columns[name] = change(columns[name])
    with pytest.raises(InspectorError):
        Observed.from_columns(columns)


def test_a_recording_keeps_figures_with_their_passes_and_thins_both():
    recording = Recording(max_steps=10)
    for step in range(40):
        recording.append(step, {"a": {"output": empty()}}, figures=figures(seed=step))
    found = recording.observed
    assert list(found.numbers) == [p.number for p in recording.passes]
    for number, one in zip(found.numbers, found.figures, strict=True):
        same(one, figures(seed=number))
    assert recording.thinned
    assert found.facts is None


def test_figures_count_as_memory():
    with_them, without = Recording(), Recording()
    with_them.append(0, {"a": {"output": empty()}}, figures=figures(["a"] * 1000))
    without.append(0, {"a": {"output": empty()}})
    row = 4 * len(SITE_FIGURES) + len(MASKS) * BYTES
    assert with_them.nbytes - without.nbytes >= 1000 * row


def test_what_was_seen_called_once_stays_called():
    called = SiteFacts(site="a", order=3, activation="relu", running=0)
    never = SiteFacts(site="a", running=1)
    both = Facts(sites=(called,)).joined(Facts(sites=(never,)))
    assert both.sites == (dataclasses.replace(called, running=1),)
    used = ParameterFacts(path="p", site="a", needed=1)
    unused = dataclasses.replace(used, needed=0)
    joined = Facts(parameters=(used,)).joined(Facts(parameters=(unused,)))
    assert joined.parameters[0].needed == 1


@pytest.mark.parametrize(
    ("name", "value", "flaw"),
    [
        ("examples", np.nan, "a count is none"),
        ("looked", np.inf, "a count is none"),
        ("units", 2.5, "a count is none"),
        ("positions", 0, "a count is none"),
        ("looked", 65, "more units were looked at"),
        ("rms", -1, "a figure is negative"),
    ],
)
def test_figures_that_cannot_be_are_refused(name, value, flaw):
    one = figures()
    assert flaw_in(one) == ""
    one.rows[1, SITE_FIGURES.index(name)] = value
    assert flaw_in(one).startswith(flaw)
    with pytest.raises(InspectorError, match=flaw):
        Observed.from_columns(Observed(numbers=(3,), figures=(one,)).to_columns())


@pytest.mark.parametrize("changed", [{"sites": ("a", "a")}, {"parameters": ("x", "x")}])
def test_names_come_once(changed):
    assert flaw_in(figures(**changed)) == "a name comes twice"


def test_columns_of_a_recording_that_was_saved_before_are_read():
    known = Facts(parameters=(ParameterFacts(path="p", site="a", in_loss=0),))
    columns = Observed(facts=known, numbers=(0,), figures=(figures(),)).to_columns()
    del columns["parameter_in_loss"]
    columns["masks"] = columns["masks"][:, :-1]
    found = Observed.from_columns(columns)
    assert found.facts is not None
    assert found.facts.parameters == (ParameterFacts(path="p", site="a"),)
    np.testing.assert_array_equal(found.figures[0].masks[:, :-1], figures().masks[:, :-1])
    assert not found.figures[0].masks[:, -1].any()
    columns["masks"] = columns["masks"][:, :-1]
    with pytest.raises(InspectorError, match="masks has shape"):
        Observed.from_columns(columns)
