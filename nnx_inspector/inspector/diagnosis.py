"""Diagnoses a run while it goes on, in a thread, and sends the findings to the screen.

Invariant: recording a pass never waits for the rules, the last pass that arrives meanwhile is
diagnosed too, and the screen receives only changes. Has no rules of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Iterable

from nnx_inspector.background import Worker, weak_method
from nnx_inspector.errors import InspectorError, error_text
from nnx_inspector.findings.findings import Finding, Findings, diagnose
from nnx_inspector.findings.nonfinite import BUT, USUALLY, finite_sites
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.cost.compilations import recompilation_finding
from nnx_inspector.inspector.loops import Loops
from nnx_inspector.program.analysis.operation import Operation
from nnx_inspector.program.stage import StagedCall
from nnx_inspector.recordings.tree_rows import leaf_of
from nnx_inspector.records.first_nan import first_nan_of_stage
from nnx_inspector.records.nan_search import candidates
from nnx_inspector.screen.frames import findings_message

REST_FACTOR, LONGEST_REST = 19, 5.0
"""The pause after a diagnosis, in multiples of its time, and its most seconds: rules must not slow
training down, and one slow search must not hide what comes after it."""
MOST_OPERATIONS = 4
"""How many operations a finding lists."""
GUARD_ADVICE = (
    "keep what this operation receives where it is defined: an epsilon, jnp.clip, or a jnp.where "
    "on its argument"
)
INDEX_ADVICE = (
    "correct the ids (negative ones count from the end), or make what they select from larger"
)
"""What to do about an operation that is known."""
VALUES_GONE = "the values of that step are gone"


class Diagnosis:
    """Applies the rules to each newly shown pass."""

    def __init__(self, core: Core, loops: Loops):
        self._core, self._loops = core, loops
        self._lock = threading.Lock()
        self._waiting = False
        self._resumes_at = 0.0
        self._sent = findings_message(())
        self._operations: dict[tuple[float, str], tuple[str, str]] = {}
        self._worker = Worker("nnx_inspector.diagnosis", weak_method(self._failed))
        self.wait = self._worker.wait
        core.view.on_presented = weak_method(self._presented)
        core.current_findings = weak_method(self._findings_of_rules)
        core.metrics.on_nonfinite = weak_method(self._metric_is_nonfinite)
        core.closing.callback(self._worker.close)

    def findings(self) -> Findings:
        """The present findings, worst first."""
        self._loops.record_arrived()
        return self._with_compilations(map(self._with_operation, diagnose(self._core.recording)))

    def _findings_of_rules(self) -> Findings:
        return self._with_compilations(diagnose(self._core.recording))

    def _with_compilations(self, rest: Iterable[Finding]) -> Findings:
        core, found = self._core, [*rest]
        again = recompilation_finding(core.meter.compilations.all(), core.step + (not core.looping))
        errors = sum(one.severity == "error" and one.gone is None for one in found)
        return Findings(found if again is None else [*found[:errors], again, *found[errors:]])

    def _with_operation(self, finding: Finding) -> Finding:
        """A finding of a NaN, with the operation that makes it, or those that may have made it.

        What is usual is then left out, because more is known.
        """
        core, of = self._core, (finding.evidence.get("pass", -1), finding.site)
        perturbed, known = finding.evidence.get("perturbed", 0), "embeddings" in finding.evidence
        if finding.rule != "nonfinite" or not finding.evidence.get("nan") or perturbed:
            return finding
        if of not in self._operations and not (core.looping or core.closed):
            try:
                operation = first_nan_in(core)
                sought = True
            except InspectorError:  # it runs eagerly, or a training step has taken the arrays
                operation, sought = None, False
            last = core.recording.passes[-1]
            again = last.number == of[0] and last.kind in ("run", "step")
            how = "" if again else ", in the last requested pass,"
            made = f"; the first NaN{how} is made by {operation.in_words()}" if operation else ""
            if not made and again and sought:  # a parameter has it, or XLA's fused program alone
                made = "; run one by one, no operation of the call makes a NaN from finite values"
            if operation:
                self._operations[of] = made, INDEX_ADVICE if operation.length else GUARD_ADVICE
            else:
                more = "" if made or known else self._possible_operations(finding)
                self._operations[of] = made, more
        made, more = self._operations.get(of, ("", ""))
        advice, (usual, but, rest) = finding.advice, finding.advice.partition(BUT)
        derivative = more == GUARD_ADVICE and "backward" in finding.evidence
        if more and (usual.startswith(USUALLY) or derivative):
            advice = more + but + rest
        elif more.startswith(VALUES_GONE):
            advice = f"{advice}. {more[0].upper()}{more[1:]}"
        return dataclasses.replace(finding, what=finding.what + made, advice=advice)

    def _possible_operations(self, finding: Finding) -> str:
        """The operations that may have made a NaN whose values are gone, as after a loop's step."""
        call, backward = self._core.call(), bool(finding.evidence.get("backward"))
        passes = self._core.recording.passes
        item = next((p for p in passes if p.number == finding.evidence["pass"]), None)
        finite = finite_sites(item) if item is not None else frozenset[str]()
        read = functools.partial(_candidates, site=finding.site, backward=backward, finite=finite)
        found = [one.in_words() for one in self._core.programs.read(call, read)]
        if backward and call.loss_fn is None:
            found.append("one of the loss")
        if not found:
            return ""
        more = [f"{len(found) - MOST_OPERATIONS} more"] if len(found) > MOST_OPERATIONS else []
        can = (
            "after this site can have such a derivative"
            if backward
            else "between the last finite outputs and this one can make it"
        )
        return (
            f"{VALUES_GONE}; these operations {can}: "
            f"{'; '.join([*found[:MOST_OPERATIONS], *more])}. "
            f"nni.first_nan(loss_fn, gradients=True)(model, batch) tells which one did, given the "
            f"model as it was before that step; if it returns None, the update of that step made "
            f"it (nni.watch(..., optimizer=))"
        )

    def _presented(self, forced: bool) -> None:
        self.start(now=forced)

    def _metric_is_nonfinite(self) -> None:
        if self._core.view.display_requested or self._core.view.is_visible:
            self.start()

    def _failed(self, error: Exception) -> None:
        text = f"The diagnosis failed: {error_text(error)}"
        self._core.notice("warning", text)

    def start(self, *, now: bool = True) -> None:
        """Diagnose in the thread; during a pause only if `now`."""
        with self._lock:
            if self._waiting or not (now or time.monotonic() >= self._resumes_at):
                return
            self._waiting = self._worker.submit(weak_method(self._diagnose))

    def _diagnose(self) -> None:
        with self._lock:
            self._waiting = False  # passes from here on need another diagnosis
        began = time.monotonic()
        message = findings_message(self.findings())
        took = time.monotonic() - began
        self._resumes_at = began + took + min(REST_FACTOR * took, LONGEST_REST)
        if message != self._sent:
            self._sent = message
            self._core.view.publish(message)


def _candidates(
    stage: StagedCall, *, site: str, backward: bool, finite: frozenset[str]
) -> list[Operation]:
    return candidates(stage.survey.jaxpr, leaf_of(site)[0], backward=backward, finite=finite)


def first_nan_in(core: Core) -> Operation | None:
    core.require_one_process("The operations of the last requested pass")
    call = core.call()

    def search(stage: StagedCall) -> Operation | None:
        function, args, _ = call.in_modes.function()
        return first_nan_of_stage(stage, function, args, gradients=call.loss_fn is not None)

    return core.programs.read(call, search)
