"""A run that goes on from a checkpoint: the same file, the steps of the job, and a seam."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.figure import figure

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def train(path: pathlib.Path, steps: int, **how: object) -> nni.Recording:
    model = TwoLayers(nnx.Rngs(0))
    forward = nnx.jit(lambda model, x: model(x))
    with nni.watch(model, save=path, **how) as recording:  # type: ignore[arg-type]
        for _ in range(steps):
            forward(model, X)
    return recording


def test_a_restarted_run_goes_on_in_its_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.nni"
    train(path, 5, every=2)
    now = train(path, 4, every=2, start=4)  # the checkpoint is from before step 4
    found = nni.load(path)
    assert now.steps == found.steps == [0, 2, 4, 4, 6]
    assert now.seams == found.seams == (3,)
    assert found.to_frame().attrs["seams"] == [3]
    assert [mark.event for mark in found.marks] == ["begun", "ended", "resumed", "ended"]
    drawn = figure(found, "")
    assert [line.x0 for line in drawn.layout.shapes if line.line.dash == "dot"] == [4, 4]
    train(path, 1, start=8)
    assert nni.load(path).seams == (3, 5)


def test_a_run_without_a_file_yet_only_counts_from_its_start(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.nni"
    assert train(path, 3, every=2, start=100).steps == [100, 102]
    found = nni.load(path)
    assert (found.steps, found.seams) == ([100, 102], ())
    assert not [line for line in figure(found, "").layout.shapes if line.line.dash == "dot"]


def test_a_run_from_its_beginning_replaces_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.nni"
    train(path, 3, every=2)
    train(path, 1)
    found = nni.load(path)
    assert (found.steps, found.seams) == ([0], ())


def test_a_killed_run_keeps_what_it_had_measured(tmp_path: pathlib.Path) -> None:
    """Also if its file ends within a section."""
    path = tmp_path / "run.nni"
    train(path, 5, every=2)
    data = path.read_bytes()
    path.write_bytes(data[:-200])
    kept = nni.load(path).steps
    train(path, 1, start=4)
    found = nni.load(path)
    assert found.steps == [*kept, 4]
    assert found.seams == (len(kept),)
    assert kept[:2] == [0, 2]


def test_what_is_no_recording_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.nni"
    path.write_text("something else")
    with pytest.raises(InspectorError):
        train(path, 1, start=4)
    assert path.read_text() == "something else"


@pytest.mark.parametrize("start", [-1, 1.5, True, "4", None])
def test_a_start_is_a_number_of_steps(start: object, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="start must be the number of a step"):
        train(tmp_path / "run.nni", 1, start=start)
