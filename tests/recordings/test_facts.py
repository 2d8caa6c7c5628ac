"""Facts and figures are saved and loaded; columns that do not fit together are refused."""

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
    Flow,
    ParameterFacts,
    PassStats,
    SiteFacts,
    Uncalled,
    invalid_reason,
)
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.samples.unit_stats import MASK_BYTES, MASKS, SITE_STATS
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
    rows = random.exponential(size=(len(sites), len(SITE_STATS))).astype(np.float32)
    for name in ("examples", "units", "looked", "positions"):
        rows[:, SITE_STATS.index(name)] = 64 if name == "units" else random.integers(1, 64)
    states = random.exponential(size=(len(parameters), len(PARAMETER_STATS))).astype(np.float32)
    return PassStats(
        sites=tuple(sites),
        rows=rows,
        masks=random.integers(0, 256, (len(sites), len(MASKS), MASK_BYTES), np.uint8),
        parameters=tuple(parameters),
        parameter_rows=states,
        varied=varied,
    )


def same(a, b):
    assert (a.sites, a.parameters, a.varied) == (b.sites, b.parameters, b.varied)
    for name in ("rows", "masks", "parameter_rows"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


TRIPLES = st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=4)
FLOWS = st.builds(
    Flow.of, st.just(("a", "", "b:c")), st.just([(0, 0, -1), (2, 1, 5), (1, 2, 0)]), TRIPLES
)


UNCALLED = st.builds(
    Uncalled, step=st.integers(), steps=st.integers(), calls=st.integers(), what=NAMES, advice=NAMES
).filter(lambda one: max(map(abs, (one.step, one.steps, one.calls))) < 2**53)


@given(
    st.builds(
        Facts,
        sites=st.lists(SITES, max_size=3).map(tuple),
        parameters=st.lists(PARAMETERS, max_size=3).map(tuple),
        uncalled=st.none() | UNCALLED,
        flows=st.lists(FLOWS, max_size=3).map(tuple),
    )
)
def test_columns_come_back_as_they_were(facts):
    columns = facts.to_columns()
    assert all(isinstance(c, np.ndarray) and c.dtype.kind in "fiu" for c in columns.values())
    assert Facts.from_columns(columns) == facts


def some():
    site = SiteFacts(site="a", type="Linear", order=0, activation="relu", examples=4)
    parameter = ParameterFacts(path="a/kernel", site="a", type="Param", dtype="float32", size=12)
    return Facts(
        sites=(site, SiteFacts(site="b", type="Dropout", rate=0.5)),
        parameters=(parameter,),
        flows=(Flow.of(["a", "b"], [(0, 0, -1), (1, 0, 2)], [(0, 1, 3)]),),
    ).to_columns()


@pytest.mark.parametrize("name", sorted(some()))
def test_a_column_that_is_missing_or_of_another_kind_is_refused(name):
    later = ["parameter_in_loss", "parameter_ended", "parameter_nan", "parameter_infinite"]
    later += [
        "site_affine",
        "site_conditional",
        "site_embeddings",
        "site_given",
        "uncalled",
        "flow_parts",
        "where",
    ]
    missing = () if name in later else (None,)  # once there were none
    for other in (*missing, np.array(["x"], object), np.zeros((2, 2, 2), np.complex64), "text"):
        broken = {**some(), name: other}
        with pytest.raises(InspectorError, match="columns"):
            Facts.from_columns({k: v for k, v in broken.items() if v is not None})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("site_type_ends", lambda a: a[::-1].copy()),
        ("site_type_ends", lambda a: a + 5),
        ("site_type", lambda a: np.full_like(a, 0xFF)),
        ("site_activation", lambda a: np.frombuffer(b"evil", np.uint8)),
        ("site_order", lambda a: np.concatenate([a, a])),
        ("uncalled", lambda a: np.zeros((2, 3), np.int64)),
        ("flow_parts", lambda a: a + 1),
        ("flow_parts", lambda a: -a),
        ("flow_parts", lambda a: a - np.array([0, 6, 0])),
        ("flow_parts", lambda a: np.zeros((0, 3), np.int64)),
        ("flow_parts", lambda a: np.concatenate([a, *[0 * a] * 8])),
        ("flow_values", lambda a: a + 2),
        ("flow_values", lambda a: a - 1),
        ("flow_edges", lambda a: a + 1),
        ("flow_edges", lambda a: a + np.int32([0, 0, 32])),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(name, change):
    columns = some()
    columns[name] = change(columns[name])
    with pytest.raises(InspectorError):
        Facts.from_columns(columns)


def test_facts_that_were_saved_before_are_read():
    known = Facts(parameters=(ParameterFacts(path="p", site="a", in_loss=0),))
    columns = known.to_columns()
    for later in ("parameter_in_loss", "uncalled", "uncalled_what", "uncalled_advice"):
        del columns[later]
    new = ("flow_", "site_affine", "site_conditional")
    columns = {name: column for name, column in columns.items() if not name.startswith(new)}
    # once the figures of all passes, of which there were none, stood beside them
    columns.update(known=np.ones(1, np.uint8), numbers=np.zeros(0, np.int64))
    assert Facts.from_columns(columns) == Facts(parameters=(ParameterFacts(path="p", site="a"),))


def loaded(folder, one):
    """A recording with these figures, from its file."""
    recording = Recording()
    recording.append(0, {"a": {"output": empty()}}, figures=one)
    recording.save(folder / "run.nni")
    return load(folder / "run.nni").passes[0].figures


