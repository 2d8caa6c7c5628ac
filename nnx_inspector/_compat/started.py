"""jax's fast path for programs that speak with the host, and waiting for what a thread has started.

jax starts a program with an effect from Python, argument by argument, so that
`jax.effects_barrier` can wait for it: 10 ms for a model of 400 arrays, in every step. Here such a
program takes the fast path in C++ that all others take, and one of its results is kept until it is
there. Invariant: `wait` returns when all programs have ended that this thread started inside
`fast_path`, and those with an effect that it started elsewhere.

It uses private parts of jax; `tests/_compat` fails clearly if a new version moves them.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api, pjit

from nnx_inspector._compat.jit import is_tracer

_MANY = 16


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.lost = False
        self.results: list[Any] = []

    def note(self, out: Any) -> None:
        """Keep a result of a program."""
        if len(self.results) >= _MANY:
            self.results = [x for x in self.results if not (x.is_deleted() or x.is_ready())]
        for leaf in jax.tree.leaves(out):
            if isinstance(leaf, jax.Array) and not is_tracer(leaf):
                self.results.append(leaf)
                return


_thread = _Thread()
_lock = threading.Lock()
_open: list[Callable[[], None]] = []


@contextlib.contextmanager
def fast_path(effect: Any) -> Iterator[None]:
    """Inside, programs of this thread whose only effect is this one take the fast path."""
    outermost = _thread.depth == 0
    _thread.depth += 1
    with _lock:
        _open.append(_open[0] if _open else _swap(effect))
    stop = _listen() if outermost else lambda: None
    try:
        yield
    finally:
        stop()
        _thread.depth -= 1
        with _lock:
            undo = _open.pop()
            if not _open:
                undo()


def wait() -> None:
    """Return when the programs that this thread has started have ended."""
    jax.effects_barrier()
    results, _thread.results = _thread.results, []
    if _thread.lost:
        results, _thread.lost = jax.live_arrays(), False
    for x in results:
        # A result may have been donated to a later program, which is noted too. If its program
        # has failed, the error is for whoever reads the result.
        with contextlib.suppress(RuntimeError):
            x.block_until_ready()


def _swap(effect: Any) -> Callable[[], None]:
    original = pjit._get_fastpath_data

    def data(executable: Any, out_tree: Any, args: Any, out: Any, effects: Any, *rest: Any) -> Any:
        if _thread.depth:
            _thread.note(out)
            if set(effects) == {effect} and hasattr(executable, "unsafe_call"):
                call = copy.copy(executable.unsafe_call)
                call.has_unordered_effects = False
                executable = copy.copy(executable)
                executable._unsafe_call = call
        return original(executable, out_tree, args, out, effects, *rest)

    module: Any = pjit
    module._get_fastpath_data = data

    def undo() -> None:
        module._get_fastpath_data = original

    return undo


def _listen() -> Callable[[], None]:
    """Note the results of programs that this thread starts; returns an undo function."""
    state = api._post_hook_state
    others = state.value  # of `jax_debug_nans`

    def started(fun: Any, args: Any, kwargs: Any, out: Any) -> None:
        _thread.note(out)
        if others is not None:
            others(fun, args, kwargs, out)

    before = state.swap_local(started)

    def stop() -> None:
        if state.get_local() is started:
            state.set_local(before)
        else:  # `jax.debug_nans` was entered or left meanwhile, which puts its own function here
            _thread.lost = True

    return stop
