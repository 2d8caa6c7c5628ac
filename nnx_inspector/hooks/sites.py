"""The sites of a model: its modules and methods, their names, and how to select some of them.

A site is a module's path and one of its methods, or an operation within a call of it. Invariant: a
site's key can be parsed back (`parse_key(site_key(path, method)) == (path, method)`, except that
int segments become str), and a shared module is one site, under the path that NNX gives it, with
its other paths as aliases. Knows nothing of hooks.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from nnx_inspector._compat.flax_graphs import graph_nodes
from nnx_inspector.arrays import own_attribute
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.globs import escape, glob_matches, segment_matches, split_escaped
from nnx_inspector.hooks.operations.attention import NO_PATTERN_HINT
from nnx_inspector.typing import Args, Function, Value

CALL = "__call__"
Path = tuple[str | int, ...]
Only = Any
"""A glob over site keys, a module type, a predicate `(path, module) -> bool`, or several."""


def site_key(path: Sequence[str | int], method: str = CALL) -> str:
    """The key of a site: `"blocks/0/attn"`, `"encoder:encode"`, or `""` for the root's call. An
    operation within a call is a method like `"@softmax"`: `"blocks/0/attn@softmax"`.
    """
    key = "/".join(map(escape, path))
    return key if method == CALL else key + ":" * (method[0] != "@") + method


def parse_key(key: str) -> tuple[tuple[str, ...], str]:
    """(path segments, method) of a site key; the segments are unescaped strings."""
    called, operation = split_operation(key)
    head, *method = split_escaped(called, ":")
    segments = split_escaped(head, "/") if head else []
    plain = tuple(re.sub(r"\\(.)", r"\1", s) for s in segments) if "\\" in head else tuple(segments)
    if operation:
        return plain, "".join(method[:1]) + operation
    return plain, (method[0] if method else CALL)


def split_operation(key: str) -> tuple[str, str]:
    """A key (or glob) without its operation, and the operation: `("attn", "@softmax")`, or `""`."""
    called, *operation = split_escaped(key, "@")
    return called, f"@{'@'.join(operation)}" if operation else ""


def methods(cls: type) -> dict[str, Value]:
    """The public methods of a module class by name, without those of `nnx.Module` itself.

    `__call__` counts as public. Left out are static and class methods, properties and nested
    classes, which are not called on a module, and `set_view`, by which `nnx.view` switches modes.
    Each value is the raw attribute of the first class in the MRO that has it.
    """
    own: dict[str, Value] = {}
    containers = (nnx.Module, nnx.List, nnx.Dict, nnx.bridge.Module)
    base, inherited = _flax_attributes(tuple(c for c in containers if issubclass(cls, c)))
    for owner in cls.__mro__:
        if owner in base:
            continue
        for name, value in vars(owner).items():
            if name not in own and (name == CALL or not name.startswith("_")):
                own[name] = value
    return {n: v for n, v in own.items() if _is_method(v) and (n == CALL or n not in inherited)}


@functools.cache
def _flax_attributes(containers: tuple[type, ...]) -> tuple[frozenset[type], frozenset[str]]:
    """The classes of Flax that a module class derives from, and the names of their attributes."""
    base = frozenset(c for container in containers for c in container.__mro__)
    return base, frozenset({"set_view"}.union(*map(vars, base)))


def _is_method(value: object) -> bool:
    if isinstance(value, (staticmethod, classmethod, property, type)):
        return False
    if isinstance(value, types.FunctionType):
        return True
    # a method decorated by a transform is a callable object that binds like a function
    binds = callable(value) and hasattr(type(value), "__get__")
    return binds and own_attribute(value, "__wrapped__") is not None


def method_name(f: object) -> str:
    """The name of a method; of a bound one, the name in its class, despite a decorator."""
    name, owner = own_attribute(f, "__name__", ""), own_attribute(f, "__self__")
    if isinstance(f, types.MethodType) and not hasattr(type(owner), name):
        names = dir(type(owner))
        own = (n for n in names if inspect.getattr_static(type(owner), n) is f.__func__)
        return next(own, name)
    return name


def parameter_names(method: Function) -> tuple[str, ...]:
    """The names of the positional parameters of a bound method."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def callable_hint(module: nnx.Module) -> str:
    """What to pass instead of a module that has no `__call__`."""
    names = [f"model.{name}" for name in methods(type(module))]
    if not names:
        return "Pass a function that uses it."
    few = [", ".join(names[:6][:-1]), names[:6][-1]]
    several = f"one of its methods, such as {' or '.join(few)}"
    return f"Pass {several if few[0] else 'its method ' + few[1]}, or a function that calls it."


