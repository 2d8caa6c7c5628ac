"""The entry to an inspected model: a call of the model, of one of its methods, or of a function.

An entry holds no model, so a copy, a view or another model of the same structure is entered in the
same way. Invariant: the call has the arguments that the user wrote, each in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from flax import nnx

from nnx_inspector.arrays import own_attribute, shape_of
from nnx_inspector.errors import add_note
from nnx_inspector.hooks.sites import (
    CALL,
    Only,
    iter_modules,
    require_arguments,
    require_module,
    site_key,
)
from nnx_inspector.hooks.variables import is_node
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.program.function import ModuleFunction, function_name, module_function, roots_of
from nnx_inspector.typing import Args, Kwargs, PyTree, Value

_ARRAY_NAMES: dict[type, str] = {
    nnx.Linear: "kernel",
    nnx.Conv: "kernel",
    nnx.ConvTranspose: "kernel",
    nnx.Embed: "embedding",
    nnx.BatchNorm: "scale",
    nnx.LayerNorm: "scale",
    nnx.RMSNorm: "scale",
    nnx.GroupNorm: "scale",
}
"""Layer class -> the name of an array whose number of axes the class determines."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a model is called.

    Attributes:
        method: the name of the model's method; ignored if there is a function.
        f: a function of the model, or None.
        place: the position or name of the model among the arguments of `f`.
        where: which positions of a call of the model count.
    """

    method: str = CALL
    f: Callable[..., PyTree] | None = None
    place: int | str = 0
    where: Where | None = None

    def call(
        self, model: nnx.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[ModuleFunction, Args, Kwargs]:
        if self.f is None:
            if self.method == CALL:
                return ModuleFunction(model, model), tuple(args), {**kwargs}
            bound = getattr(model, self.method)
            return ModuleFunction(bound, model, self.method), tuple(args), {**kwargs}
        if isinstance(self.place, str):
            return ModuleFunction(self.f), tuple(args), {**kwargs, self.place: model}
        before, after = args[: self.place], args[self.place :]
        return ModuleFunction(self.f), (*before, model, *after), {**kwargs}

    @property
    def site(self) -> str:
        """The key of the site whose output is the model's output, if the entry is a method."""
        return site_key((), self.method)

    def selecting(self, only: Only) -> Only:
        """The selection of sites to show; by default it includes the entered method."""
        return (None, self.site) if only is None and self.method != CALL else only


def entry_of(
    f: Value, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Entry, nnx.Module, Args, Kwargs]:
    """The entry of the user's call `f(*args, **kwargs)`, its model, and the other arguments.

    Raises:
        TypeError: `f` is not a module, a method of one or a function of one; it cannot be called
            with these arguments; or they hold the model in a container.
    """
    if not isinstance(f, nnx.Module) and not _may_be_a_function(f):
        require_module(f)
    function = module_function(f, "Inspector")
    require_arguments(f, tuple(args), kwargs)
    if function.owner is not None:
        return Entry(function.method or CALL), function.owner, tuple(args), {**kwargs}
    for place, argument in enumerate(args):
        if isinstance(argument, nnx.Module):
            return (
                Entry(f=f, place=place),
                argument,
                (*args[:place], *args[place + 1 :]),
                {**kwargs},
            )
    for name, argument in kwargs.items():
        if isinstance(argument, nnx.Module):
            others = {k: x for k, x in kwargs.items() if k != name}
            return Entry(f=f, place=name), argument, tuple(args), others
    roots_of(function, args, {**kwargs})  # raises an error if there is no module at all
    raise TypeError(
        f"The arguments of {function_name(f)} hold the model within a container, but an Inspector "
        f"needs it as an argument of its own. Pass a function of the model: "
        f"nni.Inspector(lambda model, x: ..., model, x)."
    )


def other_models_notice(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """A notice about models among the other arguments, which are not shown; "" if there is none."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    others = [type(leaf).__name__ for leaf in leaves if isinstance(leaf, nnx.Module)]
    if not others:
        return ""
    return (
        f"The first model among the arguments is on screen. The others run, but are not shown: "
        f"{', '.join(others)}."
    )


@contextlib.contextmanager
def ensemble_noted(model: nnx.Module) -> Iterator[None]:
    """Inside, an error of a call says whether every array has an extra axis, as an ensemble's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        found = {_ensemble_size(module) for _, module in iter_modules(model)} - {None}
        if len(found) == 1 and found != {0}:
            add_note(
                error,
                f"the arrays of each layer have an extra first axis of {found.pop()}. If this "
                f"model is an ensemble made by nnx.vmap, pass the function that maps over it: "
                f"nni.Inspector(forward, ensemble, x).",
            )
        raise


def _ensemble_size(module: nnx.Module) -> int | None:
    """The extra first axis of a layer's array, 0 for none; None if its class allows any rank."""
    name = next((name for cls, name in _ARRAY_NAMES.items() if isinstance(module, cls)), None)
    variable = None if name is None else own_attribute(module, name)
    shape = shape_of(variable.get_raw_value() if isinstance(variable, nnx.Variable) else None)
    if shape is None:
        return None
    own = 1 if name == "scale" else 2
    if isinstance(module, (nnx.Conv, nnx.ConvTranspose)):
        size = module.kernel_size
        own += 1 if isinstance(size, int) else len(size)
    return shape[0] if len(shape) == own + 1 else 0


def _may_be_a_function(f: object) -> bool:
    """Whether something is callable and not a class, a Linen module or an `nnx.Rngs`."""
    is_linen = any(c.__module__.startswith("flax.linen") for c in inspect.getmro(type(f)))
    return callable(f) and not isinstance(f, (type, nnx.Pytree)) and not is_linen
