"""Where the residual stream of a model is: the sites of a traced pass that return or receive it.

The stream is what the repeated blocks return or, where the code around them adds that to it, what
lies between the sums. Invariant: a chosen site that returns something else is an error. Runs
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nnx_inspector.hooks.sites import Selection, no_match_text, parse_key, split_operation
from nnx_inspector.lenses.traced_pass import SiteCalls, TracedPass, logits_in
from nnx_inspector.lenses.unembedding import Unembedding, block_list_key
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.stats.summarize import type_text


@dataclasses.dataclass(frozen=True)
class ResidualStream:
    """A site that returns the residual stream, or receives it where no module returns it.

    Attributes:
        array: the number of the array, among those of its part, which is the stream.
    """

    calls: SiteCalls
    array: int
    part: str = OUTPUT

    @property
    def place(self) -> tuple[str, str, int]:
        return self.calls.site, self.part, self.array

    @property
    def form(self) -> jax.ShapeDtypeStruct:
        return (self.calls.returned if self.part == OUTPUT else self.calls.received)[self.array]


def last_stream(traced: TracedPass, unembedding: Unembedding) -> ResidualStream | None:
    """What the last of the repeated blocks returns; None without such blocks."""
    try:
        return streams_of(traced, unembedding, None)[-1]
    except ValueError:
        return None


def streams_of(traced: TracedPass, unembedding: Unembedding, sites: object) -> list[ResidualStream]:
    """The sites that return the residual stream, in the order of the pass.

    Args:
        sites: which; see `intercept_methods`. None for the repeated blocks.

    Raises:
        ValueError: there are none, or a chosen one returns something else.
    """
    size = unembedding.stream[-1] if unembedding.stream else None
    try:
        found = _candidate_streams(traced, unembedding, sites, size)
        return found if sites is not None else _at_sums(traced, found)
    except ValueError:
        if sites is not None or size is None or not unembedding.proposed:
            raise
        try:  # more than one matrix may lie between the stream and the logits
            return _at_sums(traced, _candidate_streams(traced, unembedding, None, None))
        except ValueError:
            pass
        raise


def _candidate_streams(
    traced: TracedPass, unembedding: Unembedding, sites: object, size: int | None
) -> list[ResidualStream]:
    found: list[ResidualStream] = []
    chosen = None if sites is None else Selection(sites)
    for site, calls in sorted(traced.calls.items(), key=lambda item: item[1].last):
        if chosen is not None and not selects(chosen, traced, site):
            continue
        fits = [
            i
            for i, x in enumerate(calls.returned)
            if len(x.shape) >= 2
            and x.shape[-1] == (size or x.shape[-1])
            and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        if fits:
            found.append(ResidualStream(calls, fits[0]))
        elif chosen is not None:
            words = ", ".join(type_text(x.dtype, x.shape) for x in calls.returned) or "no array"
            raise ValueError(
                f"{site!r} returns {words}, which is not the residual stream: "
                f"{unembedding.first_site!r} receives arrays of {size} features."
            )
    if chosen is not None:
        if not found:
            raise ValueError(no_match_text(chosen, list(traced.calls)))
        return found
    return _repeated_blocks(traced, found, unembedding)


_Sources = dict[tuple[str, str, str], set[tuple[str, str]]]
"""By site, part and form of an array: the calls, each with a part, from which it is made."""


def _at_sums(traced: TracedPass, blocks: list[ResidualStream]) -> list[ResidualStream]:
    """The streams, given the repeated blocks: what they return or, where the code around them adds
    that to the stream, what comes in between the sums.
    """
    last, given = blocks[-1], _sources_by_site(traced)
    if last.part == INPUT:
        return blocks
    form = type_text(last.form.dtype, last.form.shape)
    end = _first_sum(traced, last, given, form)
    return blocks if end is None else _streams_between_sums(traced, last, given, end, form)


def _sources_by_site(traced: TracedPass) -> _Sources:
    """The edges of the pass by what receives; what encloses a call returns after it."""
    edges, borders, _ = traced.flow
    found: _Sources = {}
    inner = set(borders)
    for edge in (*edges, *borders):
        later = traced.last_call(edge.producer) - traced.last_call(edge.consumer)
        inward, outward = edge in inner and later >= 0, edge in inner and later <= 0
        key = (edge.consumer, OUTPUT if outward else INPUT, edge.shape)
        found.setdefault(key, set()).add((edge.producer, INPUT if inward else OUTPUT))
    return found


def _last_terms(traced: TracedPass, last: ResidualStream, given: _Sources) -> set[tuple[str, str]]:
    """What the last block returns, and what modules without parameters, as a dropout, make of
    it.
    """
    found = {last.place[:2]}
    in_order = sorted(given.items(), key=lambda item: traced.last_call(item[0][0]))
    for (site, part, _), sources in in_order:
        if part == INPUT and sources & found and traced.has_no_params(site):
            found.add((site, OUTPUT))
    return found


def _upstream_calls(last: ResidualStream, form: str, given: _Sources) -> set[tuple[str, str]]:
    """The calls through which the stream comes to the last block."""
    found, waiting = set[tuple[str, str]](), [last.place[:2]]
    while waiting:
        fresh = given.get((waiting.pop()[0], INPUT, form), set()) - found
        found |= fresh
        waiting += fresh
    return found


def _first_sum(
    traced: TracedPass, last: ResidualStream, given: _Sources, form: str
) -> tuple[str, str, str] | None:
    """Where what the last block adds first comes together with the stream before it, if it does."""
    added = _last_terms(traced, last, given)
    before = _upstream_calls(last, form, given) - added
    root, own = max(traced.calls, key=traced.last_call), logits_in(traced.output_shapes)
    logits = None if own is None else type_text(own.dtype, own.shape)
    sums = [
        key
        for key, sources in given.items()
        if added & sources and before & sources and (key[0] != root or key[2] == logits)
        if traced.last_call(key[0]) > last.calls.last and not traced.has_no_params(key[0])
    ]
    return min(sums, key=lambda key: traced.last_call(key[0])) if sums else None


def _streams_between_sums(
    traced: TracedPass, last: ResidualStream, given: _Sources, end: tuple[str, str, str], form: str
) -> list[ResidualStream]:
    """The places that receive the stream between its sums, up to the last."""
    number = {(a.stack[-1], a.received, a.shape): a.value for a in traced.flow[2]}

    def stream_at(site: str, part: str) -> ResidualStream | None:
        calls = traced.calls[site]
        for i, x in enumerate(calls.received if part == INPUT else calls.returned):
            if type_text(x.dtype, x.shape) == form and traced.residual_sums.is_sum(site, part, i):
                return ResidualStream(calls, i, part)
        return None

    final = stream_at(*end[:2])
    known = {number.get((end[0], end[1] == INPUT, form))}
    found: list[ResidualStream] = []
    for site, calls in sorted(traced.calls.items(), key=lambda item: item[1].last):
        sources, value = given.get((site, INPUT, form)), number.get((site, True, form))
        stream = stream_at(site, INPUT) if sources and sources <= given[end] else None
        again = value in known or (calls.rows and any(each.calls.rows for each in found))
        if stream is not None and not again:  # of a scan, one for each layer
            found.append(stream)
            known.add(value)
    if not found or not final:
        raise ValueError(
            f"{last.calls.site!r} returns what is added to the residual stream, and no module "
            f"receives the sums. Pass sites= the sums, which are operations such as '@add[1]': "
            f"nni.trace(model, x, only='**@add*') lists them."
        )
    return [*found, final]


def selects(selection: Selection, traced: TracedPass, site: str) -> bool:
    return selection.matches(*parse_key(site), traced.module_of(site))


def _repeated_blocks(
    traced: TracedPass, found: Sequence[ResidualStream], unembedding: Unembedding
) -> list[ResidualStream]:
    """The outermost blocks that repeat, the last such group before the norm."""
    end = traced.calls[unembedding.norm].last if unembedding.norm in traced.calls else math.inf
    groups: dict[str, list[ResidualStream]] = {}
    for stream in found:
        site, shape = stream.calls.site, stream.calls.returned[stream.array].shape
        receives = any(x.shape == shape for x in stream.calls.received)
        block = receives and not traced.has_no_params(site) and not split_operation(site)[1]
        if site and block and stream.calls.last < end:
            groups.setdefault(block_list_key(site), []).append(stream)
    repeated = [
        group
        for group in groups.values()
        if len(group) > 1 or group[0].calls.rows or group[0].calls.count > 1
    ]
    if not repeated:
        names = ", ".join(repr(s.calls.site) for s in found if s.calls.site)
        others = f" Choose the sites that do with sites=, among {names}." if names else ""
        reader = repr(unembedding.first_site) if unembedding.first_site else "the end of the model"
        raise ValueError(
            f"No block that repeats returns the residual stream that {reader} receives.{others}"
        )
    depth = min(len(parse_key(group[0].calls.site)[0]) for group in repeated)
    outermost = [g for g in repeated if len(parse_key(g[0].calls.site)[0]) == depth]
    last = max(outermost, key=lambda group: group[-1].calls.last)
    if not _are_pre_norms(traced, last):
        return last
    norms = [*(each.calls.site for each in last), unembedding.first_site]
    called = [traced.calls[site] for site in norms if site and site in traced.calls]
    return [ResidualStream(calls, 0, INPUT) for calls in called]


def _are_pre_norms(traced: TracedPass, group: Sequence[ResidualStream]) -> bool:
    """Whether blocks are norms before the parts of a layer: they receive the stream. A norm that
    ends a layer returns it: the next sum holds that.
    """
    if len(group) < 2 or not all(traced.is_norm(each.calls.site) for each in group):
        return False
    return group[0].place[::2] not in traced.residual_sums.terms_of(group[1].calls.site, INPUT, 0)
