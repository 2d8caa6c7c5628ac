"""The state of optimizers: their moments, counts and scales, when a measured pass begins.

What an optimizer holds is read where the user keeps it, so it is the same for `nnx.Optimizer`, a
state of optax that the loop carries, and an optimizer written by hand. Its arrays are summarised in
one program of their own, beside the user's. Invariant: nothing is copied and no array is kept, and
a state whose arrays cannot be read is left out, with the reason. Changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.hook import replace_hooks
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import contents, is_node
from nnx_inspector.live.inbox import Message, PassData
from nnx_inspector.live.programs.launches import WatchedSession, log_errors
from nnx_inspector.recordings.tree_rows import OPTIMIZER, STATE
from nnx_inspector.stats.summarize import is_number, summarize, type_text
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Value

_Path = tuple[Value, ...]
MOST_ARRAYS: Final = 1024
"""Of more arrays the first ones are measured."""
_WRAPPERS: Final = {"inner_state", "inner_states", "inner_opt_state", "opt_state"}
"""What the states of optax call the states within them: no part of a name, if names differ so."""
NO_STATE: Final = (
    "optimizer= takes an nnx.Optimizer, or a function that returns the state which your loop "
    "carries, as in optimizer=lambda: opt_state; of several optimizers a dict of these by name."
)


class OptimizerStates:
    """The states of a loop's optimizers.

    Args:
        given: what the user passed: an `nnx.Optimizer`, any object of NNX that holds Variables, a
            function that returns a pytree of arrays, or a dict of these by name.
        model: the model, whose own Variables are no state.

    Attributes:
        skipped: why arrays were left out, by their keys.

    Raises:
        TypeError: `given` is none of these.
        InspectorError: it is an object that holds no Variable of its own, such as the model.
    """

    def __init__(self, given: Value, model: nnx.Module):
        several = isinstance(given, Mapping) and not isinstance(given, nnx.State)
        self._of: dict[str, Value] = dict(given) if several else {"": given}
        for name, one in self._of.items():
            _require_rereadable(name, one)
        self._parameters = {tuple(map(str, path)) for path, _, _ in contents(model)}
        self._own = frozenset(id(variable) for _, variable, _ in contents(model))
        self._names: dict[tuple[_Path, ...], list[str]] = {}
        self._last: tuple[list[weakref.ref[jax.Array]], Message] | None = None
        self.skipped: dict[str, str] = {}
        for name, one in self._of.items():
            _require_optimizer(name, one, self._own)

    def arrays(self) -> dict[str, jax.Array]:
        """Key -> each array of the states as they are now: `"optimizer/mu/head/kernel"`."""
        found: list[tuple[_Path, Value]] = []
        for name, one in self._of.items():
            head = (name,) if name else ()
            found += [((*head, *path), x) for path, x in _arrays_of(one, self._own)]
        found = [(path, x) for path, x in found if isinstance(x, jax.Array) and is_number(x.dtype)]
        paths = tuple(path for path, _ in found)
        if paths not in self._names:
            self._names = {paths: self._keys_of(paths)}
        every = zip(self._names[paths], (x for _, x in found), strict=True)
        return dict(list(every)[:MOST_ARRAYS])

    def message(self) -> Message | None:
        """The summaries of the arrays as they are now, None if none can be read."""
        found = self.arrays()
        why = {key: _unreadable(x) for key, x in found.items()}
        self.skipped |= {key: text for key, text in why.items() if text}
        found = {key: x for key, x in found.items() if not why[key]}
        if not found:
            return None
        same, message = self._last or ([], None)
        pairs = zip(same, found.values(), strict=False)
        if len(same) == len(found) and all(reference() is x for reference, x in pairs):
            # another pass of the same program
            return message
        message = _message(tuple(found), list(found.values()))
        self._last = [weakref.ref(x) for x in found.values()], message
        return message

    def _keys_of(self, paths: Sequence[_Path]) -> list[str]:
        """The keys of paths: what optax wraps around a state is left out, as far as keys differ."""
        short = [self._short_path(path) for path in paths]
        count = Counter(short)
        whole = [x if count[x] == 1 else path for x, path in zip(short, paths, strict=True)]
        return [site_key((OPTIMIZER, *map(str, path))) for path in whole]

    def _short_path(self, path: _Path) -> _Path:
        """What the state calls it, then the path of a parameter, or the last part."""
        every = range(len(path))
        at = next(
            (i for i in every if tuple(map(str, path[i:])) in self._parameters), len(path) - 1
        )
        names = (one for one in path[:at] if not isinstance(one, int) and one not in _WRAPPERS)
        return (*names, *path[at:])


def measure_states(session: WatchedSession, given: object) -> dict[str, str]:
    """Measure the state of these optimizers, none for None, when a measured pass begins.

    Returns:
        The dtype and shape of each array, by its key.
    """
    session.inbox.begins = lambda number: None
    if given is None:
        return {}
    of, states = weakref.ref(session), OptimizerStates(given, session.model)

    def begins(number: int) -> None:
        here = of()
        if here is None:
            return
        with log_errors(here, "reading the optimizer: "):
            message = states.message()
            if message is not None:
                here.inbox.receive(number, message, STATE)
            here.unseen |= states.skipped

    session.inbox.begins = begins
    return {key: type_text(x.dtype, x.shape) for key, x in states.arrays().items()}


def _require_rereadable(name: str, one: object) -> None:
    """Raise unless a state can be read again in each pass: a loop replaces arrays, and tuples."""
    if not isinstance(one, nnx.Pytree) and not callable(one):
        of = f" of {name!r}" if name else ""
        raise TypeError(
            f"{NO_STATE} It got {type(one).__name__}{of}, which your loop replaces in each step."
        )


def _require_optimizer(name: str, one: object, own: frozenset[int]) -> None:
    """Raise if an object is no optimizer. One of plain gradient descent has an empty state."""
    known = hasattr(one, "opt_state") or not isinstance(one, nnx.Pytree)
    if not known and not any(True for _ in _arrays_of(one, own)):
        of = f" of {name!r}" if name else ""
        raise InspectorError(
            f"{NO_STATE} It got {type(one).__name__}{of}, which holds no Variable of its own."
        )


def _arrays_of(one: Value, own: frozenset[int]) -> Iterator[tuple[_Path, Value]]:
    if not isinstance(one, nnx.Pytree):
        one = one()
    held = getattr(one, "opt_state", one)
    if isinstance(held, nnx.Pytree) and not isinstance(held, nnx.State):
        for path, variable, value in contents(held):
            if id(variable) not in own:
                yield path, value
        return
    for path, x in jax.tree_util.tree_flatten_with_path(held, is_leaf=is_node)[0]:
        if id(x) not in own:
            value = x.get_raw_value() if isinstance(x, nnx.Variable) else x
            yield tuple(map(plain_key, path)), value


def _unreadable(x: jax.Array) -> str:
    if jit.is_tracer(x):
        return "the optimizer's state is a value of a program that is being traced"
    if x.is_deleted():
        return "the program was given the optimizer's arrays for good before they could be read"
    if not x.is_fully_addressable:
        return "of the optimizer's state only what lies in this process can be read"
    return ""


def _read(keys: tuple[str, ...], found: list[Summary], sent: PassData) -> None:
    for key, one in zip(keys, jax.device_get(found), strict=True):
        sent.arrived[key, STATE].append(one)


@internal_config()
def _message(keys: tuple[str, ...], arrays: list[jax.Array]) -> Message:
    with replace_hooks(()):  # it is no program of the user's
        found = _measured(arrays)
    return Message(functools.partial(_read, keys, found), jax.tree.leaves(found))


@jax.jit
def _measured(arrays: list[jax.Array]) -> list[Summary]:
    return [summarize(x.astype(jnp.int32) if x.dtype == bool else x) for x in arrays]
