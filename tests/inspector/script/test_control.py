"""A run that is steered from outside, through files: it acts, answers, and records what it did."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers
from training_thread import TrainingThread, X, forward

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError, InspectorWarning
from nnx_inspector.inspector.script import control
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control import folder
from nnx_inspector.screen.control.state import CONTROL, ControlState

NOISE = protocol.Perturb(id=0, site="b", kind="Noise", strength=0.1, at="output")


@pytest.fixture
def script(tmp_path):
    made = TrainingThread(tmp_path / "run.nni")
    yield made
    assert made.end() == []


@pytest.fixture
def run(script):
    opened = nni.open(script.path, display=False)
    yield opened
    opened.close()


def test_a_perturbation_acts_in_the_run(script, run):
    handle = run.perturb("b", nni.Zero())
    assert handle.enabled
    script.wait_for(np.zeros((5, 2)))
    handle.enabled = False
    script.wait_for(np.asarray(script.model(X)))
    scaled = run.perturb("b", nni.Scale(2.0))
    script.wait_for(2 * np.asarray(script.model(X)))
    scaled.strength = 3.0
    script.wait_for(3 * np.asarray(script.model(X)))
    assert [one.site for one in run.perturbations] == ["b", "b"]
    scaled.remove()
    assert [one.enabled for one in run.perturbations] == [False]
    with pytest.raises(InspectorError, match="was removed"):
        _ = scaled.enabled


def test_a_perturbation_of_a_run_is_none_of_the_run_that_replaces_it(script, run):
    old = run.perturb("b", nni.Zero())
    assert script.end() == []
    with pytest.raises(InspectorError, match="takes no requests any more"):
        old.enabled = False
    other = TrainingThread(script.path)
    new = run.perturb("b", nni.Scale(2.0))
    for change in (lambda: setattr(old, "enabled", False), old.remove):
        with pytest.raises(InspectorError, match="was removed"):
            change()
    assert new.enabled
    assert other.end() == []


def test_what_was_done_is_in_the_recording(script, run):
    run.perturb("b", nni.Scale(2.0))
    run.every = np.int64(3)
    run.measure_next()
    assert run.every == 3
    assert script.end() == []
    said = ControlState.from_columns(nni.load(script.path).table(CONTROL))
    assert [text for _, text in said.done] == [
        'run.perturb("b", nni.Scale(factor=2.0))',
        "run.every = 3",
        "run.measure_next()",
    ]
    steps = [step for step, _ in said.done]
    assert steps == sorted(steps)
    perturbed = [one.step for one in script.recording.passes if one.perturbed]
    assert perturbed
    assert min(perturbed) >= steps[0]
    assert said.run == ""
    assert not os.path.lexists(folder.folder_of(script.path))


def test_measuring_less_and_once_more(script, run):
    run.every = 1_000_000
    run.measure_next()  # or it would measure none for a long while
    step, text = ControlState.from_columns(run.recording.table(CONTROL)).done[-1]
    assert text == "run.measure_next()"
    script.wait(lambda: run.recording.steps[-1] >= step)
    assert run.every == 1_000_000


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda run: run.perturb("nowhere", nni.Zero()), "nowhere"),
        (lambda run: setattr(run, "every", 0), "every must be"),
        (lambda run: setattr(run, "every", 2.5), "not sent: set_every.every"),
        (lambda run: setattr(run, "every", 10**30), "not sent: set_every.every"),
        (lambda run: run.values("b", example="x"), "not sent: read_site.example"),
        (lambda run: run.values("b", example=object()), "not sent: object is no number"),
        (
            lambda run: run.ask(dataclasses.replace(NOISE, strength=np.nan)),
            "strength cannot be nan",
        ),
        (lambda run: run.values("b" * 70_000), "not sent: "),
        (lambda run: run.ask(protocol.Look(id=0, what="casts", site="")), "takes no Look"),
        (lambda run: run.perturb("b", nni.Scale(2.0, at="input")), "Declare it in the script"),
        (lambda run: run.ask(NOISE), "no place for it"),
        (lambda run: run.ask(protocol.Remove(id=0, perturbation=99)), "no perturbation"),
        (lambda run: run.perturb("b", nni.Mask(jnp.ones(3, bool))), "Declare it in the script"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(run, ask, why):
    with pytest.raises((InspectorError, ValueError), match=why):
        ask(run)
    assert run.perturbations == []
    assert run.every == 1


def test_what_was_refused_takes_no_room(script, run):
    with pytest.raises(InspectorError, match="no place for it"):
        run.ask(NOISE)
    run.perturb("b", nni.Scale(2.0))
    script.wait_for(2 * np.asarray(script.model(X)))


def test_what_the_script_declares_can_be_switched(tmp_path):
    declared = {"a": nni.Clamp(-0.5, 0.5)}
    script = TrainingThread(tmp_path / "run.nni", control=declared)
    run = nni.open(script.path, display=False)
    (handle,) = run.perturbations
    assert (handle.site, handle.enabled) == ("a", False)
    handle.enabled = True
    with nni.perturb("a", declared["a"]):
        wanted = np.asarray(script.model(X))
    script.wait_for(wanted)
    run.close()
    assert script.end() == []


def test_a_run_without_control_takes_nothing(tmp_path):
    script = TrainingThread(tmp_path / "run.nni", control=False)
    run = nni.open(script.path, display=False)
    with pytest.raises(InspectorError, match="takes no requests"):
        run.measure_next()
    assert script.end() == []
    run.close()


def test_a_run_that_is_over_does_not_answer(script, run):
    assert script.end() == []
    with pytest.raises(InspectorError, match=r"takes no requests any more\. The run has ended"):
        run.measure_next()


def test_control_needs_a_file():
    with (
        pytest.raises(ValueError, match="needs a recording"),
        nni.watch(TwoLayers(nnx.Rngs(0)), control=True),
    ):
        pass


# ------------------------------------------------------------------ strangers

ZERO = protocol.Perturb(id=1, site="b", kind="Zero", strength=None, at="output")


def put(path, run, name, text):
    target = os.path.join(folder.folder_of(path), name)
    with open(target, "wb") as file:
        file.write(text)
    os.chmod(target, 0o600)
    return target


def valid(run, **more):
    message = protocol.to_header(
        protocol.Perturb(id=1, site="b", kind="Zero", strength=None, at="output")
    )
    return json.dumps({"run": run, "message": {**message, **more}}).encode()


@pytest.fixture
def made(tmp_path):
    return folder.create_folder(tmp_path / "run.nni")


def test_a_valid_request_is_taken_once(made):
    put(made.removesuffix(".control"), "r", "1.json", valid("r"))
    (message,) = folder.take_requests(made, "r")
    assert message == ZERO
    assert list(folder.take_requests(made, "r")) == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x80\x04\x95",
        b"[" * 100_000,
        valid("r", site=3),
        valid("r", strength="__import__('os')"),
        valid("r", strength=1e999),
        valid("r", more="x"),
        valid("r", site="x" * 70_000),
        json.dumps({"run": "r", "message": {"type": "hello"}}).encode(),
        json.dumps({"run": "r", "message": {"type": "study"}}).encode(),
    ],
)
def test_what_is_no_request_is_deleted_and_never_done(made, text):
    put(made.removesuffix(".control"), "r", "1.json", text)
    assert list(folder.take_requests(made, "r")) == []
    assert os.listdir(made) == []


def test_a_request_to_another_run_is_left_to_it(made):
    put(made.removesuffix(".control"), "r", "1.json", valid("another run"))
    assert list(folder.take_requests(made, "r")) == []
    assert list(folder.take_requests(made, "another run")) == [ZERO]
    assert os.listdir(made) == []


def test_a_link_and_a_file_of_others_are_not_read(made, tmp_path):
    (tmp_path / "real.json").write_bytes(valid("r"))
    os.symlink(tmp_path / "real.json", os.path.join(made, "1.json"))
    os.chmod(put(made.removesuffix(".control"), "r", "2.json", valid("r")), 0o666)
    os.mkfifo(os.path.join(made, "3.json"))
    os.mkdir(os.path.join(made, "4.json"))
    assert list(folder.take_requests(made, "r")) == []
    assert (tmp_path / "real.json").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode):
    made = folder.create_folder(tmp_path / "run.nni")
    os.chmod(made, mode)
    with pytest.raises(InspectorError, match="others may write"):
        folder.create_folder(tmp_path / "run.nni")
    with pytest.raises(InspectorError, match="others may write"):
        folder.send_request(tmp_path / "run.nni", "r", protocol.MeasureNext(id=1))
    assert stat.S_IMODE(os.stat(made).st_mode) == mode


def test_a_file_or_a_link_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "run.nni.control")
    with pytest.raises(InspectorError, match="is not a folder"):
        folder.create_folder(tmp_path / "run.nni")


def test_a_folder_that_vanishes_ends_the_requests_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("nnx_inspector.inspector.script.control.PAUSE", 0.01)
    closed = threading.Event()
    monkeypatch.setattr(control, "remove_folder", lambda folder: closed.set())

    def loop():
        model = TwoLayers(nnx.Rngs(0))
        with nni.watch(model, every=1, save=tmp_path / "run.nni", control=True) as recording:
            os.rmdir(folder.folder_of(tmp_path / "run.nni"))
            assert closed.wait(60)  # so the file says that it takes none
            for _ in range(3):
                forward(model, X)
        return recording

    with pytest.warns(InspectorWarning, match="takes no more requests"):
        recording = loop()
    assert len(recording.passes) == 3


def test_requests_of_an_earlier_run_are_gone(tmp_path):
    folder.create_folder(tmp_path / "run.nni")
    folder.send_request(tmp_path / "run.nni", "old", protocol.MeasureNext(id=1))
    (tmp_path / "run.nni.control" / "a folder").mkdir()
    made = folder.create_folder(tmp_path / "run.nni")
    assert os.listdir(made) == ["a folder"]


def test_a_request_costs_nothing_where_there_is_none(tmp_path):
    """An unmeasured step calls nothing of ours: the same programs run with and without control."""
    counted = []
    for steered in (False, True):
        model = TwoLayers(nnx.Rngs(0))
        with nni.watch(model, every=4, save=tmp_path / f"{steered}.nni", control=steered):
            for _ in range(9):
                jax.block_until_ready(forward(model, X))
        counted.append([p.step for p in nni.load(tmp_path / f"{steered}.nni").passes])
    assert counted == [[0, 4, 8]] * 2
