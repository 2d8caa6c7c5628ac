"""The batch of the pass on screen, found in its arguments and sent in readable form.

Invariant: nothing here raises into the pass: what cannot be read becomes a notice. The arguments
that are looked up in an embedding are known from the program, not guessed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import module_sites
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.inspector.passes.trials import Trial
from nnx_inspector.inspector.values.reading import look_of
from nnx_inspector.program.analysis.dataflow import inputs_received
from nnx_inspector.program.function import argument_name, is_input
from nnx_inspector.screen.inputs import Argument


def show_inputs(core: Core, value: Any = None) -> None:
    """Send the batch of the last requested pass.

    Args:
        core: the core of the inspector.
        value: what the pass returned; None before it.
    """
    before, trial = core.view.kept("inputs"), core.trial
    arrays = [x for x in jax.tree.leaves((trial.args, trial.kwargs)) if is_input(x)]
    if before is None and not core.inputs.has_any(arrays):
        return
    try:
        known = core.examined
        if known is None or known[0] is not trial:
            batch = core.inputs.message(arguments_of(core))
            which = {"number": trial.number, "studied": trial is core.example}
            core.examined = known = trial, dataclasses.replace(batch, **which)
        outputs = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        message = core.inputs.predicting(known[1], outputs)
    except Exception as error:  # noqa: BLE001 - the pass went well, and the screen says so
        why = f"The batch could not be read: {reply_text(error)}"
        message = dataclasses.replace(core.inputs.message([]), problem=why)
    if before is not None and before.example < message.batch:
        message = dataclasses.replace(message, example=before.example)
    if core.trial is not trial:
        return  # another pass was requested meanwhile, and shows its own batch
    if message.problem and message.problem != getattr(before, "problem", ""):
        core.notice("warning", message.problem)
    if message != before:
        core.positions.clear()
        if message.studied:
            core.view.set_aside(None)
        elif before is not None and before.studied:
            core.view.set_aside(before)
        core.view.keep(message)


def arguments_of(core: Core) -> list[Argument]:
    """The arrays among the arguments of the last pass, ids as an embedding receives them."""
    arguments = given(core, core.trial)
    found, _ = core.inputs.tokens_in(arguments)
    if found is None or not found.changed:
        return arguments
    arrays = core.opening.open(look_of(core), found.changed, "input", clean=True).arrays
    if len(arrays) != 1:
        raise InspectorError(
            f"{found.changed!r} receives several arrays, and it is not known which of them comes "
            f"from {found.path!r}."
        )
    received = dataclasses.replace(found, value=arrays[0].value)
    return [received if one is found else one for one in arguments]


def given(core: Core, trial: Trial) -> list[Argument]:
    """The arrays among the arguments of a pass, as given."""
    flat: Any = jax.tree_util.tree_flatten_with_path((trial.args, trial.kwargs))[0]
    found = [(path, x) for path, x in flat if is_input(x)]
    embedded = _embedded(core, trial, len(found)) if core.inputs.decode is not None else None
    arguments: list[Argument] = []
    for number, (path, x) in enumerate(found):
        first = plain_key(path[1])
        place = first if plain_key(path[0]) == 0 else None
        head = str(first)
        if isinstance(place, int):
            head = _name_of(trial, core, place)
        keys = [head, *(str(plain_key(key)) for key in path[2:])]
        sites = {} if embedded is None else embedded.get(number, {})
        changed = next((site for site, same in sites.items() if not same), "")
        known = None if embedded is None else bool(sites)
        arguments.append(Argument("/".join(keys), place, x, known, changed))
    return arguments


def _name_of(trial: Trial, core: Core, place: int) -> str:
    """The name of a positional argument, or its position if it has no name."""
    entry = trial.entry if trial.loss_fn is None else Entry(f=trial.loss_fn)
    after = entry.f is not None and isinstance(entry.place, int) and place >= entry.place
    name = argument_name(entry.f or getattr(core.model, entry.method), place + after)
    return str(place) if name == str(place + after) else name


def _embedded(core: Core, trial: Trial, count: int) -> dict[int, dict[str, bool]] | None:
    """The numbers of the arrays that embeddings receive, and how; None if unknown."""
    sites = [site.key for site in module_sites(core.model) if isinstance(site.module, nnx.Embed)]
    call = trial.call(core.model, core.modes.switches())
    tracing = core.programs.tracing(call) if sites else None
    if tracing is None:
        return None
    jaxpr, known = tracing.survey.jaxpr, core.embedded
    if known is None or known[0] is not tracing:
        core.embedded = known = tracing, inputs_received(jaxpr, tracing.owner, sites)
    first = len(jaxpr.invars) - count
    return {i - first: of for i, of in known[1].items() if i >= first} or None
