"""The programs of a thread, taken where jax launches them, and run with more inputs and outputs.

jax launches a program in four ways: a jitted call, of which a loop or a condition outside every jit
is one; the `impl` of the jit primitive, for the two halves of `grad(jit(f))`; a remat outside every
jit, which jax would run equation by equation; and an executable that was compiled ahead of time.
The first three are taken. The last one, and a program that was exported, can only be reported.

Invariants: a program that nobody changes runs as it would have run, in the same caches. Programs of
other threads are untouched. An error of the user's program is raised as jax raises it. A program is
known here as long as jax knows it. How a program is changed, and for whom, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax._src import dispatch, pjit
from jax._src.ad_checkpoint import remat_p
from jax._src.api_util import InternalFloatingPointError

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import forbids_nan, internal_config, without_nan_checks
from nnx_inspector._compat.launching import jit_calls
from nnx_inspector._compat.launching.custom_rules import patch_custom_rules
from nnx_inspector._compat.launching.presence import patch_batching_rules
from nnx_inspector._compat.redirect import AddUndo, SharedPatch, patch
from nnx_inspector.errors import is_from_signal_handler
from nnx_inspector.typing import Array, Function, Jaxpr, Params, PyTree, Value


class EditedProgram(Protocol):
    """A program with more inputs and outputs.

    Attributes:
        program: takes more inputs, then its own; returns its own outputs, then more.
        inputs: how many more inputs.
        outputs: how many more outputs.
        is_compiled: whether it is compiled if it stands for one equation. If not, its equations run
            one after the other, and share what jax compiles for each with other programs.
    """

    @property
    def program(self) -> Value: ...

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def is_compiled(self) -> bool: ...


class Launch(Protocol):
    """What runs in place of a program, this time."""

    @property
    def edited(self) -> EditedProgram: ...

    def inputs(self) -> list[Value]:
        """The arrays that it takes in addition; the same in each process of a job."""
        ...

    def take(self, arrays: list[Value], /) -> None:
        """Gets what it returned in addition, which may not be there yet. Each process has all of
        it, and so has each device.
        """
        ...


Replacement = Callable[[], PyTree]
"""Returns a call's result, or `jit_calls.FastPathResult`, which jax's fast path may use again."""


class Chooser(Protocol):
    """Decides about the programs of a thread, within the user's step: it must not raise."""

    def prepare(self) -> None:
        """Called before a call is traced that jax does not handle in its fast path."""
        ...

    def choose(
        self,
        program: object,
        arrays: Sequence[object],
        /,
        *,
        alone: dict[str, Any] | None = None,
        call: jit_calls.PendingJitCall | None = None,
    ) -> Launch | Replacement | None:
        """What runs in place of a program that is about to be launched. None leaves the program to
        jax, which may then launch it in its fast path, without asking here again.

        `arrays`: its inputs; None for each that another chooser adds.
        `alone`: nobody launches the program, it stands for one equation on arrays outside programs,
        of which these are the parameters.
        `call`: the jitted call that it is the program of, if nobody else chooses: only then may it
        be what runs by itself in place of the call.

        A program is the same object each time, until jax forgets it. To keep what was made of it,
        use a dict with weak keys. An edited program must live as long as it may be chosen.
        """
        ...

    def holds(self, jaxpr: object, /) -> bool:
        """Whether a jaxpr, or one inside it, holds anything of interest."""
        ...

    def with_presence(self, jaxpr: Jaxpr, present: object, /) -> Value:
        """A jaxpr of the same kind with another input in front, this variable, a bool: whether what
        is of interest in it, also to other choosers, counts for an example. See `batched`.
        """
        ...

    def escaped(self, name: str, /) -> None:
        """Called when this thread launches a program that could not be taken, with its function's
        name. A program in jax's fast path is reported only the first time.
        """
        ...

    def failed(self, error: Exception, /) -> None:
        """Called when a chosen program could not be started, and the user's own has run."""
        ...


class _State:
    """What one thread has open. Another one may close it."""

    def __init__(self) -> None:
        self.takings: tuple[LaunchInterception, ...] = ()
        self.running: Any = None  # the program that we have started


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = _State()


_thread = _Thread()


class LaunchInterception:
    """While it is open, a chooser decides what the programs of this thread run.

    Of several the newest decides first, and the next one about what it has chosen.
    """

    def __init__(self, chooser: Chooser):
        self.chooser = chooser
        self._here: _State | None = None

    def open(self) -> None:
        self._here = here = _thread.here
        if not here.takings:
            here.running = None
        here.takings = (*here.takings, self)
        _launches_patch.acquire(self)

    def close(self) -> None:
        here = self._here
        if here is not None:  # another one may have been opened since, and stay
            here.takings = tuple(one for one in here.takings if one is not self)
            _launches_patch.release(self)


def _choosers() -> list[Chooser]:
    """Those of this thread, the newest first."""
    return [one.chooser for one in reversed(_thread.here.takings)]


