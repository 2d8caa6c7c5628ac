"""What each kind of tracker is given, by doubles that keep it; what is none is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from fake_trackers import AimRun, MlflowRun, SummaryWriter, WandbRun, packages

import nnx_inspector as nni
from nnx_inspector.findings.finding import Finding
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.trackers import mlflow_run
from nnx_inspector.trackers.detection import tracker_of
from nnx_inspector.trackers.scalars import PassReader
from nnx_inspector.trackers.tracker import AllowedNames, Tracker

X = np.arange(-3, 5, dtype=np.float32)
FINDING = Finding(
    rule="constant", site="a", step=2, severity="warning", evidence={}, what="What", advice="why"
)


def recorded(*steps: int) -> list[Any]:
    recording = nni.Recording()
    for step in steps:
        summaries = {"": {"output": summarize(X)}, "a[1]": {"output": summarize(X + step)}}
        recording.append(step, summaries | {"a/kernel": {"parameter": summarize(X * 0 + 2)}})
    return [*recording.passes]


def given(tracker: Tracker | None, *steps: int) -> list[Any]:
    assert tracker is not None
    passes = recorded(*steps)
    for item in passes:
        tracker.write_metrics(item.step, {"loss": 0.5 + item.step, "train/top1": float("nan")})
        tracker.write_pass(item, 0.125 if item.step else None)
    tracker.write_finding(FINDING)
    tracker.flush()
    return passes


def test_a_summary_writer_gets_scalars_histograms_and_findings() -> None:
    to = SummaryWriter()
    tracker = tracker_of(to)
    passes = given(tracker, 0, 10)
    expected: dict[str, list[tuple[int, float]]] = {"nni/tracker/cpu_seconds": [(10, 0.125)]}
    for item in passes:
        for group, site, statistic, value in PassReader().scalars(item):
            site = {"(root)": "_root_", "a[1]": "a_1_"}.get(site, site)
            expected.setdefault(f"{group}/{site}/{statistic}", []).append((item.step, value))
    metrics = {name: to.scalars.pop(name) for name in ("metrics/loss", "metrics/train/top1")}
    assert to.scalars == expected
    assert metrics["metrics/loss"] == [(0, 0.5), (10, 10.5)]
    assert np.isnan([value for _, value in metrics["metrics/train/top1"]]).all()
    (_, first), (step, second) = to.histograms["outputs/a_1_/histogram"]
    assert step == 10
    assert (second["min"], second["max"], second["num"]) == (7, 14, 8)
    assert (second["sum"], second["sum_squares"]) == (84, pytest.approx(((X + 10) ** 2).sum()))
    assert second["limits"] == np.linspace(7, 14, 65)[1:].tolist()
    assert sum(second["counts"]) == 8
    assert first["limits"][-1] == 4
    (_, one), _ = to.histograms["parameters/a/kernel/histogram"]
    assert (one["limits"], one["counts"], one["min"], one["max"]) == ([2], [8], 2, 2)
    assert to.texts == [("findings/constant/a", str(FINDING), 2)]
    assert to.flushed == 1
    assert tracker is not None
    assert tracker.lacks == ""


def test_a_writer_without_histograms_or_texts_says_so() -> None:
    class Scalars:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            self.tags.append(tag)

    to = Scalars()
    tracker = tracker_of(to)
    assert tracker is not None
    assert tracker.lacks.endswith(
        "takes no histograms (add_histogram_raw) and no findings (add_text)."
    )
    assert not tracker.takes_findings
    for item in recorded(0):
        tracker.write_pass(item, None)
    tracker.flush()
    assert "outputs/a_1_/mean" in to.tags


def test_two_names_never_become_one() -> None:
    names = AllowedNames(r"[^-/\w.]")
    keys = ["a[1]", "a(1)", "a_1_", "a_1_.2", "a[1]"]
    assert [names.of(key) for key in keys] == ["a_1_", "a_1_.2", "a_1_.3", "a_1_.2.2", "a_1_"]


def test_a_wandb_run_gets_a_row_for_each_step() -> None:
    to = WandbRun()
    with packages() as doubles:
        tracker = tracker_of(to)
        passes = given(tracker, 0, 10, 20)
    assert tracker is not None
    assert tracker.name == "The W&B run 'sunny-sky-1'"
    assert to.defined.pop("nni/step") is None
    assert to.defined["outputs/*"] == to.defined["metrics/*"] == "nni/step"
    assert [row["nni/step"] for row in to.rows.values()] == [0, 10, 20, 2]
    assert [*to.rows] == [0, 10, 20, 21]  # the finding is of an earlier step
    for item, row in zip(passes, to.rows.values(), strict=False):
        scalars = {f"{g}/{s}/{t}": v for g, s, t, v in PassReader().scalars(item)}
        assert {name: row[name] for name in scalars} == scalars
        shown = row["outputs/a[1]/histogram"]
        assert isinstance(shown, doubles["wandb"].Histogram)
        edges, counts = item.summary("a[1]", "output").histogram(64)
        assert (shown.histogram, shown.bins) == (counts.tolist(), edges.tolist())
        assert row["metrics/loss"] == item.step + 0.5
    assert to.rows[21]["findings/constant/a"] == str(FINDING)
    assert to.lost == []


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_the_users_own_rows_are_never_lost_in_wandb_and_neither_are_ours(
    numbered: bool, late: int
) -> None:
    """The user logs each step; we come `late` steps after it, and at once for several steps."""
    to, waiting = WandbRun(), []
    with packages():
        tracker = tracker_of(to)
        assert tracker is not None
        for step in range(60):
            to.log({"mine": step}, **({"step": step} if numbered else {}))
            waiting.append(step)
            if step % 7 == late:  # several at once
                for one in waiting:
                    tracker.write_metrics(one, {"loss": float(one)})
                waiting.clear()
        for one in waiting:
            tracker.write_metrics(one, {"loss": float(one)})
        tracker.flush()
    rows = [*to.rows.values()]
    ours = [(r["nni/step"], r["metrics/loss"]) for r in rows if "metrics/loss" in r]
    assert ours == [(step, float(step)) for step in range(60)]
    assert [lost for lost in to.lost if "metrics/loss" in lost] == []
    # before it is known that somebody else counts, a few of the first rows may be lost
    mine = [r["mine"] for r in rows if "mine" in r]
    assert [step for step in range(60) if step not in mine] == [lost["mine"] for lost in to.lost]
    assert [lost["mine"] for lost in to.lost if lost["mine"] > 12] == []


def test_a_wandb_run_that_goes_on_far_behind_its_first_step_is_written_as_it_comes() -> None:
    to = WandbRun()
    to.log({"mine": 0}, step=5000)
    with packages():
        tracker = tracker_of(to)
        assert tracker is not None
        for step in range(5):
            tracker.write_metrics(step, {"loss": 1.0})
            assert [*to.rows][-1] == 5000 + step


def test_an_aim_run_has_the_site_as_context() -> None:
    to = AimRun()
    with packages() as doubles:
        tracker = tracker_of(to)
        (item, _) = given(tracker, 0, 10)
    assert tracker is not None
    assert tracker.name == "The Aim run 'a1b2c3'"
    found = {(name, step, *context.items()): value for value, name, step, context in to.tracked}
    for group, site, statistic, value in PassReader().scalars(item):
        assert found[f"{group}/{statistic}", 0, ("site", site)] == value
    assert found["metrics/loss", 10] == 10.5
    shown = found["outputs", 10, ("site", "a[1]")]
    assert isinstance(shown, doubles["aim"].Distribution)
    assert shown.bin_range == (7, 14)
    assert sum(shown.hist) == 8
    text = found["findings", 2, ("finding", "constant/a")]
    assert (type(text), text.data) == (doubles["aim"].Text, str(FINDING))


@pytest.mark.parametrize("at_a_time", [1000, 7])
def test_an_mlflow_run_has_metrics_and_files_and_no_histograms(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "MOST_PER_BATCH", at_a_time)
    with packages() as doubles:
        tracker = tracker_of(MlflowRun("f00"))
        passes = given(tracker, 0, 10)
        client = doubles["mlflow"].MlflowClient
    assert tracker is not None
    assert tracker.lacks == "The MLflow run 'f00' takes no histograms, because MLflow has none."
    found = {(run, m.key, m.step): m.value for run, m in client.metrics}
    for item in passes:
        for group, site, statistic, value in PassReader().scalars(item):
            site = {"(root)": "_root_", "a[1]": "a_1_"}.get(site, site)
            assert found["f00", f"{group}/{site}/{statistic}", item.step] == value
    assert found["f00", "metrics/loss", 10] == 10.5
    assert client.texts == [("f00", str(FINDING), "findings/constant/a.txt")]
    assert all(m.timestamp > 1.5e12 for _, m in client.metrics)  # milliseconds


def test_the_package_of_a_tracker_stands_for_the_run_that_is_active() -> None:
    with packages() as doubles:
        for name, begins in (("mlflow", "mlflow.start_run()"), ("wandb", "wandb.init()")):
            with pytest.raises(ValueError, match=f"no active run here. Begin one before: {begins}"):
                tracker_of(doubles[name])
        doubles["mlflow"].active_run = lambda: MlflowRun("abc")
        doubles["wandb"].run = WandbRun()
        named = [tracker_of(doubles[name]) for name in ("mlflow", "wandb")]
    assert [one and one.name for one in named] == [
        "The MLflow run 'abc'",
        "The W&B run 'sunny-sky-1'",
    ]


def test_a_function_gets_each_pass() -> None:
    had: list[Any] = []
    tracker = tracker_of(had.append)
    passes = given(tracker, 0, 4)
    assert had == passes
    assert tracker is not None
    assert not tracker.takes_findings
    assert tracker_of(None) is None


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (3, "got builtins.int"),
        ("runs/here", "got builtins.str"),
        (SummaryWriter, "got the class SummaryWriter. Make one"),
        (dataclasses, "got the module dataclasses"),
        (object(), "got builtins.object"),
    ],
)
def test_what_is_no_tracker_is_refused_with_what_is_taken(to: Any, said: str) -> None:
    with pytest.raises(TypeError) as error:
        tracker_of(to)
    assert said in str(error.value)
    for kind in ("SummaryWriter", "add_scalar", "wandb.init", "aim.Run()", "mlflow", "function"):
        assert kind in str(error.value)


def test_no_package_of_a_tracker_is_imported() -> None:
    code = """
        import sys
        from nnx_inspector.trackers import aim_run, detection, mlflow_run, wandb_run, writer
        class Writer:
            def add_scalar(self, *args): pass
        detection.tracker_of(Writer()), detection.tracker_of(print)
        some = {"wandb", "aim", "mlflow", "tensorboardX", "tensorboard", "torch"} & set(sys.modules)
        assert not some, some
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
