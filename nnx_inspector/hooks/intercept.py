"""`intercept_methods`, and how a context with a selection is opened, checked and closed.

Invariant: nothing is left on exit; a selection that matched nothing is an error, and a call that
could not be seen or attributed is a warning. Does not touch a class or decide any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator

from flax import nnx

from nnx_inspector.errors import InspectorWarning
from nnx_inspector.hooks.cache_key import IdentityKey
from nnx_inspector.hooks.dispatch import add_hooks, unseen_executables
from nnx_inspector.hooks.hook import INTERCEPTOR, TAP_OUTPUT, Context, Hook, Interceptor
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.hooks.sites import Only, Selection, no_match_text, site_keys
from nnx_inspector.typing import Args, Function, Kwargs, PyTree


@contextlib.contextmanager
def intercept_methods(
    interceptor: Interceptor, *, only: Only = None, model: nnx.Module | None = None
) -> Iterator[None]:
    """Run `interceptor` around every call of a public module method, as Linen's
    `nn.intercept_methods` does.

    `interceptor(next_fun, args, kwargs, context)` returns the result of the call, and
    `next_fun(*args, **kwargs)` makes the call. The interceptor may change the arguments or the
    result, skip the call, or make it twice. When contexts are nested, the one entered first is
    outermost. A function that was jitted before is traced again inside the context and uses its
    old program outside it. Under jit the interceptor runs once for each trace. The context applies
    to the current thread.

    Args:
        interceptor: the function described above; `context` is a `Context`.
        only: the sites to intercept: a glob over site keys (`"blocks/*/attn"`, `"**:encode"`), a
            module type, a predicate `(path, module) -> bool`, or a sequence of these. By default
            every public method except those of `nnx.Module` itself.
        model: the model whose calls are intercepted, and to which paths are relative. By default
            all calls are, and paths are relative to the outermost module called.

    Raises:
        TypeError: `interceptor` is not callable, or `model` is not an `nnx.Module`.
        ValueError: `only` matches no site of `model`, or without it of the modules called.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> def double(next_fun, args, kwargs, context):
        ...     return 2 * next_fun(*args, **kwargs)
        >>> with nni.intercept_methods(double, only="layers/0"):
        ...     y = model(jnp.ones((1, 2)))
    """
    if not callable(interceptor):
        raise TypeError(
            f"interceptor must be callable as (next_fun, args, kwargs, context), "
            f"got {type(interceptor).__name__}."
        )
    scope = None if model is None else scope_of(model)
    selection = None if only is None else Selection(only, default_methods="*")
    wrap = interceptor if _is_hashable(interceptor) else _UnhashableInterceptor(interceptor)
    hook = Hook(wrap, INTERCEPTOR, selection, scope)
    with open_hook(hook, model):
        yield


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


class _UnhashableInterceptor(IdentityKey):
    """An interceptor that cannot be hashed, compared by identity."""

    def __call__(self, next_fun: Function, args: Args, kwargs: Kwargs, context: Context) -> PyTree:
        return self.value(next_fun, args, kwargs, context)


@contextlib.contextmanager
def warn_of_unseen_calls(scope: Scope | None) -> Iterator[None]:
    """On leaving, warn about calls that were not attributed to the scope's model, or not seen at
    all.

    An exception that leaves the context replaces the warnings.
    """
    earlier = unseen_executables()
    yield
    executables = unseen_executables() - earlier
    if executables > 0:
        unseen_executables(reported=executables)
        warnings.warn(
            f"{executables} call{'s' * (executables > 1)} of executables that were compiled ahead "
            f"of time, before this context was entered, cannot be seen or changed inside. Call the "
            f"function itself, or compile it inside the context.",
            InspectorWarning,
            stacklevel=_user_stacklevel(),
        )
    if scope is not None:
        warn_of_doubtful_calls(scope, "Split inside the context, or leave out model=.")


def warn_of_doubtful_calls(scope: Scope, way_out: str) -> None:
    """Warn of calls that may be the model's but could not be attributed, and reset their count."""
    counts = dict(scope.doubtful)
    scope.doubtful.clear()
    if counts:
        calls = ", ".join(f"{count} of {name}" for name, count in counts.items())
        warnings.warn(
            f"Calls that may be the model's could not be attributed to it: {calls}. They go "
            f"through a graphdef split before the hooks (as in nnx.cached_partial), a clone of the "
            f"model, or a tree with other parameters (a teacher). {way_out}",
            InspectorWarning,
            stacklevel=_user_stacklevel(),
        )


def _user_stacklevel() -> int:
    """The `stacklevel` of the nearest caller outside this file and the standard library."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        level, frame = level + 1, frame.f_back
    return level


@contextlib.contextmanager
def open_hook(hook: Hook, model: nnx.Module | None) -> Iterator[None]:
    """Open one hook; raises ValueError if its selection matches no site, at once or on leaving."""
    if hook.only is None:
        with warn_of_unseen_calls(hook.scope), add_hooks(hook):
            yield
        return
    known = False
    if model is not None:
        hook.only.require_match(model)
        known = hook.only.matches_any(model)
    called: list[_CalledModel] = []
    remember = Hook(_FirstModel(hook.only, called), TAP_OUTPUT, None, hook.scope)
    with warn_of_unseen_calls(hook.scope), add_hooks(remember, hook):
        yield
    if hook.matched:
        _matched_hooks.add(hash(hook))  # later its calls may be in cached programs and go unseen
        return
    known = known or any(one.matches for one in called) or hash(hook) in _matched_hooks
    if called and not known:
        raise ValueError(no_match_text(hook.only, called[0].keys))


_matched_hooks: set[int] = set()
"""Hashes of hooks that once matched something; the selection of an equal hook is not a typo."""


@dataclasses.dataclass(frozen=True)
class _CalledModel:
    """A model that was called: its sites, and whether the selection matches one of them."""

    keys: list[str]
    matches: bool


@dataclasses.dataclass(frozen=True)
class _FirstModel:
    """Keeps the sites of the first model that is called, for the text of an error.

    The model itself is checked too, because calls inside a cached jitted function go unseen.
    """

    only: Selection
    called: list[_CalledModel] = dataclasses.field(compare=False)

    def __call__(self, next_fun: Function, args: Args, kwargs: Kwargs, context: Context) -> PyTree:
        if context.path == "" and not self.called:
            module = context.module
            self.called.append(_CalledModel(site_keys(module), self.only.matches_any(module)))
        return next_fun(*args, **kwargs)