def is_intercepted() -> bool:
    """Whether this thread's programs are chosen for."""
    here = _thread.here
    return bool(here.takings) and here.running is None


def run_equation(program: Jaxpr, arrays: Sequence[object], params: Params) -> list[Value] | None:
    """Run what is chosen in place of one equation on arrays: its own results, or None if nothing is
    chosen. Its program stands for all equations that differ from it in their `params` alone.
    """
    chosen = _choose(program, arrays, alone=params)
    if chosen is None:
        return None
    function = jaxprs.jaxpr_as_fun(*jaxprs.open_jaxpr(chosen.program))
    if not (jaxprs.open_jaxpr(chosen.program)[0].eqns and chosen.is_compiled):
        start = function
    elif chosen.program not in _jitted_equations:
        start = _jitted_equations[chosen.program] = jax.jit(function)
    else:
        start = _jitted_equations[chosen.program]

    def run(
        program: Jaxpr, inputs: Sequence[Array], outputs: int
    ) -> tuple[list[Value], list[Value]]:
        with internal_config():
            found = list(start(*inputs, *(_on_same_devices(arrays) if outputs else arrays)))
        count = len(found) - outputs
        return found[:count], found[count:]

    return _run(chosen, run, lambda: None, lambda *_: True)


def _on_same_devices(arrays: Sequence[object]) -> Sequence[Value]:
    """Arrays on the devices of the first of them, where a program can read them all."""
    bound = [x for x in arrays if isinstance(x, jax.Array) and x.committed]
    if all(x.sharding.device_set == bound[0].sharding.device_set for x in bound):
        return arrays
    (device, *_) = bound[0].sharding.device_set
    return jax.device_put(list(arrays), device)


_jitted_equations: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Program -> the function that runs it."""


# -------------------------------------------------------------------- choosing


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The edits of one program that is about to be launched, each made of the one before it, or
    what runs instead.
    """

    launches: tuple[Launch, ...]
    instead: Replacement | None = None

    @property
    def program(self) -> Jaxpr:
        return self.launches[-1].edited.program

    @property
    def outputs(self) -> int:
        return sum(one.edited.outputs for one in self.launches)

    @property
    def is_compiled(self) -> bool:
        return any(one.edited.is_compiled for one in self.launches)

    def inputs(self) -> list[Value]:
        # each edit puts its inputs in front of those of the program that it edited
        return [x for one in reversed(self.launches) for x in one.inputs()]


def _choose(
    program: object,
    arrays: Sequence[object],
    *,
    alone: Params | None = None,
    call: jit_calls.PendingJitCall | None = None,
) -> _Choice | None:
    """What this thread's choosers make of a program."""
    here = _thread.here
    if not here.takings or program is here.running:
        return None
    launches: list[Launch] = []
    changed, choosers = program, _choosers()
    for chooser in choosers:
        how: Params = {"alone": alone, "call": call if len(choosers) == 1 else None}
        one = chooser.choose(changed, arrays, **how)
        if callable(one):
            return _Choice((), one)
        if one is not None:
            launches.append(one)
            changed = one.edited.program
            arrays = [*(None,) * one.edited.inputs, *arrays]
    for name in _exported(program):
        _escaped(name)
    return _Choice(tuple(launches)) if launches else None


_exported_names: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _exported(jaxpr: object) -> tuple[str, ...]:
    """The names of the exported functions that a program calls: what is in them is compiled."""
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    if bare not in _exported_names:
        found: list[str] = []
        for one in bare.eqns:
            if one.primitive.name == "call_exported":
                found.append(one.params["exported"].fun_name)
            for inner in jaxprs.sub_jaxprs(one):
                found += _exported(inner)
        _exported_names[bare] = tuple(found)
    return _exported_names[bare]


# --------------------------------------------------------------------- running

Start = Callable[[Any, Sequence[Value], int], tuple[PyTree, list[Value]]]
"""Runs a program with more inputs, and splits off so many more outputs."""


def _run(
    chosen: _Choice,
    start: Start,
    own: Callable[[], PyTree],
    compiles: Callable[[Any, Sequence[Value], int], bool],
) -> PyTree:
    """The results of the user's program; what was chosen in addition takes its own.

    Args:
        own: runs the user's program as jax would.
        compiles: whether a program, with such inputs and so many more outputs, can be compiled.
    """
    inputs, here = chosen.inputs(), _thread.here
    before = here.running
    found: tuple[PyTree, list[Value]] | None = None
    failed: list[Exception] = []
    try:  # an interrupt may come at any line
        here.running = chosen.program
        with without_nan_checks():
            found = start(chosen.program, inputs, chosen.outputs)
    except Exception as error:  # the user's, or ours: their own program tells
        can = functools.partial(compiles, chosen.program, inputs, chosen.outputs)
        if is_from_signal_handler(error) or _has_started(error, can):
            raise
        failed.append(error)
    finally:
        here.running = before
    if found is None:  # not within the `except`, or their own error would name ours as its context
        out = own()
        for chooser in _choosers():
            chooser.failed(failed[0])
        return out
    out, more = found
    for one in chosen.launches:
        one.take(more[: one.edited.outputs])
        more = more[one.edited.outputs :]
    return own() if forbids_nan() and not _passes_nan_checks(out) else out


