"""Which tracker an object of the user's is, by its class or its methods.

Imports no package of a tracker that is not there already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Final

from nnx_inspector.recordings.passes import Pass
from nnx_inspector.trackers.aim_run import AimRun
from nnx_inspector.trackers.mlflow_run import MlflowRun
from nnx_inspector.trackers.scalars import Entry
from nnx_inspector.trackers.summary_writer import SummaryWriter
from nnx_inspector.trackers.tracker import Tracker
from nnx_inspector.trackers.wandb_run import WandbRun

ACCEPTED: Final = (
    "a SummaryWriter (an object with add_scalar, of tensorboardX or torch.utils.tensorboard), a "
    "W&B run (what wandb.init returns), an Aim run (aim.Run()), an MLflow run (what "
    "mlflow.start_run returns, or mlflow itself while a run is active), or a function of a pass"
)


class FunctionTracker(Tracker):
    """Calls a function of the user's with each pass, and writes nothing else."""

    takes_findings = False

    def __init__(self, f: Callable[[Pass], object]):
        super().__init__(f"The function {getattr(f, '__name__', repr(f))}")
        self._f = f

    def write_pass(self, item: Pass, cost: float | None) -> None:
        self._f(item)

    def log(self, entry: Entry) -> None:
        pass


def tracker_of(to: object) -> Tracker | None:
    """The tracker that the user has given as `to`; None for None.

    Raises:
        TypeError: it is none that is taken, or a class of one.
        ValueError: it is MLflow or wandb, and no run of it is active.
    """
    if to is None:
        return None
    if inspect.isclass(to):
        raise TypeError(f"to takes an object, got the class {to.__name__}. Make one: {ACCEPTED}.")
    if isinstance(to, ModuleType):
        to = _active_run(to)
    packages = {kind.__module__.partition(".")[0] for kind in type(to).__mro__}
    if "wandb" in packages and callable(getattr(to, "define_metric", None)):
        return WandbRun(to)
    if "aim" in packages and callable(getattr(to, "track", None)):
        return AimRun(to)
    run_id = getattr(getattr(to, "info", None), "run_id", None)
    if "mlflow" in packages and isinstance(run_id, str):
        return MlflowRun(run_id)
    if callable(getattr(to, "add_scalar", None)):
        return SummaryWriter(to)
    if callable(to):
        return FunctionTracker(to)
    raise TypeError(f"to takes {ACCEPTED}; got {type(to).__module__}.{type(to).__qualname__}.")


def _active_run(module: ModuleType) -> object:
    """The run of a tracker's package that is active in this thread."""
    begins = {"mlflow": "mlflow.start_run()", "wandb": "wandb.init()"}
    if module.__name__ not in begins:
        raise TypeError(f"to takes {ACCEPTED}; got the module {module.__name__}.")
    run = module.active_run() if module.__name__ == "mlflow" else module.run
    if run is None:
        raise ValueError(
            f"{module.__name__} has no active run here. Begin one before: "
            f"{begins[module.__name__]}."
        )
    return run
