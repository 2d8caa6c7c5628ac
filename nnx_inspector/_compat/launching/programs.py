"""What a thread has started: the results of its latest program, and errors that were kept for it.

Invariants: no program is waited for unless somebody asks, and no interrupt leaves a function of
ours in jax.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api, config, pjit

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.redirect import AddUndo, SharedPatch, patch
from nnx_inspector.errors import is_from_signal_handler
from nnx_inspector.typing import Value

_SMALL_BYTES = 4096  # bytes that are copied in no time


class LatestResults:
    """The results of the program that a thread has started last."""

    def __init__(self) -> None:
        self.out: Any = None

    def waiter(self) -> Callable[[], None] | None:
        """What returns when that program has ended, None if it has.

        It waits for one of the program's results, or for a copy if that is donated by then. The
        copy may be late: another program may be running already.
        """
        small = None
        for x in filter(is_pending, _arrays(self.out)):
            small = x if small is None or x.nbytes < small.nbytes else small
            if small.nbytes <= _SMALL_BYTES:
                break
        if small is None:
            return None
        those = [small]
        with contextlib.suppress(RuntimeError), internal_config():  # the device may have no room
            those.append(jax.device_put(small, small.sharding, may_alias=False))
        return functools.partial(wait_for, *those)


class _State:
    """What one thread has open. Another one may close it, as the collector closes a generator."""

    def __init__(self) -> None:
        self.following: tuple[ProgramListener, ...] = ()
        self.before: Any = None  # what jax would call after each program of this thread
        self.after: Callable[[Value], None] | None = None
        self.keeping: tuple[SignalErrors, ...] = ()
        self.error: BaseException | None = None

    def note(self, out: object) -> None:
        """Keep the results of a program that was started last."""
        latest = [one.latest for one in self.following if one.latest is not None]
        if latest and not any(map(is_tracer, jax.tree.leaves(out))):  # not within a trace
            for one in latest:
                one.out = out


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = _State()


def _arrays(out: object) -> Iterator[Any]:
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


def is_pending(x: Value) -> bool:
    """Whether an array's program has not ended; False for a deleted one.

    To ask jax 0.10 whether a deleted array is ready ends the process.
    """
    return not (x.is_deleted() or x.is_ready())


_thread = _Thread()


class ProgramListener:
    """While it is open, jax tells of each program of this thread, also of one in its fast path.

    Attributes:
        latest: if it was wanted, the results of the program that this thread has started last.
    """

    def __init__(self, *, latest: bool = False):
        self._here: _State | None = None
        self.latest = LatestResults() if latest else None

    def open(self) -> None:
        self._here = here = _thread.here
        here.following = (*here.following, self)
        _started_patch.acquire(self)
        _install_hook()

    def close(self) -> None:
        here = self._here
        if here is not None:
            # the loops of a `zip` do not end their steps in turn
            here.following = tuple(one for one in here.following if one is not self)
            if here is _thread.here and not here.following:
                _remove_hook()  # another thread will do that after its next program
            _started_patch.release(self)


class SignalErrors:
    """While it is open, what a signal's handler raises in this thread is kept, where Python would
    only print it: the handler runs before the first line of a function, and if XLA, the collector
    or a finalizer calls that, nothing can catch what it raises. See `keep_error`.
    """

    def __init__(self) -> None:
        self._here: _State | None = None

    def open(self) -> None:
        self._here = here = _thread.here
        here.keeping = (*here.keeping, self)
        _unraisable_patch.acquire(self)

    def close(self) -> None:
        if self._here is not None:
            self._here.keeping = tuple(one for one in self._here.keeping if one is not self)
            _unraisable_patch.release(self)


def call_after_fast_path(listener: Callable[[Value], None] | None) -> None:
    """Call `listener(function)` when jax has started a jitted function of this thread in its fast
    path, while a `ProgramListener` is open. It must not raise.
    """
    _thread.here.after = listener


def keep_error(error: BaseException) -> None:
    """Keep an error that a signal's handler has raised where it can go no further: in code that
    XLA calls. This thread's next program raises it, or the next `raise_kept_error`.
    """
    _thread.here.error = error


def raise_kept_error() -> None:
    """Raise what `keep_error` was given in this thread, if there is something."""
    here = _thread.here
    if here.error is not None:
        error, here.error = here.error, None
        raise error


def _patch_started(add_undo: AddUndo) -> None:
    # jax calls its hook after a program only where it starts that in C++. A program that it starts
    # in Python, as at the first call and whenever it calls the host, passes this function, which
    # decides whether C++ may start it the next time. Without this its results would not be known.
    # It can go when jax calls the hook there too.
    original = pjit._get_fastpath_data

    def data(executable: object, out_tree: object, args: object, out: object, *rest: Value) -> Any:
        _thread.here.note(out)
        return original(executable, out_tree, args, out, *rest)

    patch(pjit, "_get_fastpath_data", data, add_undo)
    checks: list[Value] = [config.debug_nans, config.debug_infs]
    for check in checks:
        after = _reinstall_after(check._update_thread_local_hook)
        patch(check, "_update_thread_local_hook", after, add_undo)


def _reinstall_after(hook: Callable[[Value], None]) -> Callable[[Value], None]:
    """Listen again when a user's setting has changed what jax calls after a program."""

    def entered(value: bool | None) -> None:
        hook(value)
        if _thread.here.following:
            _install_hook()

    return entered


def _patch_unraisable(add_undo: AddUndo) -> None:
    # Ctrl-C may come while XLA or the collector calls Python code. Python prints such an error and
    # goes on: the loop would not stop. There is one hook for the process; it passes on what is not
    # ours.
    otherwise = sys.unraisablehook

    def hook(one: Value) -> None:
        error = one.exc_value
        theirs = isinstance(error, KeyboardInterrupt) or is_from_signal_handler(error)
        if theirs and _thread.here.keeping:
            keep_error(error)
        else:
            otherwise(one)

    patch(sys, "unraisablehook", hook, add_undo)


_started_patch, _unraisable_patch = SharedPatch(_patch_started), SharedPatch(_patch_unraisable)
on_foreign_close: list[Callable[[], None]] = []
"""Called in a thread, after its next program, when another thread has closed its last one."""


def _install_hook() -> None:
    """Note the results of programs that this thread starts."""
    # jax keeps one function for each thread that it calls after a program, also from C++. It is
    # there for `jax_debug_nans`; ours calls that one too. Without it, a program in jax's fast path
    # could not be counted, and a loop would wait for nothing and run ahead of its figures. It can
    # go when jax has a listener for programs.
    before = api._post_hook_state.get_local()
    if before is not _after_program:
        _thread.here.before = before
        api._post_hook_state.set_local(_after_program)


def _remove_hook() -> None:
    if api._post_hook_state.get_local() is _after_program:
        api._post_hook_state.set_local(_thread.here.before)


def _after_program(fun: object, args: object, kwargs: object, out: object) -> None:
    here = _thread.here
    if not here.following:  # another thread has closed the last one
        _remove_hook()
        for settle in on_foreign_close:
            settle()
    here.note(out)
    if here.after is not None:
        here.after(getattr(fun, "__wrapped__", fun))
    state, check = api._post_hook_state, here.before
    if check is config.config_ext.unset:
        check = state.get_global()
    if check is not None:  # `jax_debug_nans`
        check(fun, args, kwargs, out)
    raise_kept_error()