def _passes_nan_checks(out: object) -> bool:
    """Whether results have no NaN or Inf that the user forbids.

    jax looks at the results of each program, and runs that one again, equation by equation, whose
    results have one. What we measure may be NaN on purpose: so we look ourselves, at the user's
    results only, and leave the rest to jax, which knows the function. This can go once jax lets a
    caller choose which results it checks.
    """
    try:
        for x in jax.tree.leaves(out):
            if isinstance(x, jax.Array):
                dispatch.check_special("", [part.data for part in x.addressable_shards])
    except InternalFloatingPointError:
        return False
    return True


def _has_started(error: Exception, compiles: Callable[[], bool]) -> bool:
    """Whether a program had begun when an error was raised, so that it must not run once more.

    jax raises this type where XLA compiles a program and where it runs; everything else comes from
    Python code, before that.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and compiles()


def _choose_jitted(call: jit_calls.PendingJitCall, /) -> Callable[[], PyTree] | None:
    bare: Any = jaxprs.open_jaxpr(call.program)[0]
    if bare.is_high:
        return None  # jax binds it, and makes one of arrays of it for `impl`
    chosen = _choose(call.program, call.arrays, call=call)
    if chosen is None or chosen.instead is not None:
        return None if chosen is None else chosen.instead

    def own() -> Value:
        return call.run_own().result[0]  # the rest is for the fast path, which would not ask again

    return functools.partial(_run, chosen, call.run, own, call.compiles)


def _run_impl(
    program: Jaxpr, params: Params, args: Sequence[object], own: Callable[[], PyTree]
) -> PyTree:
    chosen = _choose(program, args)
    if chosen is None:
        return own()
    call = jit_calls.PendingProgram(params, args)
    return _run(chosen, call.run, own, call.compiles)


def _jit_impl(impl: Function) -> Function:
    def launched(*args: object, **params: Value) -> Value:
        own = functools.partial(impl, *args, **params)
        return _run_impl(params["jaxpr"], params, args, own)

    return launched


def _remat_impl(impl: Function) -> Function:
    def launched(*args: object, **params: object) -> Value:
        own = functools.partial(impl, *args, **params)
        if not any(one.holds(params["jaxpr"]) for one in _choosers()):
            return own()
        # jax has a jitted function for each primitive with parameters, which runs it by itself
        traced: Any = dispatch.xla_primitive_callable(remat_p, **params).trace(*args)
        return _run_impl(traced.jaxpr, traced._params, args, own)

    return launched


# -------------------------------------------------------------------- patches


def _patch_launches(add_undo: AddUndo) -> None:
    # A jitted call: see `jit_calls`. A scan, a while and a cond outside every jit are one, because
    # jax runs a primitive on arrays by a jitted function of its own.
    jit_calls.patch_jit_misses(choose=_choose_jitted, prepare=_prepare, add_undo=add_undo)

    # `grad(jit(f))` and `vmap(jit(f))` bind the jit primitive, on arrays, under a transformation.
    # That calls its `impl`, which starts the program without the functions of a jitted call.
    # Without this a step that is differentiated outside jit would not be seen. The rest of this
    # file needs the `impl` of before, which runs a program in jax's fast path. It can go when jax
    # runs such programs as it runs a jitted call.
    patch(pjit.jit_p, "impl", _jit_impl(pjit.jit_p.impl), add_undo)

    # A remat on arrays is run equation by equation. There a mark reports what it sees at once, and
    # does not know that it is in the second pass of a backward pass, in which jax computes anew
    # what was seen already. As one program it can be edited, which tells the two passes apart.
    # Without this, activations inside would count twice. It can go when jax compiles such a remat.
    patch(remat_p, "impl", _remat_impl(remat_p.impl), add_undo)

    # An executable that was compiled ahead of time has no jaxpr any more. Without this nobody would
    # know that it ran.
    called = lambda executable: _escaped(jit_calls.executable_name(executable))  # noqa: E731
    jit_calls.patch_executables(lambda _: None, called, add_undo)
    patch_batching_rules(_presence, add_undo)
    patch_custom_rules(add_undo)


def _prepare() -> None:
    for one in _choosers():
        one.prepare()


def _escaped(name: str) -> None:
    for one in _choosers():
        one.escaped(name)


def _presence(jaxpr: Jaxpr, present: object) -> Value:
    interested = next((one for one in _choosers() if one.holds(jaxpr)), None)
    return None if interested is None else interested.with_presence(jaxpr, present)


_launches_patch = SharedPatch(_patch_launches)
