"""A restarted run goes on in the file of the run before, which shows the seam."""

from __future__ import annotations

import pathlib
import re
import shutil

import pytest
from crafted_files import parts_of
from summaries import contents, normal_values, summary_of

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.facts import Facts, ParameterFacts, Uncalled
from nnx_inspector.recordings.follow import Follower
from nnx_inspector.recordings.load import load, load_or_create
from nnx_inspector.recordings.recording import Recording

OLD_FILES = pathlib.Path(__file__).parent / "old_files"
SUMMARY = summary_of(normal_values(0))
MODEL = Facts(parameters=(ParameterFacts(path="a/kernel", site="a", size=12),))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run.nni"


def goes_on(path: pathlib.Path, steps: range, facts: Facts = MODEL) -> Recording:
    recording = load_or_create(path, facts)
    recording.attach(path, print)
    recording.learn(facts)
    for step in steps:
        recording.append(step, {"a": {"output": SUMMARY}}, metrics={"loss": step})
    return recording


@pytest.mark.parametrize("ending", ["ended", "killed", "torn"])
def test_a_run_goes_on_in_its_file(path: pathlib.Path, ending: str) -> None:
    first = goes_on(path, range(4))
    if ending == "ended":
        first.detach()
    else:
        data = path.read_bytes()
        first.detach()
        path.write_bytes(data[: len(data) - (7 if ending == "torn" else 0)])
    with_steps = [0, 1, 2] if ending == "torn" else [0, 1, 2, 3]
    follower = Follower(path)
    follower.poll()
    assert follower.recording.steps == with_steps
    second = goes_on(path, range(3, 6))
    assert follower.poll()
    assert follower.recording.steps == [*with_steps, 3, 4, 5]
    assert follower.state.name == "running"
    assert follower.replaced == 0, "it is the same run"
    second.detach()
    third = goes_on(path, range(6, 7))
    third.detach(KeyboardInterrupt())
    found = load(path)
    assert contents(found) == contents(third)
    assert found.steps == [*with_steps, 3, 4, 5, 6]
    assert found.seams == (len(with_steps), len(with_steps) + 3)
    events = ["begun", *["ended"] * (ending == "ended"), "resumed", "ended", "resumed"]
    assert [mark.event for mark in found.marks] == [*events, "interrupted"]
    assert len({part for part in parts_of(path.read_bytes()) if part[0] == b"head"}) == 1
    follower.poll()
    assert follower.state.text == "The run was interrupted. Its last step is 6."
    assert follower.replaced == 0
    follower.close()


def test_a_file_of_an_earlier_version_is_gone_on_in(path: pathlib.Path) -> None:
    shutil.copy(OLD_FILES / "killed.nni", path)
    facts = load(path).facts
    assert facts is not None
    second = goes_on(path, range(4, 6), facts)
    second.detach()
    assert load(path).steps == [0, 1, 2, 3, 4, 5]
    assert load(path).seams == (4,)


def test_a_first_run_has_no_seam(path: pathlib.Path) -> None:
    goes_on(path, range(2)).detach()
    assert load(path).seams == ()
    assert [mark.event for mark in load(path).marks] == ["begun", "ended"]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"a/kernel": 13}, "'a/kernel' has 12 values there, and 13 values in this model"),
        ({"a/kernel": 12, "b": 1}, "'b' has no place there, and 1 values in this model"),
        ({}, "'a/kernel' has 12 values there, and no place in this model"),
    ],
)
def test_the_file_of_another_model_is_refused_and_left_alone(
    path: pathlib.Path, parameters: dict[str, int], text: str
) -> None:
    goes_on(path, range(2)).detach()
    before = path.read_bytes()
    here = (ParameterFacts(path=name, site="", size=size) for name, size in parameters.items())
    with pytest.raises(InspectorError, match=re.escape(text)):
        load_or_create(path, Facts(parameters=tuple(here)))
    assert path.read_bytes() == before


def test_a_file_that_does_not_say_of_which_model_it_is_is_refused(path: pathlib.Path) -> None:
    goes_on(path, range(2), Facts()).detach()
    with pytest.raises(InspectorError, match="another model"):
        load_or_create(path, MODEL)
    path.write_text("notes")
    with pytest.raises(InspectorError, match="is not a recording: it is a text file"):
        load_or_create(path, MODEL)
    Recording().save(path)  # nothing was recorded: any model may
    assert load_or_create(path, MODEL).steps == []


def test_that_an_earlier_run_never_called_the_model_does_not_stay(path: pathlib.Path) -> None:
    first = goes_on(path, range(0))
    first.miss(Uncalled(step=0, steps=3, calls=0, what="it was not called", advice="call it"))
    first.detach()
    facts = load_or_create(path, MODEL).facts
    assert facts is not None
    assert facts.uncalled is None
