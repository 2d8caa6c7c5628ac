"""`Modes`: the modes of an inspected model's modules, and those that are switched.

Invariant: the model is only read. The switches live here, as rules over the model's sites, and are
applied to copies; a value shown as in force was read from such a copy. Runs no pass itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import textwrap
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, cast

from flax import nnx

from nnx_inspector.hooks.sites import (
    CALL,
    ModuleSite,
    Only,
    Path,
    Selection,
    closest_keys,
    module_sites,
    no_match_text,
)
from nnx_inspector.inspector.nnx.switches import (
    ModeCatalog,
    ModeDescription,
    Switches,
    abstract_view,
    current_value,
)
from nnx_inspector.typing import Kwargs, Value

if TYPE_CHECKING:
    import pandas as pd

ROWS = 60
"""The most rows in the printed table."""
WIDTH = 72
"""The most characters of documentation in the printed table."""
_ANY_NAME = "its set_view takes any name as **kwargs"


@dataclasses.dataclass(frozen=True)
class Mode:
    """One mode of one module.

    Attributes:
        own: the model's own value; None if the module does not expose it.
        in_force: the value for inspected passes.
        accepts: the values it takes, as annotated.
        documentation: the line about it in the module's docstring.
    """

    site: str
    type: str
    mode: str
    own: Value
    in_force: Value
    accepts: str
    documentation: str


@dataclasses.dataclass(frozen=True)
class _Rule:
    selection: Selection
    modes: Kwargs

    def selects(self, path: Path, module: nnx.Module) -> bool:
        return self.selection.matches(path, CALL, module)


class Modes(Mapping[str, Mapping[str, Value]]):
    """The modes of a model's modules, for inspected passes: `insp.run`, `insp.step`, the effect.

    A mapping from a module's key to its modes and the values in force, for the modules that have
    any. Modes that are not switched here follow the model, also when `model.eval()` is called
    later. Values that the model's own code passes to a call, or sets during it, win. A watched
    loop runs in the model's own modes.

    Args:
        model: the model; it is never changed.

    Attributes:
        on_change: called after each change with `view()`; an error in it undoes the change.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> insp = nni.Inspector(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones(4))
        >>> insp.modes.set(deterministic=True)
        >>> insp.run(jnp.ones(4)), insp.model.deterministic
        (Array([1., 1., 1., 1.], dtype=float32), False)
        >>> insp.close()
    """

    def __init__(self, model: nnx.Module):
        self.model = model
        self.on_change: Callable[[nnx.Module], object] = lambda view: None
        self._rules: tuple[_Rule, ...] = ()

    # ------------------------------------------------------------- switching

    def set(self, only: Only = None, **modes: object) -> None:
        """Switch modes for inspected passes, from the next one on.

        Args:
            only: the modules: a glob over site keys, a module type, a predicate
                `(path, module) -> bool`, or several. By default all that have the mode.
            modes: the values; None undoes a switch.

        Raises:
            TypeError: a value is of the wrong type, or not hashable.
            ValueError: `only` selects no module, or no selected module has such a mode; the text
                names the closest.
            Any error of a module's `set_view`; nothing is switched then.
        """
        if not modes:
            raise ValueError("set takes a mode and its value, for instance deterministic=True.")
        self._add(_Rule(Selection(only), modes), modes)

    def train(self, only: Only = None, **modes: object) -> None:
        """Like `Module.train`, for inspected passes: `deterministic` and `use_running_average` are
        False on modules that have them, and `modes` are set as by `set`.
        """
        both = {"deterministic": False, "use_running_average": False}
        self._add(_Rule(Selection(only), {**both, **modes}), modes)

    def eval(self, only: Only = None, **modes: object) -> None:
        """Like `Module.eval`, for inspected passes: `deterministic` and `use_running_average` are
        True on modules that have them, and `modes` are set as by `set`.
        """
        both = {"deterministic": True, "use_running_average": True}
        self._add(_Rule(Selection(only), {**both, **modes}), modes)

    def reset(self) -> None:
        """Undo every switch: inspected passes run in the model's own modes again."""
        if self._rules:
            self._replace(())

    def _add(self, rule: _Rule, required: Mapping[str, object]) -> None:
        sites = module_sites(self.model)
        chosen = [site for site in sites if rule.selects(site.path, site.module)]
        if not chosen:
            raise ValueError(no_match_text(rule.selection, [site.key for site in sites]))
        for name, value in required.items():
            _check_mode(name, value, chosen, sites, explicit=rule.selection.terms != (None,))
        rules: list[_Rule] = []
        for old in self._rules:  # drop modes that the new rule fully overrides
            whole = rule.selection.terms == (None,) or rule.selection == old.selection
            modes = {n: v for n, v in old.modes.items() if not (whole and n in rule.modes)}
            if modes:
                rules.append(_Rule(old.selection, modes))
        self._replace((*rules, rule))

    def _replace(self, rules: tuple[_Rule, ...]) -> None:
        before, self._rules = self._rules, rules
        try:
            view = self.view()  # an error of set_view is raised here, not by a later pass
            self.on_change(view)
        except BaseException:
            self._rules = before
            raise

    # --------------------------------------------------------------- reading

    def switches(self) -> Switches:
        """The switches for a copy of the present model."""
        if not self._rules:
            return Switches()
        catalog = ModeCatalog()
        out: list[tuple[Path, tuple[tuple[str, Value], ...]]] = []
        modules = nnx.iter_modules(self.model, graph=True)
        for path, module in cast(Iterable[tuple[Path, nnx.Module]], modules):
            offered, takes_any = catalog.modes_of(module), catalog.takes_any(module)
            here: Kwargs = {}
            for rule in self._rules:
                names = [n for n in rule.modes if n in offered or takes_any]
                if names and rule.selects(path, module):
                    here |= {name: rule.modes[name] for name in names}
            here = {name: value for name, value in here.items() if value is not None}
            if here:
                out.append((tuple(path), tuple(here.items())))
        return Switches(tuple(out))

    def view(self) -> nnx.Module:
        """The model as inspected passes see it: itself, or shapes with the modes in force."""
        switches = self.switches()
        if not switches:
            return self.model
        return abstract_view((self.model,), switches, lambda _: None)[0][0]

    def table(self) -> list[Mode]:
        """Every mode of every module, in the model's order."""
        switches = self.switches()
        asked = {(path, name): v for path, modes in switches.sites for name, v in modes}
        catalog = ModeCatalog()
        own: list[tuple[ModuleSite, ModeDescription]] = []
        for site in module_sites(self.model):
            offered = catalog.modes_of(site.module)
            extra = [name for path, name in asked if path == site.path and name not in offered]
            own += [(site, offer) for offer in offered.values()]
            own += [(site, ModeDescription(name, True, "", _ANY_NAME)) for name in extra]

        def read(model: nnx.Module) -> list[Value]:
            nodes = dict(nnx.iter_graph(model, graph=True))
            return [current_value(nodes[site.path], offer.name) for site, offer in own]

        before = read(self.model)
        now = abstract_view((self.model,), switches, read)[1] if switches else before
        return [
            Mode(
                site=site.key,
                type=type(site.module).__name__,
                mode=offer.name,
                own=before[i],
                # a mode without an attribute has the value that was passed
                in_force=asked.get((site.path, offer.name)) if now[i] is None else now[i],
                accepts=offer.accepts,
                documentation=offer.documentation,
            )
            for i, (site, offer) in enumerate(own)
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return a tidy pandas frame with one row for each mode of a module."""
        import pandas as pd

        columns = [field.name for field in dataclasses.fields(Mode)]
        rows = [dataclasses.asdict(mode) for mode in self.table()]
        return pd.DataFrame(rows, columns=columns, dtype=object)

    def __getitem__(self, key: str) -> Mapping[str, Value]:
        found = self._by_site()
        if key not in found:
            near = ", ".join(repr(k) for k in closest_keys(key, list(found)))
            which = f"The closest are {near}." if found else "No module of this model has any."
            raise KeyError(f"No module {key!r} with modes. {which}")
        return found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_site())

    def __len__(self) -> int:
        return len(self._by_site())

    def items(self) -> ItemsView[str, Mapping[str, Value]]:
        """The modules and their modes, all read at once."""
        return self._by_site().items()

    def values(self) -> ValuesView[Mapping[str, Value]]:
        """The modes of each module, all read at once."""
        return self._by_site().values()

    def _by_site(self) -> dict[str, Mapping[str, Value]]:
        out: dict[str, Kwargs] = {}
        for mode in self.table():
            out.setdefault(mode.site, {})[mode.mode] = mode.in_force
        return {**out}

    def __repr__(self) -> str:
        modes = self.table()
        if not modes:
            return f"No module of this {type(self.model).__name__} has modes."
        rows = [("site", "type", "mode", "own", "in force", "documentation")]
        rows += [
            (
                m.site or "(root)",
                m.type,
                m.mode,
                _value_text(m.own),
                _value_text(m.in_force) + " *" * (m.in_force != m.own),
                textwrap.shorten(m.documentation, WIDTH, placeholder=" ..."),
            )
            for m in modes[:ROWS]
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(modes) > ROWS:
            lines.append(f"... and {len(modes) - ROWS} more: see to_frame().")
        return "\n".join(lines)


def _value_text(value: object) -> str:
    return "-" if value is None else repr(value)


def _check_mode(
    name: str,
    value: object,
    chosen: Sequence[ModuleSite],
    sites: Sequence[ModuleSite],
    *,
    explicit: bool,
) -> None:
    """Raise an error if no chosen module has such a mode, or the value is not allowed."""
    catalog = ModeCatalog()
    found = [o for o in (catalog.modes_of(s.module).get(name) for s in chosen) if o]
    if not found and not (explicit and any(catalog.takes_any(s.module) for s in chosen)):
        raise ValueError(_no_such_mode(name, chosen, sites, catalog))
    if found and all(o.is_flag for o in found) and not isinstance(value, (bool, type(None))):
        raise TypeError(f"{name} must be True or False (None undoes a switch), got {value!r}.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {value!r}, which is not hashable; compiled programs are cached by it. "
            f"Pass a string, a number, a tuple or a frozen dataclass."
        ) from error


def _no_such_mode(
    name: str, chosen: Sequence[ModuleSite], sites: Sequence[ModuleSite], catalog: ModeCatalog
) -> str:
    here = list(dict.fromkeys(n for s in chosen for n in catalog.modes_of(s.module)))
    others = [s for s in sites if name in catalog.modes_of(s.module)]
    open_to_all = [s for s in sites if catalog.takes_any(s.module)]
    text = f"No selected module has a mode {name!r}."
    if others:
        text += f" {_module_in_words(others[0])} has, but only= does not select it."
    elif near := difflib.get_close_matches(name, here, n=1, cutoff=0.5):
        text += f" The closest is {near[0]!r}."
    elif open_to_all:
        text += f" {_module_in_words(open_to_all[0])} takes any name: select it with only=."
    if here:
        return f"{text} The selected ones have {', '.join(here)}."
    return f"{text} They have none: no set_view method, and no flag such as deterministic."


def _module_in_words(site: ModuleSite) -> str:
    return f"{site.key or '(root)'!r} ({type(site.module).__name__})"
