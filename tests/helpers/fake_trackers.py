"""Doubles of trackers, with the signatures of the real ones; they keep what they are given.

`tests/trackers/test_real_trackers.py` gives the same to the real packages.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SummaryWriter:
    """As tensorboardX 2.6 and torch.utils.tensorboard 2.x have it."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.histograms: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: Any = None
    ) -> None:
        assert global_step is not None
        self.scalars.setdefault(tag, []).append((global_step, scalar_value))

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: list[float],
        bucket_counts: list[int],
        global_step: int | None = None,
        walltime: Any = None,
    ) -> None:
        if len(bucket_limits) != len(bucket_counts):
            raise ValueError("len(bucket_limits) != len(bucket_counts), see the document.")
        assert global_step is not None
        given = dict(min=min, max=max, num=num, sum=sum, sum_squares=sum_squares)
        given |= dict(limits=bucket_limits, counts=bucket_counts)
        self.histograms.setdefault(tag, []).append((global_step, given))

    def add_text(
        self, tag: str, text_string: str, global_step: int | None = None, walltime: Any = None
    ) -> None:
        assert global_step is not None
        self.texts.append((tag, text_string, global_step))

    def flush(self) -> None:
        self.flushed += 1


class _WandbHistogram:
    def __init__(self, sequence: Any = None, np_histogram: Any = None, num_bins: int = 64):
        counts, edges = np_histogram
        self.histogram, self.bins = counts.tolist(), edges.tolist()
        if len(self.histogram) + 1 != len(self.bins):
            raise ValueError("len(bins) must be len(histogram) + 1")


class WandbRun:
    """As wandb 0.31 has it: what is logged for a step before the present one is lost."""

    name = "sunny-sky-1"

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.lost: list[dict[str, Any]] = []
        self.defined: dict[str, str | None] = {}
        self._step = 0

    @property
    def step(self) -> int:
        return self._step

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        if step is not None and step < self._step:
            self.lost.append(data)
            return
        self._step = self._step if step is None else step
        self.rows.setdefault(self._step, {}).update(data)
        self._step += (step is None and commit is None) or bool(commit)

    def define_metric(
        self,
        name: str,
        step_metric: str | None = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        overwrite: bool | None = None,
    ) -> None:
        self.defined[name] = step_metric


class _Distribution:
    def __init__(
        self, samples: Any = None, bin_count: int = 64, *, hist: Any = None, bin_range: Any = None
    ):
        self.hist, self.bin_range = list(hist), tuple(bin_range)


class _AimText:
    def __init__(self, text: str):
        self.data = text


class AimRun:
    """As aim 3.29 has it."""

    hash = "a1b2c3"

    def __init__(self) -> None:
        self.tracked: list[tuple[Any, str, int, dict[str, str]]] = []

    def track(
        self,
        value: Any,
        name: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        *,
        context: dict[str, str] | None = None,
    ) -> None:
        assert name is not None
        assert step is not None
        self.tracked.append((value, name, step, context or {}))


@dataclasses.dataclass(frozen=True)
class _Metric:
    key: str
    value: float
    timestamp: int
    step: int


class MlflowClient:
    """As mlflow 3.17 has it; all clients share what they were given."""

    metrics: list[tuple[str, _Metric]]
    texts: list[tuple[str, str, str]]

    def log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: Any = 0
    ) -> None:
        assert 0 < len(metrics) <= 1000
        self.metrics.extend((run_id, one) for one in metrics)

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.texts.append((run_id, text, artifact_file))


class MlflowRun:
    """What `mlflow.start_run` returns."""

    def __init__(self, run_id: str):
        self.info = types.SimpleNamespace(run_id=run_id)


WandbRun.__module__ = "wandb.sdk.wandb_run"
AimRun.__module__ = "aim.sdk.run"
MlflowRun.__module__ = "mlflow.tracking.fluent"


@contextmanager
def packages() -> Iterator[dict[str, Any]]:
    """Replace the packages, installed or not, by doubles."""
    wandb, aim, mlflow = (types.ModuleType(name) for name in ("wandb", "aim", "mlflow"))
    wandb.Histogram, wandb.run = _WandbHistogram, None  # type: ignore[attr-defined]
    aim.Distribution, aim.Text = _Distribution, _AimText  # type: ignore[attr-defined]
    mlflow.entities = types.SimpleNamespace(Metric=_Metric)  # type: ignore[attr-defined]
    mlflow.active_run = lambda: None  # type: ignore[attr-defined]
    mlflow.MlflowClient = type("MlflowClient", (MlflowClient,), {"metrics": [], "texts": []})  # type: ignore[attr-defined]
    doubles = {"wandb": wandb, "aim": aim, "mlflow": mlflow}
    before = {name: sys.modules.get(name) for name in doubles}
    sys.modules.update(doubles)
    try:
        yield doubles
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
