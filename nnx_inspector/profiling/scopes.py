"""The names of modules in the programs that jax compiles, as XProf and Perfetto show them.

While a call is traced its operations get a `jax.named_scope` with the path of the module. Names
travel with each operation through `grad`, `scan`, `remat` and `vmap` into the compiled program.
Invariant: a name is metadata, so it changes neither what a program computes nor how fast it is; a
name gives its path back (`path_in`). Measures nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

import jax
from flax import nnx

from nnx_inspector._compat.configuration import names_in_cache_key
from nnx_inspector._compat.launching.executables import record_executables
from nnx_inspector.hooks.dispatch import add_hooks
from nnx_inspector.hooks.hook import TAP_OUTPUT, Context, Hook
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.typing import Args, Function, Kwargs, PyTree

_ROOT: Final = "."
_ESCAPED: Final = str.maketrans({c: f"%{ord(c):02X}" for c in "%./;()[]\"'\\"})
_NAME: Final = re.compile(r"(?:^|(?<=[/(]))\[([^\[\]]+)\](?=[/)]|$)")


def scope_name(path: str) -> str:
    """The name of a module in a program: `"[blocks.0.attn]"`, of the model itself `"[.]"`.

    XProf divides names at `/`, so segments are joined by dots, and each name has the whole path.
    """
    segments = [one.translate(_ESCAPED) for one in path.split("/")]
    return f"[{'.'.join(segments) or _ROOT}]"


def path_in(name: str) -> str | None:
    """The path of the innermost module in the name of an operation, or None if it has none.

    Example:
        >>> path_in("jit(step)/transpose(jvp([.]))/[blocks.0]/[blocks.0.attn]/dot_general")
        'blocks/0/attn'
    """
    found = _NAME.findall(name.partition(";")[0])  # of operations that XLA has joined, the first
    if not found:
        return None
    if found[-1] == _ROOT:
        return ""
    segments = found[-1].split(".")
    return "/".join(re.sub("%(..)", lambda hit: chr(int(hit[1], 16)), one) for one in segments)


def _call_in_scope(next_fun: Function, args: Args, kwargs: Kwargs, context: Context) -> PyTree:
    """Name what a call computes after its module."""
    if context.path is None or context.kind not in ("method", "linen"):
        return next_fun(*args, **kwargs)
    with jax.named_scope(scope_name(context.path)):
        return next_fun(*args, **kwargs)


@contextlib.contextmanager
def open_named_scopes(scope: Scope) -> Iterator[None]:
    """Name the calls of a scope's modules in what this thread traces and compiles."""
    with (
        names_in_cache_key(),
        record_executables(),
        add_hooks(Hook(_call_in_scope, TAP_OUTPUT, None, scope)),
    ):
        yield


@contextlib.contextmanager
def named_scopes(model: nnx.Module) -> Iterator[None]:
    """Give operations the names of the modules that compute them, for XProf and Perfetto.

    Open it around the steps that you trace with `jax.profiler.trace`. A function that was jitted
    before is compiled once more inside, and from then on has this program whenever the context is
    open again; outside it has its old one. Nothing else changes, and nothing runs slower.

    Args:
        model: the model. Its own operations are named `[.]`, those of `blocks[0].attn`
            `[blocks.0.attn]`; the backward pass has `transpose(jvp([...]))`.

    Raises:
        TypeError: `model` is not an `nnx.Module`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> with nni.named_scopes(model):
        ...     text = jax.jit(model).lower(jnp.ones((1, 2))).compile().as_text()
        >>> "[layers.0]/dot_general" in text
        True
    """
    with open_named_scopes(scope_of(model, candidates=True)):
        yield