@dataclasses.dataclass(frozen=True)
class ModuleSite:
    """One module of a model: its path, the module itself, and its other paths."""

    path: Path
    module: nnx.Module
    aliases: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        return site_key(self.path)


def require_module(model: object, what: str = "model") -> nnx.Module:
    """Return `model`, or raise a TypeError that says what it is instead and what to pass."""
    if isinstance(model, nnx.Module):
        return model
    if isinstance(model, type) and issubclass(model, nnx.Module):
        raise TypeError(
            f"{what} is the class {model.__name__}, not an instance of it. "
            f"Build it first: {model.__name__}(..., rngs=nnx.Rngs(0))."
        )
    raise TypeError(
        f"{what} must be an nnx.Module, got {type(model).__name__}. {_module_hint(model)}"
    )


def _module_hint(given: object) -> str:
    """What to pass instead of an object that is not a module."""
    parts = given if isinstance(given, tuple) else (given,)
    if any(c.__module__.startswith("flax.linen") for c in inspect.getmro(type(given))):
        return (
            "Wrap a Linen module with nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)), and call "
            "lazy_init(x) on that."
        )
    if any(isinstance(part, (nnx.GraphDef, nnx.State)) for part in parts):
        return "Merge the model first: model = nnx.merge(graphdef, state)."
    if isinstance(given, nnx.Optimizer):
        return "Pass the model that it updates."
    if any(isinstance(part, nnx.Module) for part in parts):
        return "Pass one module by itself."
    return "Pass an instance of a class that derives from flax.nnx.Module."


