"""Watching somebody else's step: summaries leave a program that we do not own by host callbacks.

A session has one hook. While it is open, every selected site's output is perturbed as the
session's board says, reduced to a summary where it is computed, and sent to the host; what sits
at the trace level of the outermost call goes in one message. The cotangent follows by a tap.
Invariant: a callback never raises (its errors are counted), and the hook of a session is always
the same, so its programs compile once. Does not know steps, widgets or recordings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector import _private, board
from nnx_inspector.dispatch import executables_called, hooked
from nnx_inspector.layers import TAP_OUTPUT, Context, Layer, without
from nnx_inspector.perturbation import OFF, ROW, apply_tree
from nnx_inspector.scope import Scope, scope_of
from nnx_inspector.sites import Only, Selection, methods, module_sites, site_key
from nnx_inspector.summarize import summarize
from nnx_inspector.summary import Summary, merge
from nnx_inspector.taps import is_observable, is_whole
from nnx_inspector.trees import mapped

_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

OUTPUT, GRADIENT = "output", "gradient"


class Session:
    """What one model's watched passes have sent and not yet been asked for.

    Args:
        model: the model that is watched; its structure is read again by `refresh`.
        only: which sites.
        gradients: whether cotangents are measured.
        besides: sites that only a call reveals (a sown value, a Linen submodule) and that may be
            perturbed; others of these are measured too.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        only: Only = None,
        gradients: bool = True,
        besides: Sequence[str] = (),
    ):
        self.number = next(_numbers)
        self.model = model
        self.selection = Selection(only)
        self.selection.require_match(model)
        self.gradients = gradients
        self.besides = tuple(besides)
        self.keys: list[str] = []
        self.errors: list[str] = []
        self.unattributed: dict[str, int] = {}
        self.executables = 0
        self.unseen: dict[str, str] = {}
        self._lock = threading.Lock()
        self._arrived: dict[tuple[str, str], list[Summary]] = {}
        self._rows: dict[str, tuple[float, float]] = {}
        _sessions[self.number] = self
        weakref.finalize(self, board.forget, self._token())
        self.refresh()

    def refresh(self) -> None:
        """Read the model's modules again (one may have been added or removed)."""
        self._scope = scope_of(self.model)
        # sorted: an NNX transform reorders the attributes of the objects that it updates
        keys = sorted(
            {
                *self.besides,
                *(
                    site_key(site.path, name)
                    for site in module_sites(self.model)
                    for name in methods(type(site.module))
                    if self.selection.matches(site.path, name, site.module)
                ),
            }
        )
        if keys != self.keys:
            self.keys = keys
            self._publish()

    def perturb(self, rows: dict[str, tuple[float, float]]) -> None:
        """Set what is done at each site from the next execution on; waits for running ones."""
        self._rows = dict(rows)
        self._publish()

    def _publish(self) -> None:
        numbers = np.zeros((len(self.keys), ROW), np.float32)
        for index, key in enumerate(self.keys):
            numbers[index] = self._rows.get(key, (OFF, 0.0))
        board.publish(self._token(), numbers)

    def _token(self) -> Any:
        return ("watch", self.number)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch every pass that this thread makes inside."""
        scope = self._scope
        executables_called()
        hook = _Watch(self.number, tuple(self.keys), self.gradients)
        try:
            with hooked(Layer(hook, TAP_OUTPUT, self.selection, scope)):
                yield
        finally:
            _level.__init__()
            self._note(scope)
            self.executables += executables_called()

    def _note(self, scope: Scope) -> None:
        for name, count in scope.unattributed.items():
            self.unattributed[name] = self.unattributed.get(name, 0) + count
        scope.unattributed.clear()
        scope.doubtful.clear()  # the same calls: whoever shows `unattributed` tells of them

    def receive(self, key: str, quantity: str, summary: Summary) -> None:
        """Called on any thread when a summary arrives."""
        with self._lock:
            self._arrived.setdefault((key, quantity), []).append(summary)

    def take(self) -> dict[str, dict[str, Summary]]:
        """What has arrived since the last `take`: site -> quantity -> summary over all calls.

        Waits until programs that were started have finished.
        """
        jax.effects_barrier()
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        out: dict[str, dict[str, Summary]] = {}
        for key in dict.fromkeys([*self.keys, *(key for key, _ in arrived)]):
            outputs = arrived.get((key, OUTPUT), [])
            gradients = arrived.get((key, GRADIENT), [])
            if gradients and len(outputs) == 2 * len(gradients):
                outputs = _without_recomputation(outputs)
            for quantity, parts in ((OUTPUT, outputs), (GRADIENT, gradients)):
                if parts:
                    out.setdefault(key, {})[quantity] = merge(parts)
        return out

    def close(self) -> None:
        """Forget the board; programs that are still compiled with the hook send to nobody."""
        _sessions.pop(self.number, None)
        board.retire(self._token())


def _without_recomputation(parts: Sequence[Summary]) -> list[Summary]:
    """One of each pair of equal summaries, if all come in pairs: remat computes a value twice."""
    kept: dict[bytes, list[Summary]] = {}
    for part in parts:
        content = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(part))
        kept.setdefault(content, []).append(part)
    if any(len(same) % 2 for same in kept.values()):
        return list(parts)
    return [part for same in kept.values() for part in same[: len(same) // 2]]


# ----------------------------------------------------------------- the hook


class _Level(threading.local):
    """What this thread's current outermost watched call has gathered."""

    def __init__(self) -> None:
        self.depth = 0
        self.trace: Any = None
        self.gathered: list[tuple[str, Any]] = []
        self.reads: dict[Any, Any] = {}


