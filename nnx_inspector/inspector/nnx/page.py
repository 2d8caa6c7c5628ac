"""The screen's page about one module as NNX sees it, and the switches of its modes.

Invariant: the model is read, never written. If another thread changes the model meanwhile, the page
is read again, and in the end refused with an error. Runs no pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence

from flax import nnx

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import CALL, Path, iter_modules, parse_key, site_key
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.nnx.graph import (
    Leaf,
    Node,
    References,
    held_as,
    inside,
    kinds_of,
    node_row,
    text,
    variable_row,
)
from nnx_inspector.inspector.nnx.modes import Mode
from nnx_inspector.inspector.nnx.snapshots import Snapshot, moved, norm_of, of_norms, snapshot_of
from nnx_inspector.inspector.nnx.switches import Offer
from nnx_inspector.program.analysis.describe import value_in_words
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol

TRIES = 3
"""How often a model is read if another thread keeps changing it."""


@dataclasses.dataclass(frozen=True)
class _Looked:
    """The newest snapshot of a site's module, and the one that it was compared with."""

    site: str
    snapshots: tuple[Snapshot, ...]


class Whole:
    """A model at rest, read once for the pages of all of its modules."""

    def __init__(self, core: Core):
        self._core = core

    @functools.cached_property
    def modules(self) -> dict[str, tuple[Path, nnx.Module]]:
        return {site_key(path): (path, module) for path, module in iter_modules(self._core.model)}

    @functools.cached_property
    def contents(self) -> list[Node | Leaf]:
        return _read(self._core.model, ())

    @functools.cached_property
    def modes(self) -> list[Mode]:
        return self._core.modes.table()


class Pages:
    """The screen's requests about one inspector's model, which is only read."""

    def __init__(self, core: Core):
        self._core = core
        self._lock = threading.Lock()
        self._looked: _Looked | None = None

    def page(self, site: str, number: int, whole: Whole | None = None) -> protocol.Nnx:
        """The page of a site's module, in answer to the request with this number.

        Args:
            site: the site's key; for a method other than `__call__`, its module is shown.
            number: of the request.
            whole: the model as it was read for another page; None reads it again.

        Raises:
            ValueError: the site has no module.
            InspectorError: another thread keeps changing the model.
        """
        step, shown = self._core.step, self._core.shown
        record = None if shown is None else shown.outcome.perturbed.record
        whole = whole or Whole(self._core)
        path, module = _module_at(whole, site)
        found = _read(module, path)
        leaves = [one for one in found if isinstance(one, Leaf)]
        nodes = [one for one in found if isinstance(one, Node)]
        references = References(found, whole.contents if path else [])
        first = leaves[: protocol.MOST_VARIABLES]
        key = site_key(path)
        changes, since, uncompared = self._changes(key, first, step)
        of_pass = _changed_in_pass(record, path)
        rows = [
            variable_row(leaf, references, change, _passed(leaf, len(path), of_pass))
            for leaf, change in zip(first, changes, strict=True)
        ]
        modes = _modes_below(whole, key, leaves)
        return protocol.Nnx(
            id=number,
            site=site,
            nodes=tuple(node_row(node, references) for node in nodes[: protocol.MOST_NODES]),
            nodes_total=len(nodes),
            variables=tuple(rows),
            variables_total=len(leaves),
            kinds=kinds_of(leaves),
            modes=tuple(map(_mode_row, modes[: protocol.MOST_MODES])),
            modes_total=len(modes),
            step=step,
            since=since,
            passed="" if shown is None else shown.request.kind,
            uncompared=uncompared,
        )

    def switch(self, module: str, name: str, value: bool | None) -> None:
        """Switch a mode for inspected passes; None undoes the switch.

        Raises:
            ValueError: the module has no such mode, or the mode is not limited to True and False.
        """
        here = {mode.mode: mode for mode in self._core.modes.table() if mode.site == module}
        if name not in here:
            raise ValueError(
                f"{module or '(root)'!r} has no mode {name!r}. "
                + (f"It has {', '.join(here)}." if here else "It has none.")
            )
        if value is not None and not is_flag(here[name]):
            raise ValueError(
                f"{name!r} takes {here[name].accepts or 'any value'}, not only True or False. "
                f"Use insp.modes.set({module!r}, {name}=...)."
            )
        self._core.modes.set(module, **{name: value})

    def forget(self) -> None:
        with self._lock:
            self._looked = None

    def _changes(
        self, key: str, shown: Sequence[Leaf], step: int
    ) -> tuple[list[protocol.NnxChange | None], int | None, str]:
        """The change of each leaf since the last snapshot, its step, and why some have none."""
        now = snapshot_of(((leaf.owner, leaf.value) for leaf in shown if not leaf.again), step)
        with self._lock:
            looked = self._looked
            earlier = looked.snapshots if looked is not None and looked.site == key else ()
            changes: list[protocol.NnxChange | None] = [None] * len(shown)
            for number, before in enumerate(earlier):  # newest first
                changes = [moved(before.copy_of(x.owner), now.copy_of(x.owner)) for x in shown]
                if before.step != step or any(c is not None and not c.same for c in changes):
                    earlier = earlier[number:]
                    break
            # a second request at one step still shows what that step changed
            self._looked = _Looked(key, (now, *earlier[:1]))
        if not earlier:
            return changes, None, ""
        return changes, earlier[0].step, _uncompared(now)