@pytest.mark.parametrize("sites", [(), ("a", "b[1]")])
def test_figures_come_back_as_they_were(tmp_path, sites):
    same(loaded(tmp_path, figures(sites)), figures(sites))


@pytest.mark.parametrize("lacks", [1, 2])
def test_figures_that_were_saved_before_are_read(tmp_path, lacks):
    before = dataclasses.replace(figures(), masks=figures().masks[:, :-lacks])
    found = loaded(tmp_path, before)
    np.testing.assert_array_equal(found.masks[:, :-lacks], before.masks)
    assert not found.masks[:, -lacks:].any()


def test_figures_that_lack_more_masks_are_refused(tmp_path):
    with pytest.raises(InspectorError, match="'masks' has"):
        loaded(tmp_path, dataclasses.replace(figures(), masks=figures().masks[:, :-3]))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": figures().rows[:-1]},
        {"rows": figures().rows[:, :-1]},
        {"rows": figures().rows.astype(np.float64)},
        {"parameter_rows": figures().parameter_rows[:0]},
        {"masks": figures().masks[:, :, :-1]},
        {"sites": ("a",)},
    ],
)
def test_figures_that_do_not_belong_together_are_refused(tmp_path, change):
    with pytest.raises(InspectorError, match="column"):
        loaded(tmp_path, dataclasses.replace(figures(), **change))


def test_a_recording_keeps_figures_with_their_passes_and_thins_both():
    recording = Recording(max_steps=10)
    for step in range(40):
        recording.append(step, {"a": {"output": empty()}}, figures=figures(seed=step))
    assert recording.thinned
    for item in recording.passes:
        same(item.figures, figures(seed=item.number))
    assert recording.facts is None


def test_figures_count_as_memory():
    with_them, without = Recording(), Recording()
    with_them.append(0, {"a": {"output": empty()}}, figures=figures(["a"] * 1000))
    without.append(0, {"a": {"output": empty()}})
    row = 4 * len(SITE_STATS) + len(MASKS) * MASK_BYTES
    assert with_them.nbytes - without.nbytes >= 1000 * row


def test_the_flows_of_the_last_programs_are_kept():
    flows = [Flow.of([str(i)], [(0, 0, -1)], []) for i in range(10)]
    known = Facts()
    for one in [*flows, *flows[5:7]]:
        known = known.joined(Facts(flows=(one,)))
    assert [flow.sites[0] for flow in known.flows] == ["6", "5", "9", "8", "7", "4", "3", "2"]


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
        ("examples", np.nan, "a count is not a whole number"),
        ("looked", np.inf, "a count is not a whole number"),
        ("units", 2.5, "a count is not a whole number"),
        ("positions", 0, "a count is not a whole number"),
        ("looked", 65, "more units were examined"),
        ("rms", -1, "a figure is negative"),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path, name, value, flaw):
    one = figures()
    assert invalid_reason(one) == ""
    one.rows[1, SITE_STATS.index(name)] = value
    assert invalid_reason(one).startswith(flaw)
    with pytest.raises(InspectorError, match=flaw):
        loaded(tmp_path, one)


@pytest.mark.parametrize(
    ("changed", "flaw"),
    [
        ({"sites": ("a", "a")}, "a name occurs twice"),
        ({"parameters": ("x", "x")}, "a name occurs twice"),
        ({"varied": 2}, "a flag is not -1, 0 or 1"),
    ],
)
def test_names_come_once_and_flags_are_flags(changed, flaw):
    assert invalid_reason(figures(**changed)) == flaw


def site(name, order):
    return Facts(sites=(SiteFacts(site=name, order=order),))


def test_facts_are_read_when_they_are_asked_for_and_once():
    recording, asked = Recording(), []

    def read():
        asked.append(1)
        return site("a", 1)

    recording.learn(read)
    recording.append(0, {"a": {"output": empty()}})
    assert recording.facts_so_far is None
    assert asked == []
    assert recording.facts == recording.facts == site("a", 1)
    assert asked == [1]


def test_facts_that_were_learnt_later_win_over_those_that_are_read_later():
    recording, at_once = Recording(), Recording()
    of = [site("b", 0), site("a", 1), site("a", 2), site("b", 3), site("a", 4)]
    for number, one in enumerate(of):
        recording.learn(one if number != 1 else lambda: of[1])
        at_once.learn(one)
    assert recording.facts_so_far.sites == (of[3].sites[0], of[4].sites[0])
    assert recording.facts == at_once.facts


@pytest.mark.parametrize("attached_first", [True, False])
def test_a_file_has_the_facts_that_nobody_asked_for(tmp_path, attached_first):
    recording, path = Recording(), tmp_path / "run.nni"
    if attached_first:
        recording.attach(path, pytest.fail)
    recording.learn(lambda: site("a", 1))
    if not attached_first:
        recording.save(path)
    assert load(path).facts == site("a", 1)


def test_facts_whose_reading_was_interrupted_are_read_the_next_time():
    recording, interrupts = Recording(), [KeyboardInterrupt]

    def read():
        if interrupts:
            raise interrupts.pop()
        return site("a", 1)

    recording.learn(read)
    with pytest.raises(KeyboardInterrupt):
        _ = recording.facts
    assert recording.facts == site("a", 1)


def test_facts_that_cannot_be_read_are_left_out_after_one_error(tmp_path):
    recording = Recording()
    recording.learn(site("a", 1))
    recording.learn(lambda: 1 // 0)
    recording.learn(site("b", 2))
    with pytest.raises(ZeroDivisionError):
        _ = recording.facts
    assert recording.facts == site("a", 1).joined(site("b", 2))
    recording.save(tmp_path / "run.nni")
