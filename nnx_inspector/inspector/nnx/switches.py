"""The modes of modules, and switching them on a copy of a model.

A mode is a parameter of the module's `set_view`, or a plain flag that `Module.set_attributes`
sets. Invariant: a switch acts like `nnx.view` and `set_attributes`, and only on the given copy;
`Switches` that would give different programs are never equal. Chooses no module itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import jax
import numpy as np
from flax import nnx

from nnx_inspector.arrays import own_attribute
from nnx_inspector.errors import add_note
from nnx_inspector.hooks.cache_key import cache_key
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.typing import Function, Kwargs, PyTree, Value

FLAGS = {
    "deterministic": "False after train(), True after eval().",
    "use_running_average": "False after train(), True after eval().",
    "decode": "",
}
"""The flags of NNX's own modules, with a text for classes that do not document them."""

_MISSING = object()
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ModeDescription:
    """One mode of a module: the values it takes, and its documentation.

    `by_view` says that the module's `set_view` switches it; otherwise it is a plain attribute.
    """

    name: str
    by_view: bool
    accepts: str
    documentation: str

    @property
    def is_flag(self) -> bool:
        words = set(re.findall(r"[A-Za-z_]\w*", self.accepts))
        return words - {"None", "Optional", "Union", "typing"} == {"bool"}


@dataclasses.dataclass(frozen=True)
class _ClassModes:
    """The modes that one class defines for all its modules."""

    by_view: Mapping[str, ModeDescription]
    takes_any: bool
    flags: tuple[str, ...]
    not_flags: frozenset[str]
    texts: Mapping[str, str]


class ModeCatalog:
    """The modes of modules, each class looked up once."""

    def __init__(self) -> None:
        self._classes: dict[type, _ClassModes] = {}

    def modes_of(self, module: nnx.Module) -> dict[str, ModeDescription]:
        about = self._modes_of_class(module)
        out = dict(about.by_view)
        names = dict.fromkeys(about.flags)
        if not _is_of_flax(type(module)):
            names |= dict.fromkeys(n for n, v in vars(module).items() if type(v) is bool)
        for name in names:
            hidden = name not in FLAGS and (name.startswith("_") or name in about.not_flags)
            if name not in out and not hidden and _is_flag(module, name):
                text = about.texts.get(name, FLAGS.get(name, ""))
                out[name] = ModeDescription(name, False, "bool", text)
        return out

    def takes_any(self, module: nnx.Module) -> bool:
        """Whether its `set_view` has `**kwargs`, so that `nnx.view` passes it every mode."""
        return self._modes_of_class(module).takes_any

    def _modes_of_class(self, module: nnx.Module) -> _ClassModes:
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = _modes_of_class(module)
        return self._classes[cls]


def current_value(module: nnx.Module, name: str) -> Value:
    """The value of a mode, read from the attribute of its name; None if there is none."""
    value = own_attribute(module, name)
    is_data = isinstance(value, (jax.Array, np.ndarray, nnx.Variable, nnx.Module))
    return None if is_data or callable(value) else value


def _is_of_flax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("flax", "builtins")


def _set_view_parameters(module: nnx.Module) -> Mapping[str, inspect.Parameter]:
    # looked up on the class: a wrapper that answers for every name has no set_view of its own
    if inspect.getattr_static(type(module), "set_view", None) is None:
        return {}
    view: Function = getattr(module, "set_view")  # noqa: B009 - nnx.Module has none
    return inspect.signature(view).parameters


def _modes_of_class(module: nnx.Module) -> _ClassModes:
    """The modes of a class. The flags of flax's classes are FLAGS; a user's are public bools."""
    parameters = _set_view_parameters(module)
    texts = _documentation(type(module))
    of_view = documented_names(inspect.getdoc(getattr(type(module), "set_view", None)))
    by_view: dict[str, ModeDescription] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            accepts = parameter.annotation
            if accepts is parameter.empty:
                accepts = ""
            elif not isinstance(accepts, str):
                accepts = inspect.formatannotation(accepts)
            text = of_view.get(name, texts.get(name, ""))
            by_view[name] = ModeDescription(name, True, accepts, text)
    flags, not_flags = dict.fromkeys(FLAGS), set[str]()
    for cls in type(module).__mro__:
        if cls is object:
            continue
        if _is_of_flax(cls):  # constructor arguments of flax layers are not modes
            not_flags |= set(inspect.signature(cls.__init__).parameters)
        else:
            flags |= dict.fromkeys(n for n, v in vars(cls).items() if type(v) is bool)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return _ClassModes(by_view, takes_any, tuple(flags), frozenset(not_flags), texts)


