"""A run that is saved while it runs: the file has every pass, and disk errors do not stop it."""

# jax is only partly typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import time
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers
from summaries import all_summaries, assert_same, contents

from nnx_inspector.errors import InspectorWarning
from nnx_inspector.inspector.inspector import Inspector
from nnx_inspector.inspector.script.watch import watch
from nnx_inspector.perturbations.activations import Scale
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def trained() -> tuple[Any, Any]:
    model = TwoLayers(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)


def refused(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_an_inspector_saves_what_there_is_and_what_comes(tmp_path: pathlib.Path) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    insp = Inspector(model, X, display=False)
    insp.run(X)
    insp.save(path)
    assert_same(load(path), insp.recording)
    handle = insp.perturb("a", Scale(0.5))
    for i, _ in enumerate(insp.watch(range(6), every=2)):
        insp.metrics(loss=train_step(model, optimizer, X))
        handle.enabled = i < 3
    assert_same(load(path), insp.recording)
    with insp.watch(every=2):
        for _ in range(5):
            train_step(model, optimizer, X)
    insp.step(lambda model, x: (model(x) ** 2).mean(), X)
    insp.metrics(accuracy=0.5)
    found = load(path)
    assert_same(found, insp.recording)
    assert {p.kind for p in found.passes} == {"run", "watch", "step"}
    assert {p.setting for p in found.passes} > {0}
    insp.save(tmp_path / "other.nni")
    insp.run(X)
    assert contents(load(path)) == contents(found)
    assert_same(load(tmp_path / "other.nni"), insp.recording)
    insp.close()
    insp.recording.append(99, {})
    assert 99 not in load(tmp_path / "other.nni").steps
    assert sorted(os.listdir(tmp_path)) == ["other.nni", "run.nni"]


def in_time(path: pathlib.Path, passes: int) -> Recording:
    """The recording in a file, once it has so many passes."""
    limit = time.monotonic() + 60
    while len(found := load(path)) < passes:
        assert time.monotonic() < limit, len(found)
    return found


def test_each_pass_of_a_region_is_in_the_file_once_it_is_complete(tmp_path: pathlib.Path) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    with watch(model, every=1, save=path) as recording:
        for i in range(6):
            train_step(model, optimizer, X).block_until_ready()
            found = in_time(path, i + 1)
            assert found.steps == list(range(len(found)))
            for one in found.passes:
                assert {q for _, q in one.keys} >= {"output", "gradient"}
    assert_same(load(path), recording)
    assert len(recording) == 6
    with open(path, "rb") as file:
        assert file.read().count(b"held") < 3 * 6  # each once, and not once more when complete


def test_a_disk_that_fails_stops_no_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    insp = Inspector(model, X, display=False)
    insp.save(path)
    notices: list[str] = []
    monkeypatch.setattr(
        inside(insp).core, "notice", lambda level, text: notices.append(f"{level}: {text}")
    )

    def loop() -> None:
        for i in insp.watch(range(8), every=1):
            if i == 3:
                inside(insp).core.recorder.wait()  # a step is saved while the loop goes on
                monkeypatch.setattr(os, "write", refused)
            train_step(model, optimizer, X)

    with pytest.warns(InspectorWarning, match="No space left.*It has 4 passes of the") as said:
        loop()
    assert len(said) == 1
    monkeypatch.undo()
    assert len(notices) == 1
    assert notices[0].startswith("error: The recording could not be saved")
    assert "No space left" in notices[0]
    assert len(insp.recording) == 9
    assert len(load(path)) == 4
    insp.close()
    assert_same(load(path), insp.recording)

    model, optimizer = trained()

    def watched() -> Recording:
        with watch(model, every=1, save=path) as recording:
            monkeypatch.setattr(os, "write", refused)
            for _ in range(4):
                train_step(model, optimizer, X)
            monkeypatch.undo()
        return recording

    with pytest.warns(InspectorWarning, match="could not be saved .*No space left"):
        recording = watched()
    assert_same(load(path), recording)
    with pytest.raises(FileNotFoundError), watch(model, save=tmp_path / "no" / "run.nni"):
        raise AssertionError
    with pytest.raises(ValueError, match="nothing"), watch(model, only="nothing", save=path):
        raise AssertionError


@pytest.mark.parametrize("when", ["in the loop", "in a region", "after the loop", "in an error"])
def test_a_file_that_is_deleted_is_warned_of_in_a_script(tmp_path: pathlib.Path, when: str) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    insp = Inspector(model, X, display=False)
    insp.save(path)

    def steps(i: int) -> None:
        train_step(model, optimizer, X)
        if i == 3 and when != "after the loop":
            path.unlink()
            if when == "in an error":
                raise KeyError(i)

    def run() -> None:
        if when == "in a region":
            with insp.watch(every=1):
                for i in range(8):
                    steps(i)
        else:
            for i in insp.watch(range(8), every=1):
                steps(i)

    def run_and_close() -> None:
        with contextlib.suppress(KeyError):
            run()
        if when == "after the loop":
            path.unlink()
        insp.close()

    said = rf"saved to '{path}': another file was put in its place, or it was deleted. It had"
    with pytest.warns(InspectorWarning, match=said) as found:
        run_and_close()
    insp.close()  # says no more
    assert len(found) == 1
    assert len(insp.recording) >= 4


def test_a_file_that_is_kept_is_not_warned_of(tmp_path: pathlib.Path) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    insp = Inspector(model, X, display=False)
    insp.save(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in insp.watch(range(4), every=1):
            train_step(model, optimizer, X)
        insp.save(tmp_path / "other.nni")
        path.unlink()  # nothing is written to it any more
        insp.close()
    assert [one for one in said if issubclass(one.category, InspectorWarning)] == []
    assert len(load(tmp_path / "other.nni")) == len(insp.recording)


def test_what_was_held_counts_until_the_pass_is_complete(tmp_path: pathlib.Path) -> None:
    path, recording, some = tmp_path / "run.nni", Recording(), all_summaries()
    recording.hold(1, 0, {"a": {"output": some[0]}})
    assert recording.state().held == {}, "there is no file"
    recording.attach(path, print)
    recording.append(0, {"a": {"output": some[0]}})
    recording.hold(1, 7, {"a": {"output": some[6]}}, kind="k", perturbed=True, setting=3)
    recording.hold(2, 8, {"a": {"output": some[2]}})
    assert (recording.steps, load(path).steps) == ([0], [0, 7, 8])
    first = load(path).passes[1]
    assert (first.kind, first.perturbed, first.setting, first.number) == ("k", True, 3, 1)
    assert first.news, "it has the first NaN"
    recording.save(tmp_path / "now.nni")
    assert load(tmp_path / "now.nni").steps == [0]
    recording.save(path)  # anew, while they wait
    assert load(path).steps == [0, 7, 8]
    recording.append(5, {}, kind="run")  # one of another source comes between
    gradient = {"a": {"output": some[6], "gradient": some[1]}}
    recording.append(7, gradient, kind="k", perturbed=True, setting=4, held=1)
    assert load(path).steps == [0, 5, 7, 8]
    recording.append(8, {"a": {"output": some[2]}}, held=2)
    recording.hold(1, 9, {})
    recording.append(9, {}, held=1)
    assert_same(load(path), recording)
    recording.detach()


@pytest.mark.long
def test_twenty_thousand_steps_take_bounded_memory(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (model, optimizer) = tmp_path / "run.nni", trained()
    insp = Inspector(model, X, display=False)
    insp.save(path)
    peak, largest = [], 0
    for i in insp.watch(range(20_000), every=1):
        insp.metrics(loss=train_step(model, optimizer, X))
        if i % 100 == 0:
            largest = max(largest, path.stat().st_size)
        if i % 5000 == 4999:
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    recording = insp.recording
    assert_same(load(path), recording)
    assert recording.steps[-1] == 19_999
    assert recording.thinned == 20_001 - len(recording)
    assert len(recording) <= 2000
    assert largest <= 2 * recording.nbytes + 5 * 2**20
    assert peak[-1] - peak[1] < 64 * 2**20, "it grows with the steps"
    insp.close()
    sizes = [recording.nbytes, path.stat().st_size, largest, *peak]
    names = ["recording", "file", "file at most", *(f"process at {n}" for n in (5, 10, 15, 20))]
    with capsys.disabled():
        print("\n20,000 steps:", len(recording), "passes;", end=" ")
        print(*(f"{n} {b / 2**20:.1f} MiB" for n, b in zip(names, sizes, strict=True)), sep=", ")
