"""Passes that nothing measures, in jax's own fast path.

Whether a pass is measured is decided in Python when its program is started. jax then looks for the
program in Python too, argument by argument: 2 ms for a model of 300 arrays, in each pass. While
none of the next passes is measured, a session's hook gets a `salt`: another key for jit's
caches, and what they hold under that key starts from C++, the user's own programs or perturbed ones
that always get the same numbers. After each of them its passes are counted. Invariant: whoever
opens or closes a hook finds those that were open before; one key stands for one perturbation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from nnx_inspector._compat.launching import programs
from nnx_inspector.hooks.hook import Hook, change_hooks, open_hooks, restore_hooks
from nnx_inspector.live.hook import WatchHook
from nnx_inspector.live.pass_boundaries import TopLevelCall
from nnx_inspector.live.pass_start import Reached

MOST_BYTES = 2**14
"""The most bytes of perturbations that are kept with a program: jax's caches may keep thousands."""

KnownCalls = tuple[tuple[TopLevelCall, ...], Reached]
"""The calls of a program, and what they reach."""

_known: dict[int, weakref.WeakKeyDictionary[object, KnownCalls]] = {}
"""Session number -> jitted function -> what each of its programs does. Sessions of one number share
their programs."""
_irregular: set[int] = set()
"""The numbers of the sessions that have a function whose programs differ in that."""
_keys: dict[bytes, int] = {}
_counter = itertools.count(1)
MOST_SPOILT_KEYS = 128
"""After this many spoilt keys a session's programs are always chosen in Python."""


def key_of(numbers: Sequence[np.ndarray] = ()) -> int:
    """The key of the programs that get these numbers, the user's own if there are none; 0 if they
    are too large to be kept.
    """
    if sum(x.nbytes for x in numbers) > MOST_BYTES:
        return 0
    content = hashlib.blake2b(digest_size=16)
    for x in numbers:
        content.update(x.tobytes())
    found = content.digest()
    return _keys[found] if found in _keys else _keys.setdefault(found, next(_counter))


class FastPath:
    """The passes of one session in one thread that jax starts without asking.

    Args:
        is_mine: whether a hook is the session's.
        passed: called with what a program has done that jax has started; returns whether the next
            one may be passed over too.

    Attributes:
        missed: the key under which jax has no program for the present call; 0 if it was not looked
            for there.
        number: the number of the session.
    """

    def __init__(self, is_mine: Callable[[Hook], bool], passed: Callable[[KnownCalls], bool]):
        self._is_mine, self._passed = is_mine, passed
        self._thread: int | None = None
        self._key = self._spoilt = 0
        self.missed = 0
        self.number = 0

    @property
    def known(self) -> set[tuple[TopLevelCall, ...]]:
        """The calls of the program of each known function."""
        return {calls for calls, _ in _known.get(self.number, {}).values()}

    def learn(
        self, function: object, calls: tuple[TopLevelCall, ...], reached: Reached = frozenset()
    ) -> None:
        """Note what a program of a function does."""
        known = _known.setdefault(self.number, weakref.WeakKeyDictionary())
        try:
            if known.setdefault(function, (calls, reached)) != (calls, reached):
                _irregular.add(self.number)
        except TypeError:  # it has no hash, or no weak references
            _irregular.add(self.number)

    def start(self, key: int) -> None:
        """Let jax start the next programs of this thread under a key, if it can."""
        # jit finds a compiled program in C++ by a key that holds the user contexts, and our hooks
        # are one of them. `salt` makes that key another one: at the first call under it jax asks
        # us, and the program that it gets then it starts from C++ ever after. Without this, each
        # step that is not measured would be chosen in Python. A user's own context in the key would
        # do too; this can go once jax tells of a launch where it dispatches in C++.
        hooks = open_hooks()
        regular = key and self.number not in _irregular
        if regular and hooks and all(map(self._is_mine, hooks)):
            self._thread, self._key = threading.get_ident(), key
            change_hooks(lambda hook: _with_key(hook, key), self._stopped)
            programs.call_after_fast_path(self._after)

    def is_for(self, key: int) -> bool:
        """Whether jax has missed the present call under this key, not 0, so that it may keep the
        program. Under another key it will never take its fast path for the call: that key is used
        no more.
        """
        if key and key == self.missed:
            return True
        if self.missed:
            self._retire_key()
        return False

    def _retire_key(self) -> None:
        for content in [content for content, key in _keys.items() if key == self.missed]:
            del _keys[content]
        self._spoilt += 1
        if self._spoilt > MOST_SPOILT_KEYS:  # a variant cannot be compiled, or each call is another
            _irregular.add(self.number)

    def stop(self) -> None:
        """Let each program be chosen again."""
        if self._thread == threading.get_ident():  # else that thread will stop after its program
            restore_hooks()

    def _stopped(self) -> None:
        self._thread = None
        programs.call_after_fast_path(None)

    def prepare(self) -> None:
        """Stop, and note under which key jax has missed a program."""
        self.missed = self._key if self._thread == threading.get_ident() else 0
        self.stop()

    def _after(self, function: object) -> None:
        try:
            found = _known.get(self.number, {}).get(function)
        except TypeError:
            return
        if found is not None and found[0] and not self._passed(found):
            self.stop()


def _with_key(hook: Hook, key: int) -> Hook:
    wrap = dataclasses.replace(cast(WatchHook, hook.wrap), salt=key)
    return dataclasses.replace(hook, wrap=wrap)
