"""The layers that mark a program's calls for `trace`, and the history of the pass beside it.

Invariant: what a mark carries depends on the call alone, so functions that jax traced before may
be used again. The history is what is left of a pass that raises: it has no program to read.
Changes neither arguments nor results, and of an exception only its notes.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from nnx_inspector import _private, linen
from nnx_inspector.arrays import is_array
from nnx_inspector.changes import mark_changes
from nnx_inspector.layers import Context
from nnx_inspector.taps import BEGIN, INPUT, OUTPUT, is_whole, mark_arguments, mark_tree
from nnx_inspector.variables import Contents, contents
from nnx_inspector.walk import CallSite, Modules, TracedCall
from nnx_inspector.wording import in_words, value_in_words


class History:
    """The calls of one pass as their Python code ran, with what is known without the program.

    Attributes:
        calls: in the order in which they began.
    """

    def __init__(self, modules: Modules):
        self.calls: list[TracedCall] = []
        self._modules = modules
        self._open: list[int] = []
        self._error: BaseException | None = None

    def restart(self) -> None:
        """Forget the calls: the pass begins anew."""
        self.calls, self._open, self._error = [], [], None

    def begin(self, call: CallSite) -> None:
        parent = self._open[-1] if self._open else None
        self.calls.append(self._modules.begin(call, "", len(self._open), parent))
        self._open.append(len(self.calls) - 1)  # not before: where the stack ends, that raises

    def receive(self, text: str) -> None:
        """What the innermost call receives, in words."""
        self._replace(inputs=text)

    def end(self, output: Any, text: str) -> None:
        """The innermost call returns."""
        leaves = jax.tree.leaves(output, is_leaf=is_whole)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        self.calls[self._open[-1]] = self.calls[self._open[-1]].returning(text, arrays)
        self._open.pop()

    def fail(self, error: Exception) -> bool:
        """The innermost call raises; whether it is the first that this exception goes through."""
        first = error is not self._error
        if first:
            self._replace(error=error_in_words(error))
        self._error = error
        self._open.pop()
        return first

    def _replace(self, **fields: Any) -> None:
        number = self._open[-1]
        self.calls[number] = dataclasses.replace(self.calls[number], **fields)

    def close(self) -> None:
        """Let go of the model and the exception: jit caches keep layers, and layers this."""
        self._modules, self._error = Modules({}), None


def error_in_words(error: BaseException) -> str:
    """`"ValueError: the text"`, as Python's own traceback prints it."""
    return traceback.format_exception_only(error)[0].strip()


@dataclasses.dataclass(frozen=True)
class MarkCalls:
    """Marks where a call begins, the Variables that it changes, and what it returns."""

    owner: Any
    history: History = dataclasses.field(compare=False, repr=False)

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        module, site, kind = context.module, context.site or "", context.type_name
        before = contents(module if context.kind == "method" else None)
        source, inner = _private.source_of_caller()
        shapes = linen.parameter_shapes(module) if context.kind == "linen" else _shapes(before)
        first = next(iter(shapes), None)
        call = CallSite(site, context.path or "", kind, source, first)
        self.history.begin(call)
        # an inner function's trace may be used again elsewhere: there its equation knows the line
        call = dataclasses.replace(call, source="" if inner else source)
        params = {"owner": self.owner, "site": site, "call": call}
        try:
            args, kwargs = mark_arguments(args, kwargs, part=BEGIN, **params)
            out = next_fun(*args, **kwargs)
        except Exception as error:
            if self.history.fail(error):
                error.add_note(
                    f"nnx_inspector: raised in the call of {site or '(root)'!r} ({kind}) with "
                    f"inputs {in_words(args, kwargs)}."
                )
            raise
        if context.kind == "method":
            out = mark_changes(out, before, module, **params)
        text = value_in_words(out)
        self.history.end(out, text)
        return mark_tree(out, part=OUTPUT, text=text, **params)


@dataclasses.dataclass(frozen=True)
class MarkInputs:
    """Marks what a method receives, after interceptors."""

    owner: Any
    history: History = dataclasses.field(compare=False, repr=False)

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        site, text = context.site or "", in_words(args, kwargs)
        self.history.receive(text)
        call = CallSite(site, context.path or "", context.type_name, "", None)
        args, kwargs = mark_arguments(
            args, kwargs, owner=self.owner, site=site, part=INPUT, text=text, call=call
        )
        return next_fun(*args, **kwargs)


def _shapes(held: Contents) -> Iterator[tuple[int, ...]]:
    """The shapes of a module's parameters, one by one."""
    for variable, value in held.variables.values():
        if isinstance(variable, nnx.Param):
            for leaf in jax.tree.leaves(value):
                if is_array(leaf):
                    yield tuple(leaf.shape)
