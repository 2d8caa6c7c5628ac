"""The screen's page about one module as NNX sees it, and the switches of its modes.

Invariant: the model is read, never written. If another thread changes the model meanwhile, the page
is read again, and in the end refused with an error. Runs no pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence

from flax import nnx

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import CALL, Path, iter_modules, parse_key, site_key
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.nnx import snapshots
from nnx_inspector.inspector.nnx.graph import (
    Leaf,
    Node,
    References,
    content_kind,
    node_row,
    nodes_and_leaves,
    short_text,
    variable_row,
    variable_totals,
)
from nnx_inspector.inspector.nnx.modes import Mode
from nnx_inspector.inspector.nnx.snapshots import Snapshot, snapshot_of
from nnx_inspector.inspector.nnx.switches import ModeDescription
from nnx_inspector.program.analysis.describe import value_in_words
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol

Change = protocol.NnxChange
TRIES = 3
"""How often a model is read if another thread keeps changing it."""


@dataclasses.dataclass(frozen=True)
class _Snapshots:
    """The newest snapshot of a site's module, and the one that it was compared with."""

    site: str
    snapshots: tuple[Snapshot, ...]


class ModelContent:
    """A model at rest, read once for the pages of all of its modules."""

    def __init__(self, core: Core):
        self._core = core

    @functools.cached_property
    def modules(self) -> dict[str, tuple[Path, nnx.Module]]:
        return {site_key(path): (path, module) for path, module in iter_modules(self._core.model)}

    @functools.cached_property
    def contents(self) -> list[Node | Leaf]:
        return _read_module(self._core.model, ())

    @functools.cached_property
    def modes(self) -> list[Mode]:
        return self._core.modes.table()


class Pages:
    """The screen's requests about one inspector's model, which is only read."""

    def __init__(self, core: Core):
        self._core = core
        self._lock = threading.Lock()
        self._snapshots: _Snapshots | None = None

    def page(self, site: str, number: int, content: ModelContent | None = None) -> protocol.Nnx:
        """The page of a site's module, in answer to the request with this number.

        Args:
            site: the site's key; for a method other than `__call__`, its module is shown.
            number: of the request.
            content: the model as it was read for another page; None reads it again.

        Raises:
            ValueError: the site has no module.
            InspectorError: another thread keeps changing the model.
        """
        step, shown = self._core.step, self._core.shown
        record = None if shown is None else shown.outcome.perturbed.record
        content = content or ModelContent(self._core)
        path, module = _module_at(content, site)
        found = _read_module(module, path)
        leaves = [one for one in found if isinstance(one, Leaf)]
        nodes = [one for one in found if isinstance(one, Node)]
        references = References(found, content.contents if path else [])
        first = leaves[: protocol.MOST_VARIABLES]
        key = site_key(path)
        changes, since, uncompared = self._changes(key, first, step)
        of_pass = _norms_of_changes(record, path)
        rows = [
            variable_row(leaf, references, change, _pass_change(leaf, len(path), of_pass))
            for leaf, change in zip(first, changes, strict=True)
        ]
        modes = _modes_below(content, key, leaves)
        return protocol.Nnx(
            id=number,
            site=site,
            nodes=tuple(node_row(node, references) for node in nodes[: protocol.MOST_NODES]),
            nodes_total=len(nodes),
            variables=tuple(rows),
            variables_total=len(leaves),
            kinds=variable_totals(leaves),
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
            self._snapshots = None

    def _changes(
        self, key: str, shown: Sequence[Leaf], step: int
    ) -> tuple[list[Change | None], int | None, str]:
        """The change of each leaf since the last snapshot, its step, and why some have none."""
        now = snapshot_of(((x.owner, x.value) for x in shown if not x.is_repeated), step)
        with self._lock:
            last = self._snapshots
            earlier = last.snapshots if last is not None and last.site == key else ()
            changes: list[Change | None] = [None] * len(shown)
            for number, before in enumerate(earlier):  # newest first
                pairs = [(before.copy_of(x.owner), now.copy_of(x.owner)) for x in shown]
                changes = [snapshots.change_between(*pair) for pair in pairs]
                if before.step != step or any(c is not None and not c.same for c in changes):
                    earlier = earlier[number:]
                    break
            # a second request at one step still shows what that step changed
            self._snapshots = _Snapshots(key, (now, *earlier[:1]))
        if not earlier:
            return changes, None, ""
        return changes, earlier[0].step, _uncompared_note(now)


def _module_at(content: ModelContent, site: str) -> tuple[Path, nnx.Module]:
    segments, method = parse_key(site)
    key = site if method == CALL else site_key(segments)
    if key not in content.modules:
        raise ValueError(
            f"NNX has no module at {site!r}. A module that only a call makes, or a part of a "
            f"Linen module, has no graphdef and no state of its own. Select the module around "
            f"it."
        )
    return content.modules[key]


def _modes_below(content: ModelContent, key: str, leaves: Sequence[Leaf]) -> list[Mode]:
    if any(content_kind(leaf.value) == "traced" for leaf in leaves):
        return []  # a table needs a trace of our own, which cannot hold foreign tracers
    inner = f"{key}/" if key else ""
    return [m for m in content.modes if m.site == key or m.site.startswith(inner)]


def _read_module(module: nnx.Module, path: Path) -> list[Node | Leaf]:
    for _ in range(TRIES):
        try:
            return nodes_and_leaves(module, path)
        except RuntimeError:  # another thread changed a container meanwhile
            continue
    raise InspectorError(
        f"{site_key(path) or '(root)'!r} is being changed by another thread. Look again once it "
        f"has been built."
    )


def _uncompared_note(now: Snapshot) -> str:
    if not now.left_out:
        return ""
    return f"{now.left_out} Variables are not compared: they are too large to keep copies of."


def _norms_of_changes(record: Record | None, path: Path) -> dict[str, float] | None:
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


def _pass_change(leaf: Leaf, depth: int, changed: Mapping[str, float] | None) -> Change | None:
    if changed is None or not isinstance(leaf.owner, nnx.Variable):
        return None
    name = site_key(leaf.path[depth:])
    if name not in changed:
        return protocol.NnxChange(same=True, distance=0.0, relative=0.0, before="", after="")
    return snapshots.norm_change(changed[name], snapshots.norm_of(leaf.value))


def is_flag(mode: Mode) -> bool:
    offer = ModeDescription(mode.mode, True, mode.accepts, mode.documentation)
    return isinstance(mode.in_force, bool) or offer.is_flag


def _mode_row(mode: Mode) -> protocol.NnxMode:
    return protocol.NnxMode(
        module=mode.site,
        type=short_text(mode.type),
        name=short_text(mode.mode),
        own="–" if mode.own is None else short_text(value_in_words(mode.own)),
        in_force="–" if mode.in_force is None else short_text(value_in_words(mode.in_force)),
        value=mode.in_force if isinstance(mode.in_force, bool) else None,
        flag=is_flag(mode),
        switched=mode.own != mode.in_force,
        documentation=short_text(mode.documentation),
    )
