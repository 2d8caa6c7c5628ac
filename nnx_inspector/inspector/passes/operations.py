"""The operations within a call that the screen shows as rows of their own.

A function that the call itself calls (`@softmax`) contains operations too (`@softmax.exp`).
Invariant: a selection is refused before anything changes. Selects only; the next pass measures.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.globs import escaped_glob
from nnx_inspector.hooks.sites import CALL, Selection, parse_key, split_operation
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.program.analysis.calls import TracedCall
from nnx_inspector.program.analysis.trace import trace_of

MOST_OPERATIONS = 200
"""The most operations of one call that a click shows; each costs as much as a site."""


def select_operations(core: Core, site: str, *, shown: bool) -> Selection:
    """The sites that are shown, with or without the operations within a call."""
    return with_operations(core, site) if shown else without_operations(core, site)


def with_operations(core: Core, site: str) -> Selection:
    """The sites that are shown, and the operations within a call.

    Raises:
        ValueError: there is no such site; nothing is seen within its call, or too much.
        InspectorError: a loop is being watched.
    """
    site, terms = _require_whole_site(core, site), core.selection.terms
    # traced apart: to name all of them it enters functions that the shown program leaves whole
    passes = OwnedPasses((), Selection((*terms, _glob(site))))
    called = passes.read(core.example_call(), trace_of).calls
    within = _operations_within(called, site)
    found = [key for key in within if not any(_is_within(key, above) for above in within)]
    if not found:
        raise ValueError(
            f"No operation is seen within {site!r}: it calls nothing but other modules, or cannot "
            f"be entered. Choose one of the modules inside."
        )
    if len(found) > MOST_OPERATIONS:
        raise ValueError(
            f"The call of {site!r} has {len(found):,} operations, and {MOST_OPERATIONS} are shown "
            f"at most. Select some by name: nni.Inspector(..., only=['**', {found[0]!r}]). "
            f"nni.trace(..., only={_glob(site)!r}) lists them."
        )
    return Selection((*terms, *(glob for glob in map(escaped_glob, found) if glob not in terms)))


def with_operation(core: Core, key: str) -> Selection:
    """The sites that are shown, and one operation: what the sites are if there is none such.

    Raises:
        InspectorError: a loop is being watched.
    """
    site, operation = split_operation(key)
    if not operation or site not in core.view.keys or key in core.view.keys:
        return core.selection
    _require_whole_site(core, site)
    found = Selection((*core.selection.terms, escaped_glob(key)))
    called = OwnedPasses((), found).read(core.example_call(), trace_of).calls
    return found if any(call.site == key for call in called) else core.selection


def without_operations(core: Core, site: str) -> Selection:
    """The sites that are shown, without the operations within a call.

    Raises:
        ValueError: there is no such site, or the user's own `only=` selects its operations.
        InspectorError: a loop is being watched, or one of the operations is perturbed.
    """
    site, given = _require_whole_site(core, site), core.user_selection.terms
    within = _operations_within(core.trace.calls, site)
    hidden = {*map(escaped_glob, within)}.difference(given)
    selection = Selection([term for term in core.selection.terms if term not in hidden])
    perturbed = {key for handle in core.handles.all() for key in handle.sites}
    for key in within:
        if selection.matches_key(key):
            raise ValueError(
                f"{key!r} is shown because the Inspector was made with only={[*given]!r}."
            )
        if key in perturbed:
            raise InspectorError(
                f"{key!r} is perturbed. Remove its perturbation, then hide the operations."
            )
    return selection


def _require_whole_site(core: Core, site: str) -> str:
    """The whole site of a key; an error if it is unknown, or if a loop is being watched."""
    site = without_layers(core.require_site(site))[0]
    if core.looping:
        raise InspectorError(
            f"A loop is being watched, and its program measures the sites that it began with. Show "
            f"or hide the operations of {site!r} before the loop or after it."
        )
    return site


def _operations_within(calls: Sequence[TracedCall], site: str) -> list[str]:
    """The operations within a call, and within the other methods of its module that it calls."""
    of_calls = [] if split_operation(site)[1] else [c for c in calls if split_operation(c.site)[1]]
    below = {c.site for c in of_calls if c.parent is not None and calls[c.parent].site == site}
    keys = dict.fromkeys(call.site for call in calls)
    return [key for key in keys if key in below or _is_within(key, site)]


def _is_within(key: str, site: str) -> bool:
    """Whether a site is an operation within another one's call, or within a function there."""
    (call, operation), (around, function) = split_operation(key), split_operation(site)
    if call != around or not operation or operation == function:
        return False
    return not function or operation.startswith(f"{function}.")


def _glob(site: str) -> str:
    """The glob of the operations within a site; of a module's call, in all of its methods."""
    method = ":*" * (parse_key(site)[1] == CALL)
    return escaped_glob(site) + (".*" if split_operation(site)[1] else f"{method}@*")
