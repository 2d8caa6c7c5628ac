"""The batch of the pass on screen, found in its arguments and sent in readable form.

Invariant: nothing here raises into the pass: what cannot be read becomes a notice. The arguments
that are looked up in an embedding are known from the program, not guessed.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import module_sites
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.inspector.passes.pass_request import PassRequest
from nnx_inspector.inspector.values.requests import readable_pass
from nnx_inspector.program.analysis.dataflow import inputs_received
from nnx_inspector.program.function import argument_name, is_input
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.stage import CachedTrace
from nnx_inspector.records.donated import require_one_process
from nnx_inspector.screen.batch_reader import Argument

MOST_TRACES = 12
"""The most programs that are traced to find out whose axes are whose."""


def show_inputs(core: Core, value: object = None) -> None:
    """Send the batch of the last requested pass.

    Args:
        core: the core of the inspector.
        value: what the pass returned; None before it.
    """
    before, request = core.view.last_message("inputs"), core.request
    arrays = [x for x in jax.tree.leaves((request.args, request.kwargs)) if is_input(x)]
    if before is None and not core.inputs.has_any(arrays):
        return
    try:
        require_one_process(arrays, "The batch")
        known = core.batch
        if known is None or known[0] is not request:
            arguments = arguments_of(core)
            batch = core.inputs.message(arguments)
            sites = unaligned_sites(core, request, arguments)
            batch = dataclasses.replace(
                batch, number=request.number, kind=request.kind, apart=sites
            )
            core.batch = known = request, batch
        outputs = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        message = core.inputs.with_predictions(known[1], outputs)
    except Exception as error:  # noqa: BLE001 - the pass went well, and the screen says so
        why = f"The batch could not be read: {reply_text(error)}"
        message = dataclasses.replace(core.inputs.message([]), problem=why)
    other = core.last_step if request.loss_fn is None else core.example
    if other is not None and _can_run_again(other):
        message = dataclasses.replace(message, other=other.kind)
    if before is not None and before.example < message.batch:
        message = dataclasses.replace(message, example=before.example)
    if core.request is not request:
        return  # another pass was requested meanwhile, and shows its own batch
    if message.problem and message.problem != getattr(before, "problem", ""):
        core.notice("warning", message.problem)
    if message != before:
        core.position_answers.clear()
        core.view.publish(message)


def _can_run_again(request: PassRequest) -> bool:
    """Whether a pass can be made again: its arguments may have been donated to a step."""
    try:
        request.require_there()
    except InspectorError:
        return False
    return True


def forward_request(core: Core) -> PassRequest | None:
    """The last requested pass as a forward pass: of a step, the model's call with its batch.

    The arrays that the step gives to the model take the places of those of the example, whose
    other arguments stay. None if they do not fit there: the model is called several times, in a
    loop, or with other arrays. Values of its number are of the same batch as the pass.
    """
    request, example = core.request, core.example
    if request.loss_fn is None:
        return request
    if core.entry.f is not None:
        return None
    try:
        look = readable_pass(core)
        found = core.array_reader.read(look, core.entry.site, "input", clean=True).arrays
    except (InspectorError, ValueError, RuntimeError):
        return None
    leaves, tree = jax.tree.flatten((example.args, example.kwargs))
    places = [i for i, x in enumerate(leaves) if is_input(x)]
    if len(places) != len(found) or any(one.call for one in found):
        return None
    for place, one in zip(places, found, strict=True):
        x, value = leaves[place], one.value
        if x.shape[1:] != value.shape[1:] or x.ndim != value.ndim or x.dtype != value.dtype:
            return None
        leaves[place] = value
    args, kwargs = tree.unflatten(leaves)
    how = {"configuration": request.configuration, "number": request.number}
    return dataclasses.replace(example, args=args, kwargs=kwargs, **how)


def arguments_of(core: Core) -> list[Argument]:
    """The arrays among the arguments of the last pass, ids as an embedding receives them."""
    arguments = given_arguments(core, core.request)
    found, _ = core.inputs.tokens_in(arguments)
    if found is None or not found.changed:
        return arguments
    arrays = core.array_reader.read(readable_pass(core), found.changed, "input", clean=True).arrays
    if len(arrays) != 1:
        raise InspectorError(
            f"{found.changed!r} receives several arrays, and it is not known which of them comes "
            f"from {found.path!r}."
        )
    received = dataclasses.replace(found, value=arrays[0].value)
    return [received if one is found else one for one in arguments]


def unaligned_sites(core: Core, request: PassRequest, arguments: list[Argument]) -> tuple[str, ...]:
    """The sites whose positions may be those of another argument than the tokens.

    Where another sequence is as long as the tokens, the program is traced once more with one token
    less: the axes that are shorter then are those of the tokens.

    Returns:
        See `protocol.Inputs`.
    """
    found, _ = core.inputs.tokens_in(arguments)
    if found is None:
        return ()
    place, length = arguments.index(found), found.value.shape[-1]
    others = [i for i, one in enumerate(arguments) if one is not found and _has_length(one, length)]
    if not any(_is_sequence(arguments[i]) for i in others):
        return ()
    call = request.call(core.model, core.modes.switches())
    tracing = core.programs.tracing(call)
    if tracing is None:
        return ("*",)
    if tracing not in core.unaligned:
        shorter = _trace_shorter(core, call, length, place, others)
        sites = ("*",) if shorter is None else _sites_as_long(core, tracing, shorter, length)
        core.unaligned[tracing] = sites
    return core.unaligned[tracing]


def _has_length(one: Argument, length: int) -> bool:
    return length in one.value.shape[one.value.ndim > 1 :] or bool(one.changed)


def _is_sequence(one: Argument) -> bool:
    """Whether an argument may be a sequence of its own: ids, or vectors."""
    if jnp.issubdtype(one.value.dtype, jnp.integer):
        return one.embedded is not False
    return one.value.ndim > 2


def _trace_shorter(
    core: Core, call: Call, length: int, tokens: int, others: list[int]
) -> CachedTrace | None:
    """The program with one token less, with as few other arguments shortened as it takes."""
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(leaves) if is_input(x)]
    lengths = {length, leaves[places[tokens]].shape[-1]}
    if 1 in lengths:
        return None
    chosen = (some for n in range(len(others) + 1) for some in itertools.combinations(others, n))
    for some in itertools.islice(chosen, MOST_TRACES):
        less = list(leaves)
        for i in (places[number] for number in (tokens, *some)):
            x = less[i]
            axes = range(x.ndim > 1, x.ndim)
            less[i] = x[
                tuple(
                    slice(-1 if n in axes and x.shape[n] in lengths else None)
                    for n in range(x.ndim)
                )
            ]
        args, kwargs = tree.unflatten(less)
        try:
            return core.programs.tracing(dataclasses.replace(call, args=args, kwargs=kwargs))
        except Exception:  # noqa: BLE001 - the user's function does not take it: these belong together
            continue
    return None


def _sites_as_long(
    core: Core, one: CachedTrace, shorter: CachedTrace, length: int
) -> tuple[str, ...]:
    """The sites with an axis of this length that is not shorter in the other program."""
    found = dict[str, None]()
    attend = {call.site for call in core.trace.calls if call.attends}
    for (mark, _), (less, _) in zip(one.survey.walk(), shorter.survey.walk(), strict=False):
        ends = {INPUT: " input", OUTPUT: ""}
        if mark.part not in ends or mark.site != less.site:
            continue
        for x, y in zip(mark.avals, less.avals, strict=False):
            same = [a == b for a, b in zip(x.shape, y.shape, strict=False) if a == length]
            crossed = (
                x.shape[-2:] == (length, length)
                and x.shape[-2:] != y.shape[-2:]
                and len(set(same[-2:])) > 1
            )
            if same and (all(same) or crossed):
                found[mark.site + ends[mark.part]] = None
                if mark.site in attend:
                    found[mark.site] = None
    return tuple(found)


def given_arguments(core: Core, request: PassRequest) -> list[Argument]:
    """The arrays among the arguments of a pass, as given."""
    flat = jax.tree_util.tree_flatten_with_path((request.args, request.kwargs))[0]
    found = [(path, x) for path, x in flat if is_input(x)]
    embedded = None if core.inputs.decode is None else _embedded(core, request, len(found))
    arguments: list[Argument] = []
    for number, (path, x) in enumerate(found):
        first = plain_key(path[1])
        place = first if plain_key(path[0]) == 0 else None
        head = str(first)
        if isinstance(place, int):
            head = _name_of(request, core, place)
        keys = [head, *(str(plain_key(key)) for key in path[2:])]
        sites = {} if embedded is None else embedded.get(number, {})
        changed = next((site for site, same in sites.items() if not same), "")
        known = None if embedded is None else bool(sites)
        arguments.append(Argument("/".join(keys), place, x, known, changed))
    return arguments


def _name_of(request: PassRequest, core: Core, place: int) -> str:
    """The name of a positional argument, or its position if it has no name."""
    entry = request.entry if request.loss_fn is None else Entry(f=request.loss_fn)
    after = entry.f is not None and isinstance(entry.place, int) and place >= entry.place
    name = argument_name(entry.f or getattr(core.model, entry.method), place + after)
    return str(place) if name == str(place + after) else name


def _embedded(core: Core, request: PassRequest, count: int) -> dict[int, dict[str, bool]] | None:
    """The numbers of the arrays that embeddings receive, and how; None if unknown."""
    sites = [site.key for site in module_sites(core.model) if isinstance(site.module, nnx.Embed)]
    call = request.call(core.model, core.modes.switches())
    tracing = core.programs.tracing(call) if sites else None
    if tracing is None:
        return None
    jaxpr, known = tracing.survey.jaxpr, core.embedded
    if known is None or known[0] is not tracing:
        core.embedded = known = tracing, inputs_received(jaxpr, tracing.owner, sites)
    first = len(jaxpr.invars) - count
    return {i - first: of for i, of in known[1].items() if i >= first} or None
