"""jax's fast path for programs that speak with the host, and waiting for what a thread has started.

jax starts a program with an effect from Python, argument by argument, so that
`jax.effects_barrier` can wait for it: 10 ms for a model of 400 arrays, in every step. Here such a
program takes the fast path in C++ that all others take, and one of its results is kept until it is
there. Invariant: `wait` returns when all programs have ended that this thread started inside
`fast_path`, and those with an effect that it started elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api, config, pjit

from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.jit import is_tracer

_MANY = 16
_SMALL = 4096  # bytes that are copied in no time


class Latest:
    """The results of the program that a thread has started last."""

    def __init__(self) -> None:
        self.out: Any = None

    def ended(self) -> Callable[[], None] | None:
        """What returns when that program has ended, None if it has.

        It waits for one of the program's results, or for a copy if that is donated by then. The
        copy may be late: another program may be running already.
        """
        small = None
        for x in filter(is_awaited, _arrays(self.out)):
            small = x if small is None or x.nbytes < small.nbytes else small
            if small.nbytes <= _SMALL:
                break
        if small is None:
            return None
        those = [small]
        with contextlib.suppress(RuntimeError), ours():  # the device may have no room
            those.append(jax.device_put(small, small.sharding, may_alias=False))
        return functools.partial(wait_for, *those)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.latest: list[Latest] = []
        self.before: Any = None  # what jax would call after each program of this thread
        self.after: Callable[[Any], None] | None = None
        self.results: list[Any] = []

    def note(self, out: Any) -> None:
        """Keep a result of a program that has not ended, unless jax knows the result already."""
        if self.latest and not any(map(is_tracer, jax.tree.leaves(out))):  # not within a trace
            for one in self.latest:
                one.out = out
        if len(self.results) >= _MANY:
            self.results = [x for x in self.results if is_awaited(x)]
        self.results.extend(itertools.islice(filter(is_awaited, _arrays(out)), 1))


def _arrays(out: Any) -> Iterator[Any]:
    leaves = (x for x in jax.tree.leaves(out) if isinstance(x, jax.Array) and not is_tracer(x))
    return (getattr(x, "_base_array", x) for x in leaves)  # of a random key


def wait_for(*those: jax.Array) -> None:
    """Wait for the first of these that can be waited for.

    A result may have been donated, and if its program has failed, reading it raises the error.
    """
    for x in those:
        with contextlib.suppress(RuntimeError):
            x.block_until_ready()
            return


def is_awaited(x: Any) -> bool:
    """Whether an array's program has not ended; False for a deleted one.

    To ask jax 0.10 whether a deleted array is ready ends the process.
    """
    return not (x.is_deleted() or x.is_ready())


_thread = _Thread()
_lock = threading.Lock()
_open: list[Callable[[], None]] = []


@contextlib.contextmanager
def fast_path(effect: Any) -> Iterator[None]:
    """Inside, programs of this thread whose only effect is this one take the fast path."""
    with _lock:
        _open.append(_open[0] if _open else _swap(effect))
    _thread.depth += 1
    if _thread.depth == 1:
        _listen()
    try:
        yield
    finally:
        _thread.depth -= 1
        if _thread.depth == 0:
            api._post_hook_state.set_local(_thread.before)
        with _lock:
            undo = _open.pop()
            if not _open:
                undo()


@contextlib.contextmanager
def following(effect: Any) -> Iterator[Latest]:
    """Inside, as in `fast_path`, the program that this thread has started last is known."""
    latest = Latest()
    with fast_path(effect):
        _thread.latest.append(latest)
        try:
            yield latest
        finally:
            _thread.latest.remove(latest)  # the loops of a `zip` do not end their steps in turn


def wait() -> None:
    """Return when the programs that this thread has started have ended."""
    jax.effects_barrier()
    results, _thread.results = _thread.results, []
    for x in results:
        wait_for(x)  # one that was donated went to a program that is among these


def call_after(listener: Callable[[Any], None] | None) -> None:
    """Call `listener(function)` when jax has started a jitted function of this thread in its fast
    path, inside `fast_path`. It must not raise.
    """
    _thread.after = listener


def _swap(effect: Any) -> Callable[[], None]:
    original = pjit._get_fastpath_data
    checks: list[Any] = [config.debug_nans, config.debug_infs]
    hooks = [check._update_thread_local_hook for check in checks]

    def data(executable: Any, out_tree: Any, args: Any, out: Any, effects: Any, *rest: Any) -> Any:
        if _thread.depth:
            _thread.note(out)
            if set(effects) == {effect} and hasattr(executable, "unsafe_call"):
                call = copy.copy(executable.unsafe_call)
                call.has_unordered_effects = False
                executable = copy.copy(executable)
                executable._unsafe_call = call
        return original(executable, out_tree, args, out, effects, *rest)

    def entered(hook: Callable[[Any], None], value: Any) -> None:
        hook(value)  # which sets what jax calls after a program
        if _thread.depth:
            _listen()

    module: Any = pjit
    module._get_fastpath_data = data
    for check, hook in zip(checks, hooks, strict=True):
        check._update_thread_local_hook = functools.partial(entered, hook)

    def undo() -> None:
        module._get_fastpath_data = original
        for check, hook in zip(checks, hooks, strict=True):
            check._update_thread_local_hook = hook

    return undo


def _listen() -> None:
    """Note the results of programs that this thread starts."""
    _thread.before = api._post_hook_state.swap_local(_started)


def _started(fun: Any, args: Any, kwargs: Any, out: Any) -> None:
    _thread.note(out)
    if _thread.after is not None:
        _thread.after(getattr(fun, "__wrapped__", fun))
    state, check = api._post_hook_state, _thread.before
    if check is config.config_ext.unset:
        check = state.get_global()
    if check is not None:  # `jax_debug_nans`
        check(fun, args, kwargs, out)