def _is_flag(module: nnx.Module, name: str) -> bool:
    raw = inspect.getattr_static(module, name, _MISSING)
    if raw is _MISSING or (isinstance(raw, property) and raw.fset is None):
        return False
    value = own_attribute(module, name, _MISSING)
    return type(value) is bool or (value is None and name in FLAGS)


# ------------------------------------------------------------- documentation


def _documentation(cls: type) -> dict[str, str]:
    """The lines about arguments and attributes in the docstrings of a class."""
    out: dict[str, str] = {}
    for base in cls.__mro__:
        if base is nnx.Module:
            break
        for text in (vars(base).get("__doc__"), getattr(vars(base).get("__init__"), "__doc__", "")):
            out = {**documented_names(inspect.cleandoc(text or "")), **out}
    return out


_SECTION = re.compile(r"(args|arguments|keyword args|parameters|attributes):\s*", re.IGNORECASE)
_ENTRY = re.compile(r"\**(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def documented_names(text: str | None) -> dict[str, str]:
    """The arguments and attributes that a Google-style docstring describes, one line for each."""
    out: dict[str, str] = {}
    inside, indent, name = False, 0, ""
    for line in (text or "").splitlines():
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            inside, indent, name = bool(_SECTION.fullmatch(line)), 0, ""
        elif inside:
            indent = indent or depth
            entry = _ENTRY.match(line.strip()) if depth <= indent else None
            if entry:
                name = entry[1]
                out[name] = entry[2].strip()
            elif depth <= indent:
                name = ""
            elif name:
                out[name] = f"{out[name]} {line.strip()}".strip()
    return out


# ----------------------------------------------------------------- switching


@dataclasses.dataclass(frozen=True, eq=False)
class Switches:
    """The modes to switch, with their modules and values; none by default.

    Attributes:
        sites: the path of each module, with its modes and their values.
    """

    sites: tuple[tuple[Path, tuple[tuple[str, Value], ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sites)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Switches) and cache_key(self.sites) == cache_key(other.sites)

    def __hash__(self) -> int:
        return hash(cache_key(self.sites))

    def apply(self, model: nnx.Module) -> None:
        """Switch modules of our own copy of a model, children before their parents."""
        if not self.sites:
            return
        wanted = dict(self.sites)
        nodes = list(cast(Iterable[tuple[Path, object]], nnx.iter_graph(model, graph=True)))
        for path, node in nodes:
            if path in wanted and isinstance(node, nnx.Module):
                try:
                    _switch(node, dict(wanted[path]))
                except Exception as error:
                    where = f"{site_key(path) or '(root)'!r} ({type(node).__name__})"
                    add_note(error, f"raised while switching the modes of {where}.")
                    raise

    def in_words(self) -> str:
        """The switches, like `"deterministic=True on 4 modules, decode=True on 'attn'"`."""
        where: dict[str, list[str]] = {}
        for path, modes in self.sites:
            for name, value in modes:
                where.setdefault(f"{name}={value!r}", []).append(site_key(path) or "(root)")
        return ", ".join(
            f"{what} on {f'{len(keys)} modules' if len(keys) > 1 else repr(keys[0])}"
            for what, keys in where.items()
        )


def _switch(module: nnx.Module, modes: Kwargs) -> None:
    parameters = _set_view_parameters(module)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    passed = {n: v for n, v in modes.items() if n in parameters or takes_any}
    if passed:
        view: Function = getattr(module, "set_view")  # noqa: B009
        view(**passed)
    for name, value in modes.items():
        if name not in parameters and _is_flag(module, name):
            setattr(module, name, value)


def abstract_view(
    nodes: tuple[object, ...], switches: Switches, read: Callable[[nnx.Module], T]
) -> tuple[PyTree, T]:
    """The first of these modules with its modes switched, and the others as they are, as shapes
    without arrays; and the result of `read` on the first.

    Nothing is computed, and the model is not changed.
    """
    graphdef, state = nnx.split(nodes, graph=True)
    held: Kwargs = {}

    def build(state: object) -> PyTree:
        copy: PyTree = nnx.merge(graphdef, state)
        switches.apply(copy[0])
        held["read"] = read(copy[0])
        held["graphdef"], out = nnx.split(copy, graph=True)
        return out

    shapes = jax.eval_shape(build, state)
    return nnx.merge(held["graphdef"], shapes), held["read"]
