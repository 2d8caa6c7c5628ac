"""The sweeps of an inspector: one at a time, on a copy of its model, shown while they run.

Invariant: the model is read once, at the beginning, and later changes do not reach the sweep; a
training that goes on meanwhile loses only processor time. `perturbations.sweep` measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from nnx_inspector.errors import error_text
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.job import Job, Show
from nnx_inspector.perturbations.activations import Perturbation
from nnx_inspector.perturbations.effects import Logits
from nnx_inspector.perturbations.sweep import sweep_call
from nnx_inspector.progress import Progress, Report, show_progress
from nnx_inspector.records.donated import retry_if_donated
from nnx_inspector.screen import protocol
from nnx_inspector.typing import Kwargs, Value

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("loss_change", "output_change", "kl", "top1_changed")


@dataclasses.dataclass(frozen=True)
class SweepRequest:
    """The request for a sweep.

    Attributes:
        call: returns the pass to perturb, with the present model.
        source: the name of that pass on screen.
        of_a_loss: whether the pass has a loss.
        perturbation: None for the default of `sweep`.
        layers, logits, chunk, units: as in `sweep`.
    """

    call: Callable[[], Call]
    source: str
    of_a_loss: bool
    only: Only
    perturbation: Perturbation | None
    layers: bool = True
    logits: Logits = None
    chunk: int | None = None
    units: int | None = None


class Sweeps:
    """Runs sweeps, one at a time."""

    def __init__(self, core: Core):
        self._core, self._show = core, core.view.publish
        self._job = Job(core, "nnx_inspector.sweep")
        self.wait, self.stop = self._job.wait, self._job.stop

    def request(self, only: Only, perturbation: Perturbation | None, *how: Value) -> SweepRequest:
        """The request for a sweep of the last pass; `how` is layers, logits, chunk and units."""
        core = self._core
        core.require_open()
        Selection(only).require_match(core.model)
        request = core.request
        source = f"{request.name.lower()}, at step {core.step}"
        return SweepRequest(
            core.call, source, request.loss_fn is not None, only, perturbation, *how
        )

    def run(self, request: SweepRequest, progress: Progress) -> pd.DataFrame:
        """Sweep in this thread; the screen shows it too.

        Raises:
            InspectorError: another sweep is running.
            Any error of `sweep`.
        """
        self._job.reserve()
        return self._run(request, progress)

    def queue(self, request: SweepRequest) -> None:
        """Sweep in a thread once no other study runs; an error is shown on screen."""
        self._job.queue(lambda: self._run(request, progress=False), self._show_of(request))

    def start(self, request: SweepRequest) -> None:
        """Sweep in a thread; an error is shown on screen."""
        self._job.reserve()
        self._job.start(lambda: self._run(request, progress=False), self._show_of(request))

    def _show_of(self, request: SweepRequest) -> Show:
        return lambda **said: self._show(_message(request, **said))

    def _run(self, request: SweepRequest, progress: Progress) -> pd.DataFrame:
        show = self._show_of(request)
        with self._job.running(show, error_text):
            call = retry_if_donated(lambda: request.call().copied(), "The model", self._core.model)
            with show_progress(progress, "sweep") as bar, call.configuration.applied():
                frame = _run_sweep(call, request, self._job.report_to(show, bar))
            self._show(_result_message(request, frame))
            return frame


def _run_sweep(call: Call, request: SweepRequest, report: Report) -> pd.DataFrame:
    function, args, kwargs = call.function()
    return sweep_call(
        function,
        args,
        kwargs,
        model=call.model,
        sites=request.only,
        perturbation=request.perturbation,
        layers=request.layers,
        logits=request.logits,
        chunk=request.chunk,
        progress=report,
        units=request.units,
        of_a_loss=request.of_a_loss,
        root=call.entry.site,
        where=call.entry.where,
    )


def _message(request: SweepRequest, kind: str = "", **more: object) -> protocol.Sweep:
    """The message; `kind` is the default that was used, "" while unknown."""
    one = request.perturbation
    default = f"nni.{kind}()" if kind else "the default"
    fields: Kwargs = dict(
        running=False, stopped=False, done=0, total=0, measures=(), loss=None, rows=(), measured=0,
        error="",
    )  # fmt: skip
    return protocol.Sweep(
        sites=request.only if isinstance(request.only, str) else "the chosen sites",
        perturbation=default if one is None else one.python() or one.kind_name,
        source=request.source,
        **{**fields, **more},
    )


def _result_message(request: SweepRequest, frame: Value) -> protocol.Sweep:
    frame, attrs = frame.drop_duplicates("site"), frame.attrs  # of units the one that matters most
    measures = tuple(m for m in MEASURES if m in frame and frame[m].notna().any())
    always = "loss_change" if request.of_a_loss else "output_change"
    if not measures or (request.of_a_loss and always not in measures):
        measures = (always, *measures)  # none of them is finite
    rows = [
        protocol.SweepRow(
            site=row["site"],
            why_not="" if not isinstance(row["why_not"], str) else row["why_not"],
            **{m: protocol.finite(row[m]) if m in measures else None for m in MEASURES},
        )
        for _, row in frame.head(protocol.MOST_RANKED).iterrows()
    ]
    unmeasured = len(attrs["unmeasured"])
    return _message(
        request,
        attrs["perturbation"],
        stopped=bool(attrs["stopped"]),
        done=len(frame),
        total=len(frame) + unmeasured,
        measures=measures,
        loss=protocol.finite(attrs["clean"].get("loss")),
        rows=tuple(rows),
        measured=len(frame),
    )
