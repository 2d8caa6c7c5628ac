"""Reads a model whose arrays a training step may donate, and so delete, at the same time.

Between the call of such a step and its return, the Variables refer to deleted arrays. Invariant: a
read returns the complete state of one moment, or an error says why it cannot. Weak references to
a model's arrays distinguish its states, and keep no array alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.processes import spans_processes
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import variables_by_path
from nnx_inspector.program.stage import StagedCall
from nnx_inspector.program.structure import describe
from nnx_inspector.typing import PyTree, Value

T = TypeVar("T")
MAX_READS = 5


def retry_if_donated(read: Callable[[], T], what: str, of: object = ()) -> T:
    """The result of `read`, which is called again if an array of the model is deleted during the
    call.

    Args:
        read: reads the model, and raises jax's own error at a deleted array.
        what: names what is being read in the error: "The parameters".
        of: the model, or several by their paths, whose deleted arrays the error names.

    Raises:
        InspectorError: an array was deleted in each of `MAX_READS` calls.
    """
    last: Exception | None = None
    for _ in range(MAX_READS):
        try:
            return read()
        except (RuntimeError, ValueError) as error:
            if not _is_deletion_error(error):
                raise
            last = error
    raise InspectorError(donated_text(what, _deleted_variables(of))) from last


def donated_text(what: str, gone: Sequence[str] = ()) -> str:
    """The error text for arrays that a training step has donated.

    Args:
        what: begins the text: "The parameters".
        gone: the names of the arrays, as far as they are known.
    """
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    named = f" ({gone[0]!r}{more})" if gone else ""
    return (
        f"{what} cannot be read now: a training step has taken the model's arrays{named}, because "
        f"it donates them. If the step still runs, ask again when it has ended; if it returned a "
        f"new state, pass that: insp.update(state), or write it back: nnx.update(model, state). A "
        f"copy shares the model's arrays, and loses them too: copy it beforehand with "
        f"nnx.clone(model, arrays=True)."
    )


def is_deleted(x: object) -> bool:
    """Whether a value is an array that was deleted."""
    return isinstance(x, jax.Array) and not jit.is_tracer(x) and x.is_deleted()


def _deleted_variables(of: PyTree) -> list[str]:
    roots = {(): of} if isinstance(of, nnx.Module) else dict(of)
    return [
        site_key(path)
        for path, variable in variables_by_path(roots)
        if any(map(is_deleted, jax.tree.leaves(variable.get_raw_value())))
    ]


def raise_if_deleted(arrays: Iterable[Value]) -> None:
    """Raise as jax would if an array is deleted, before a program is run on it."""
    for x in filter(is_deleted, arrays):
        raise RuntimeError(f"Array has been deleted with shape={x.dtype}{list(x.shape)}.")


def require_not_deleted(arrays: Iterable[object], what: str, of: object = ()) -> None:
    """Raise if an array is deleted, before it is read; for `what` and `of` see `retry_if_donated`.

    Raises:
        InspectorError: an array was deleted.
    """
    arrays = list(arrays)
    retry_if_donated(lambda: raise_if_deleted(arrays), what, of)


def require_one_process(arrays: object, what: str) -> None:
    """Raise if an array lies partly in other processes, before a program is run in this one alone.

    Raises:
        InspectorError: other processes have a part.
    """
    if spans_processes(arrays):
        raise InspectorError(several_processes_text(what))


def several_processes_text(what: str) -> str:
    """The error text for arrays of a job of several processes; `what` as in `donated_text`."""
    return (
        f"{what} cannot be read by one process alone: the arrays are spread over the "
        f"{jax.process_count()} processes of this job, and a program that reads them waits until "
        f"all run it. Call insp.run(...) or insp.step(...) at the same line in every process, or "
        f"watch the loop in every process."
    )


def require_staged(stage: StagedCall) -> None:
    """Raise if an array of the modules or the arguments of a call is deleted, before it runs.

    Raises:
        InspectorError: an array was deleted.
    """
    require_not_deleted(
        stage.inputs[: len(stage.inputs) - len(stage.arrays)], "The model", stage.roots
    )
    for number, x in enumerate(stage.arrays):
        if is_deleted(x):
            raise InspectorError(
                f"Array {number + 1} of the arguments, {describe(x)}, cannot be read: a step has "
                f"taken it, because it donates its arguments. Pass another, or a copy that was "
                f"made before the step: x.copy()."
            )


def _is_deletion_error(error: Exception) -> bool:
    return any(words in str(error) for words in ("been deleted", "deleted or donated"))


WeakArrays = tuple[weakref.ref[jax.Array], ...]
"""Weak references to the arrays of a model at one moment."""


def weak_arrays(leaves: Iterable[object]) -> WeakArrays:
    return tuple(weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array))


def are_alive(held: WeakArrays) -> bool:
    """Whether all of these arrays are alive; a model that was updated has released some.

    It is also True for an updated model if other code still holds the old arrays.
    """
    arrays = [reference() for reference in held]
    return all(array is not None and not array.is_deleted() for array in arrays)


def are_same_arrays(held: WeakArrays, leaves: Iterable[object]) -> bool:
    """Whether a model with these leaves has these arrays and no others."""
    now = weak_arrays(leaves)
    same = len(held) == len(now)
    return same and all(a() is b() is not None for a, b in zip(held, now, strict=True))