def _module_at(whole: Whole, site: str) -> tuple[Path, nnx.Module]:
    segments, method = parse_key(site)
    key = site if method == CALL else site_key(segments)
    if key not in whole.modules:
        raise ValueError(
            f"NNX has no module at {site!r}. A module that only a call makes, or a part of a "
            f"Linen module, has no graphdef and no state of its own. Select the module around "
            f"it."
        )
    return whole.modules[key]


def _modes_below(whole: Whole, key: str, leaves: Sequence[Leaf]) -> list[Mode]:
    if any(held_as(leaf.value) == "traced" for leaf in leaves):
        return []  # a table needs a trace of our own, which cannot hold foreign tracers
    inner = f"{key}/" if key else ""
    return [m for m in whole.modes if m.site == key or m.site.startswith(inner)]


def _read(module: nnx.Module, path: Path) -> list[Node | Leaf]:
    for _ in range(TRIES):
        try:
            return inside(module, path)
        except RuntimeError:  # another thread changed a container meanwhile
            continue
    raise InspectorError(
        f"{site_key(path) or '(root)'!r} is being changed by another thread. Look again once it "
        f"has been built."
    )


def _uncompared(now: Snapshot) -> str:
    if not now.left_out:
        return ""
    return f"{now.left_out} Variables are not compared: they are too large to keep copies of."


def _changed_in_pass(record: Record | None, path: Path) -> dict[str, float] | None:
    """Variable below `path` -> the norm of its change in the last pass; None if unknown."""
    if record is None:
        return None
    for end in range(len(path), -1, -1):
        key = site_key(path[:end])
        if key in record and any(call.took_place for call in record[key].calls):
            inner = site_key(path[end:])
            start = f"{inner}/" if inner else ""
            found: dict[str, list[float]] = {}
            for call in record[key].calls:
                for name, summary in call.changes.items():
                    if name.startswith(start):
                        found.setdefault(name.removeprefix(start), []).append(float(summary.norm))
            # the changes of several calls add up, but their norms do not
            return {name: n[0] if len(n) == 1 else math.nan for name, n in found.items()}
    return None


def _passed(leaf: Leaf, depth: int, changed: dict[str, float] | None) -> protocol.NnxChange | None:
    if changed is None or not isinstance(leaf.owner, nnx.Variable):
        return None
    name = site_key(leaf.path[depth:])
    if name not in changed:
        return protocol.NnxChange(same=True, distance=0.0, relative=0.0, before="", after="")
    return of_norms(changed[name], norm_of(leaf.value))


def is_flag(mode: Mode) -> bool:
    offer = Offer(mode.mode, True, mode.accepts, mode.documentation)
    return isinstance(mode.in_force, bool) or offer.is_flag


def _mode_row(mode: Mode) -> protocol.NnxMode:
    return protocol.NnxMode(
        module=mode.site,
        type=text(mode.type),
        name=text(mode.mode),
        own="–" if mode.own is None else text(value_in_words(mode.own)),
        in_force="–" if mode.in_force is None else text(value_in_words(mode.in_force)),
        value=mode.in_force if isinstance(mode.in_force, bool) else None,
        flag=is_flag(mode),
        switched=mode.own != mode.in_force,
        documentation=text(mode.documentation),
    )