def require_arguments(f: Function, args: Args, kwargs: Mapping[str, object]) -> None:
    """Raise a TypeError that says what to pass, if `f` cannot be called with these arguments."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # no signature: an error will come from the call itself
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = type(f).__name__ if isinstance(f, nnx.Module) else getattr(f, "__qualname__", "f")
        of_a_model = isinstance(own_attribute(f, "__self__"), nnx.Module)
        entered = f"model.{method_name(f)}" if of_a_model else method_name(f) or "f"
        given = "no example was given" if not args and not kwargs else f"{error}"
        needed = [
            parameter.name if parameter.kind is not parameter.KEYWORD_ONLY else f"{parameter.name}="
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        call = ", ".join(
            [
                "model" if isinstance(f, nnx.Module) else entered,
                *(n + "..." if n.endswith("=") else n for n in needed),
            ]
        )
        raise TypeError(
            f"{name} takes {', '.join(needed) or 'no arguments'} ({given}). Pass its arguments: "
            f"nni.Inspector({call})."
        ) from error


def iter_modules(model: nnx.Module) -> Iterator[tuple[Path, nnx.Module]]:
    """Every module of a model with its path, a shared one once, in every mode of NNX."""
    for path, node, again in graph_nodes(model):
        if not again and isinstance(node, nnx.Module):
            yield path, node


def module_sites(model: nnx.Module, prefix: Path = ()) -> list[ModuleSite]:
    """The modules of a model, parents before children, children in the order they were set.

    Paths are those of `nnx.iter_modules`.
    """
    found: dict[Path, nnx.Module] = {}
    firsts: dict[int, Path] = {}
    aliases: dict[Path, tuple[Path, ...]] = {}
    for path, node, again in graph_nodes(model):
        if again and id(node) in firsts:
            first = firsts[id(node)]
            aliases[first] = (*aliases.get(first, ()), path)
        elif isinstance(node, nnx.Module):
            found[path], firsts[id(node)] = node, path
    children: dict[Path, list[Path]] = {}
    for path in found:
        if path:
            children.setdefault(_parent(path, found), []).append(path)

    out, stack = list[ModuleSite](), list[Path]([()])
    while stack:
        path = stack.pop()
        others = tuple((*prefix, *a) for a in aliases.get(path, ()))
        out.append(ModuleSite((*prefix, *path), found[path], others))
        order = {name: rank for rank, name in enumerate(vars(found[path]))}
        stack += sorted(
            children.get(path, ()),
            key=lambda p: (
                order.get(str(p[len(path)]), len(order)),
                [(not isinstance(segment, int), segment) for segment in p[len(path) :]],
            ),
            reverse=True,
        )
    return out


def _parent(path: Path, found: Iterable[Path]) -> Path:
    for end in range(len(path) - 1, -1, -1):
        if path[:end] in found:  # skips a plain list or dict between two modules
            return path[:end]
    return ()


def site_keys(model: nnx.Module, prefix: Path = ()) -> list[str]:
    """The keys of all sites that are known before a call, one for each public method."""
    return [
        key
        for site in module_sites(model, prefix)
        for key in (
            *(site_key(site.path, name) for name in methods(type(site.module))),
            *(site_key((*site.path, *inner)) for inner in linen_parts(site.module)),
        )
    ]


def linen_parts(module: nnx.Module) -> dict[Path, dict[str, Value]]:
    """The Linen modules with Variables in a ToNNX: path below it -> the Variables, by name."""
    found: dict[Path, dict[str, Value]] = {}

    def collect(node: object, path: Path) -> Value:
        if not isinstance(node, dict):
            return node
        found[path] = {}  # parents before children
        found[path] |= {name: collect(node[name], (*path, name)) for name in sorted(node)}
        return found[path]

    if isinstance(module, nnx.bridge.ToNNX):
        for name, value in vars(module).items():
            if not name.startswith(("to_nnx__", "_pytree__")):
                collect(value, (name,))
    return found


class Selection:
    """A selection of sites. Selections compare and hash by value, because they key jit caches.

    Args:
        only: a glob over site keys (`*` matches one segment, `**` any number including none, so the
            root too; with an `@` such a glob selects the operations of every method), a module
            type, a predicate `(path, module) -> bool`, or a sequence of these. None selects every
            method in `default_methods`.
        default_methods: a glob over the method names that a type, a predicate or None selects.
    """

    def __init__(self, only: Only, *, default_methods: str = CALL):
        terms = tuple(only) if isinstance(only, (list, tuple, set, frozenset)) else (only,)
        if not terms:
            raise ValueError("only= is empty and selects nothing. Leave it out to select all.")
        for term in terms:
            if not (term is None or isinstance(term, (str, type)) or callable(term)):
                raise TypeError(
                    f"only= takes a glob, a module type or a predicate (path, module) -> bool, "
                    f"got {term!r} of type {type(term).__name__}."
                )
            called, operation = split_operation(term) if isinstance(term, str) else ("", "")
            if re.search(r"(?<!\\)\[", called):
                whole = re.sub(r"(?<!\\)\[[^][]*\]", "", called) + operation
                raise InspectorError(
                    f"{term!r} is one layer of a stacked module, and here all its layers are "
                    f"selected together. Select {whole!r} instead."
                )
        self.terms = terms
        self.inside = any(isinstance(term, str) and split_operation(term)[1] for term in terms)
        self.default_methods = default_methods

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and (self.terms, self.default_methods) == (
            other.terms,
            other.default_methods,
        )

    def __hash__(self) -> int:
        return hash((self.terms, self.default_methods))

    def __repr__(self) -> str:
        return f"Selection({self.terms!r})"

    def matches(self, path: Path | None, method: str, module: object) -> bool:
        """Whether a site is selected. A path of None (an unattributed call) matches no glob.

        For a sown value, `module` is the type of its Variable (or the type's name). It can be
        selected by a type, but not by a predicate.
        """
        return any(self._matches(term, path, method, module) for term in self.terms)

    def _matches(self, term: str | None, path: Path | None, method: str, module: object) -> bool:
        if isinstance(term, str):
            if path is None:
                return False
            called, wanted_operation = split_operation(term)
            pattern, *rest = split_escaped(called, ":")
            in_any = wanted_operation and re.search(r"(?<!\\)[*?]", pattern)
            wanted = rest[0] if rest else "*" if in_any else CALL
            method, operation = split_operation(method)
            if not segment_matches(wanted_operation, operation):
                return False
            return fnmatch.fnmatchcase(method or CALL, wanted) and glob_matches(pattern, path)
        if "@" in method or not fnmatch.fnmatchcase(method, self.default_methods):
            return False
        if term is None:
            return True
        sown = isinstance(module, (type, str))  # the type of a sown Variable, not a module
        if isinstance(term, type):
            return issubclass(module, term) if isinstance(module, type) else _is_a(module, term)
        return not sown and bool(term(path, module))

    def matches_any(self, model: nnx.Module, prefix: Path = ()) -> bool:
        """Whether any site of a model that is known before a call is selected."""
        sites = module_sites(model, prefix)
        return any(
            self.matches(site.path, name, site.module)
            for site in sites
            for name in methods(type(site.module))
        ) or any(
            self.matches_key(site_key((*site.path, *inner)))
            for site in sites
            for inner in linen_parts(site.module)
        )

    def matches_key(self, key: str) -> bool:
        """Whether a glob selects the site with this key."""
        path, method = parse_key(key)
        globs = (term for term in self.terms if isinstance(term, str))
        return any(self._matches(glob, path, method, None) for glob in globs)

    def require_match(
        self,
        model: nnx.Module | Mapping[Path, nnx.Module],
        called: Sequence[str] | None = None,
        operations: Iterable[str] = (),
    ) -> None:
        """Raise a ValueError that names the closest sites if nothing is selected; see also
        `missing`.

        Args:
            model: the model, or several models by prefix.
            called: the keys of the selected sites that a call has revealed, or None before a call.
                Sown values, Linen submodules and operations are not known before a call.
            operations: the keys of the operations that a call has revealed.
        """
        roots = {(): model} if isinstance(model, nnx.Module) else model
        if called and len(self.terms) > 1 and (missing := self.missing(called, operations)):
            raise ValueError(missing)
        if called or any(self.matches_any(root, prefix) for prefix, root in roots.items()):
            return
        if called is None and any(self._may_be_revealed(root) for root in roots.values()):
            return
        keys = [key for prefix, root in roots.items() for key in site_keys(root, prefix)]
        raise ValueError(no_match_text(self, [*(operations if self.inside else ()), *keys]))

    def missing(self, called: Sequence[str], operations: Iterable[str]) -> str:
        """The error text for the first term that names an operation and selects none; "" without
        one.
        """
        terms = [one for one in map(Selection, self.terms) if one.inside]
        lost = next((one for one in terms if not any(map(one.matches_key, called))), None)
        return "" if lost is None else no_match_text(lost, [*operations] or called)

    def _may_be_revealed(self, model: nnx.Module) -> bool:
        """Whether only a call can show what is selected: sown values and Linen modules."""
        modules = [module for _, module in iter_modules(model)]
        if any(isinstance(module, nnx.bridge.ToNNX) for module in modules):
            return True
        for term in self.terms:
            if isinstance(term, type) and not issubclass(term, nnx.Module):
                return True
            if isinstance(term, str) and any(_sows(module) for module in modules):
                return True
            called, operation = split_operation(term) if isinstance(term, str) else ("", "")
            if operation and Selection(called).matches_any(model):
                return True
        return False


def _is_a(module: object, cls: type) -> bool:
    """Whether a module, or the module that it wraps, is of a type: the two are one site."""
    if isinstance(module, nnx.bridge.ToNNX) and isinstance(module.to_nnx__module, cls):
        return True
    made = module.nnx_class if isinstance(module, nnx.bridge.ToLinen) else None
    return isinstance(module, cls) or (isinstance(made, type) and issubclass(made, cls))


def _sows(module: nnx.Module) -> bool:
    functions = [inspect.unwrap(method) for method in methods(type(module)).values()]
    codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    return any({"sow", "perturb"} & set(code.co_names) for code in codes)


def no_match_text(selection: Selection, keys: Sequence[str]) -> str:
    shown = [t if isinstance(t, str) else getattr(t, "__name__", repr(t)) for t in selection.terms]
    pattern = next((t for t in selection.terms if isinstance(t, str)), "")
    listed = ", ".join(map(repr, closest_keys(pattern, keys)))
    text = f"{', '.join(map(repr, shown))} matches no site of this model. The closest sites are "
    operation = split_operation(pattern)[1]
    why = NO_PATTERN_HINT if operation == "@attention" else ""
    if operation and not any("@" in key for key in keys):
        why = f" To see operations, make the Inspector with only=['**', {pattern!r}]."
    return f"{text}{listed}.{why}"


def closest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Three site keys closest to `key`, or to the last name of a glob; the first ones fill up."""
    names = {k: split_escaped(split_escaped(k, "/")[-1], "@")[-1] for k in [key, *keys]}
    known = dict.fromkeys(names[k] for k in keys)
    alike = difflib.get_close_matches(names[key], known)
    by_name = [k for name in alike for k in keys if names[k] == name]
    by_path = difflib.get_close_matches(key, keys, cutoff=0.5)
    first = [*by_name, *by_path] if "*" in key else [*by_path, *by_name]
    return list(dict.fromkeys([*first, *keys]))[:3]