_level = _Level()


@dataclasses.dataclass(frozen=True)
class _Watch:
    """The hook of a session. Only names and numbers, so that equal hooks share programs."""

    session: int
    keys: tuple[str, ...]
    gradients: bool

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        key = context.site
        assert key is not None
        if _level.depth == 0:
            _level.__init__()
            _level.trace = _private.trace_state()
        _level.depth += 1
        try:
            out = next_fun(*args, **kwargs)
        except BaseException:
            _level.depth -= 1
            if _level.depth == 0:
                _level.__init__()  # what was gathered belongs to a trace that is gone
            raise
        try:
            return self._observed(out, key)
        finally:
            _level.depth -= 1
            if _level.depth == 0:
                gathered = _level.gathered
                _level.__init__()
                _send(self.session, gathered)

    def _observed(self, out: Any, key: str) -> Any:
        if key in self.keys:
            shape = (len(self.keys), ROW)
            rows = board.read(("watch", self.session), shape, _level.reads)
            out = apply_tree(out, rows[self.keys.index(key)])
        if _private.inside_while_loop():
            found = _sessions.get(self.session)
            if found is not None:
                found.unseen[key] = (
                    "it is called inside a while loop, where a watched program cannot send from "
                    "without disturbing its differentiation; insp.run and nni.capture can see it"
                )
            return out
        return mapped(functools.partial(self._leaf, key), out, is_whole)

    def _leaf(self, key: str, leaf: Any) -> Any:
        if not is_observable(leaf):
            return leaf
        summary = _reduced(jax.lax.stop_gradient(jnp.asarray(leaf)))
        if _private.trace_state() == _level.trace:
            _level.gathered.append((key, summary))
        else:
            _send(self.session, [(key, summary)])
        if (
            self.gradients
            and isinstance(leaf, jax.Array)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            return _watched.bind(leaf, session=self.session, site=key)
        return leaf


@jax.custom_batching.custom_vmap
def _reduced(x: Any) -> Any:
    return summarize(x)


@_reduced.def_vmap
def _reduced_batch(axis_size: int, in_batched: Any, x: Any) -> tuple[Any, Any]:
    summary = _reduced(x)  # the batch is part of what is summarised
    return summary, jax.tree.map(lambda _: False, summary)


def unwatched() -> AbstractContextManager[None]:
    """No session sees (or perturbs) what is called inside: it is no pass of the watched loop."""
    return without(lambda layer: isinstance(layer.wrap, _Watch))


def _send(session: int, gathered: list[tuple[str, Any]], quantity: str = OUTPUT) -> None:
    if gathered:
        keys = tuple(key for key, _ in gathered)
        receive = functools.partial(_receive, session, keys, quantity)
        jax.debug.callback(receive, *(summary for _, summary in gathered))


def _receive(session: int, keys: tuple[str, ...], quantity: str, *summaries: Any) -> None:
    """The host side. Must not raise: that would rise in the user's training step."""
    found = _sessions.get(session)
    if found is None:
        return
    try:
        for key, one in zip(keys, summaries, strict=True):
            found.receive(key, quantity, jax.tree.map(np.asarray, one))
    except Exception as error:  # noqa: BLE001 - counted and shown instead
        found.errors.append(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- cotangents

_watched = Primitive("nnx_inspector_watch")
_watched.def_impl(lambda x, **_: x)
_watched.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_watched, lambda ctx, x, **_: [x])
_watched_linear = Primitive("nnx_inspector_watch_linear")
_watched_linear.def_impl(lambda t, **_: t)
_watched_linear.def_abstract_eval(lambda t, **_: t)
mlir.register_lowering(_watched_linear, lambda ctx, t, **_: [t])


def _watched_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    out = _watched.bind(x, **params)
    if type(t) is ad.Zero:
        return out, t
    return out, _watched_linear.bind(t, **params)


def _watched_linear_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    out = _watched_linear.bind(x, **params)
    return out, t if type(t) is ad.Zero else _watched_linear.bind(t, **params)


def _watched_transpose(ct: Any, t: Any, *, session: int, site: str) -> Any:
    if type(ct) is ad.Zero:
        return (ct,)
    _send(session, [(site, _reduced(jax.lax.stop_gradient(ct)))], GRADIENT)
    return (ct,)


for _primitive in (_watched, _watched_linear):
    batching.primitive_batchers[_primitive] = lambda xs, dims, _p=_primitive, **params: (
        _p.bind(*xs, **params),
        dims[0],
    )
ad.primitive_jvps[_watched] = _watched_jvp
ad.primitive_jvps[_watched_linear] = _watched_linear_jvp
ad.primitive_transposes[_watched_linear] = _watched_transpose
