"""Where a model turns its residual stream into logits: the last norm and the unembedding after it.

Both are proposed from the traced pass or chosen by the user, and applied to any other value of the
stream by calling the model's own modules. Invariant: what is used is named; a model in which they
cannot be found raises an error that says what was found. Measures nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.hooks.sites import (
    CALL,
    Selection,
    closest_keys,
    no_match_text,
    parse_key,
    site_key,
    split_operation,
)
from nnx_inspector.lenses.observed import Calls, Observed, arrays_in, copy_of, logits_in, module_at
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.stats.summarize import in_words
from nnx_inspector.typing import Array, Float, PyTree, Value

Unembed = str | Callable[[jax.Array], jax.Array] | None
"""A site, a function of the normalised stream, or None for a proposal."""
Norm = str | Callable[[jax.Array], jax.Array] | Literal[False] | None
"""The same for the norm; False for none."""
FUNCTION = "(function)"
UNREAD = (
    "If the model makes no logits over words or classes, a lens has nothing to read. Otherwise "
    "pass unembed= the site that makes them, or a function of the final residual stream, such as "
    "lambda x: x @ model.embed.embedding[...].T, and norm= the norm before it, or False."
)


@dataclasses.dataclass(frozen=True)
class Unembedding:
    """How logits are read from the residual stream.

    Attributes:
        unembed, norm: the site of each; `"(function)"` for a user's function, `""` for no norm, or
            for an unembedding that is not a module.
        stream: the shape of what the norm (or the unembedding, without a norm) receives in the
            pass; () if unknown.
        proposed: whether both are proposals, not the user's choice.
    """

    model: nnx.Module
    unembed: str
    norm: str
    stream: tuple[int, ...]
    _unembed: Any
    _norm: Any
    proposed: bool = False

    def normalised(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return x if not self._norm else self._called(self._norm, x)

    def logits(self, normalised: Float[Array, "*batch d"]) -> Float[Array, "*batch vocabulary"]:
        return self._called(self._unembed, normalised)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch vocabulary"]:
        return self.logits(self.normalised(x))

    def _called(self, one: Any, x: jax.Array) -> PyTree:
        if callable(one):
            return one(x)
        path, method = parse_key(one)
        module: Any = module_at(copy_of(self.model)(), path)
        return module(x) if method == CALL else getattr(module, method)(x)


def reading_of(one: Observed, unembed: Unembed, norm: Norm) -> Unembedding:
    """The reading of a pass, by the chosen unembedding and norm, or by proposals for None.

    Raises:
        ValueError: no module is called, a chosen site is not, or nothing in the pass makes logits.
    """
    one.require_calls()
    proposed = unembed is None and norm is None
    if unembed is None:
        unembed = _proposed(one)
        if unembed is None and norm is not None:
            raise ValueError(no_matrix(one))
    last = None if unembed is None else _site(one, unembed, "unembed")
    if norm is None:
        norm = _norm_in(one, _ends(one, last.site if last else None)) if proposed or last else False
    first = _site(one, norm, "norm") if norm else None
    receiver = first or last
    members = one.members(*(calls.site for calls in (first, last) if calls is not None))
    if members:
        raise ValueError(
            f"{receiver.site if receiver else ''!r} belongs to an ensemble of {members} models "
            f"that one call runs together. Pass a function that calls one of them."
        )
    received = () if receiver is None else receiver.received
    return Unembedding(
        one.model,
        "" if unembed is None else FUNCTION if last is None else last.site,
        "" if not norm else FUNCTION if first is None else first.site,
        tuple(received[0].shape) if received else (),
        unembed,
        norm,
        proposed,
    )


def _site(one: Observed, given: object, what: str) -> Calls | None:
    """The chosen site; None for a function."""
    if callable(given):
        return None
    if not isinstance(given, str):
        raise TypeError(
            f"{what}= takes the key of a site, a function of an array or None, got {given!r}."
        )
    called = one.calls
    if given not in called:
        near = ", ".join(map(repr, closest_keys(given, list(called))))
        raise ValueError(
            f"{what}={given!r} is not a site of this call. The closest are {near}. Pass "
            f"{what}=None to have it proposed."
        )
    if module_at(one.model, parse_key(given)[0]) is None:
        raise ValueError(
            f"{what}={given!r} is a Linen module inside an nnx.bridge.ToNNX and cannot be called "
            f"by itself. Pass {what}= a function of an array that does the same."
        )
    return called[given]


def _proposed(one: Observed) -> str | None:
    """The last module whose matrix makes as many classes as the model's output has, if any."""
    own = logits_in(one.shapes)
    if own is None or own.shape[-1] < 2:
        out = arrays_in(one.shapes)
        found = ", ".join(in_words(x.dtype, x.shape) for x in out) or "no array"
        raise ValueError(
            f"This model returns no logits, which are floating-point numbers [..., classes]: it "
            f"returns {found}. {UNREAD}"
        )
    if any(x.shape == own.shape and _is_restored(x) for x in one.stage.arrays):
        raise ValueError(
            f"The model's output, {in_words(own.dtype, own.shape)}, has the shape of its input, so "
            f"it is no choice among classes. {UNREAD}"
        )
    made = [s for s in _ends(one) if _makes(one, s, own.shape[-1])]
    return max(made, key=lambda site: one.calls[site].last) if made else None


def no_matrix(one: Observed) -> str:
    """The error text for a model in which no matrix makes logits."""
    own = logits_in(one.shapes)
    last = max(_ends(one) or one.calls, key=lambda site: one.calls[site].last)
    module = module_at(one.model, parse_key(last)[0])
    linen = any(isinstance(m, nnx.bridge.ToNNX) for _, m in nnx.iter_modules(one.model, graph=True))
    what = "a Linen module" if module is None or linen else f"a {type(module).__name__}"
    what += " over several positions" if _mixes(module) else ""
    return (
        f"No module's matrix makes the model's output, {in_words(own.dtype, own.shape)}: it comes "
        f"from {last!r}, {what}. {UNREAD}"
    )


def _is_restored(x: Value) -> bool:
    """Whether an input is what a model of its shape restores: not words as one-hot rows."""
    whole = jnp.issubdtype(x.dtype, jnp.floating)
    return whole and not bool(((x >= 0) & (jnp.abs(x.sum(-1, keepdims=True) - 1) < 1e-3)).all())


def _mixes(module: nnx.Module | None) -> bool:
    """Whether a module is a convolution over more than one position."""
    convolves = isinstance(module, (nnx.Conv, nnx.ConvTranspose))
    return convolves and math.prod(np.atleast_1d(module.kernel_size).tolist()) > 1


def _ends(one: Observed, after: str | None = None) -> list[str]:
    """The innermost calls from which a site (by default the model's result) receives something.

    Modules without parameters (a dropout, a soft cap) are passed over.
    """
    edges, borders, _ = one.flow
    before: dict[str, set[str]] = {}
    for edge in (*borders, *edges):
        before.setdefault(edge.consumer, set()).add(edge.producer)
    root = max(one.calls, key=lambda site: one.calls[site].last)
    found: list[str] = []
    known, waiting = {after}, [root] if after is None else list(before.get(after, ()))
    while waiting:
        site = waiting.pop()
        if site in known or site not in one.calls:
            continue
        known.add(site)
        path = parse_key(site)[0]
        producers = before.get(site, set()) - {site}
        within = [p for p in producers if _is_within(p, path)]
        if within:
            waiting += within
        elif split_operation(site)[1] or (_is_bare(one, site) and not one.is_norm(site)):
            waiting += producers
        else:
            found.append(site)
    return found


def _is_bare(one: Observed, site: str) -> bool:
    """Whether a module has no parameters, as a dropout and a soft cap."""
    module = module_at(one.model, parse_key(site)[0])
    return module is not None and not jax.tree.leaves(nnx.state(module, nnx.Param))


def _is_within(site: str, path: Sequence[str]) -> bool:
    return not split_operation(site)[1] and parse_key(site)[0][: len(path)] == tuple(path)


def _makes(one: Observed, site: str, classes: int) -> bool:
    """Whether a site's module has a matrix and returns an array of this many classes."""
    returned, received = one.calls[site].returned, one.calls[site].received
    module = module_at(one.model, parse_key(site)[0])
    if module is None or _mixes(module) or not (len(returned) == 1 and len(received) == 1):
        return False
    params = jax.tree.leaves(nnx.state(module, nnx.Param))
    shape = returned[0].shape
    return (
        len(shape) > 0
        and shape[-1] == classes
        and any(np.ndim(x) >= 2 for x in params)
        and jnp.issubdtype(received[0].dtype, jnp.floating)
    )


def _norm_in(one: Observed, ends: Sequence[str]) -> str | Literal[False]:
    """The last norm among sites; False if there is none, or if it belongs to a repeated block."""
    norms = [
        site for site in ends if one.is_norm(site) and module_at(one.model, parse_key(site)[0])
    ]
    last = max(norms, key=lambda site: one.calls[site].last) if norms else None
    return last if last is not None and not _in_repeated(one, last) else False


def _in_repeated(one: Observed, site: str) -> bool:
    """Whether a site is within one of several blocks that receive what they return."""
    path = parse_key(site)[0]
    around = {site_key(path[:end]) for end in range(1, len(path))} & set(one.calls)
    groups = {_group(block) for block in around if _repeats_itself(one.calls[block])}
    blocks = [c for other, c in one.calls.items() if _group(other) in groups]
    return any(c.rows or c.count > 1 for c in blocks) or len(blocks) > len(groups)


def _repeats_itself(calls: Calls) -> bool:
    shapes = {x.shape for x in calls.returned}
    return any(x.shape in shapes for x in calls.received)


def _group(site: str) -> str:
    """A key that the blocks of a list share, and so do attributes with a number in their names."""
    return re.sub(r"\d+", "#", site)


# --------------------------------------------------------- the residual stream


@dataclasses.dataclass(frozen=True)
class Stream:
    """A site that returns the residual stream, or receives it where no module returns it.

    Attributes:
        array: the number of the array, among those of its part, which is the stream.
    """

    calls: Calls
    array: int
    part: str = OUTPUT

    @property
    def place(self) -> tuple[str, str, int]:
        return self.calls.site, self.part, self.array

    @property
    def form(self) -> jax.ShapeDtypeStruct:
        return (self.calls.returned if self.part == OUTPUT else self.calls.received)[self.array]


def last_stream(one: Observed, reading: Unembedding) -> Stream | None:
    """What the last of the repeated blocks returns; None without such blocks."""
    try:
        return streams_of(one, reading, None)[-1]
    except ValueError:
        return None


def streams_of(one: Observed, reading: Unembedding, sites: object) -> list[Stream]:
    """The sites that return the residual stream, in the order of the pass.

    Args:
        sites: which; see `intercept_methods`. None for the repeated blocks.

    Raises:
        ValueError: there are none, or a chosen one returns something else.
    """
    size = reading.stream[-1] if reading.stream else None
    try:
        found = _streams(one, reading, sites, size)
        return found if sites is not None else _between(one, found)
    except ValueError:
        if sites is not None or size is None or not reading.proposed:
            raise
        try:  # more than one matrix may lie between the stream and the logits
            return _between(one, _streams(one, reading, None, None))
        except ValueError:
            pass
        raise


def _streams(one: Observed, reading: Unembedding, sites: object, size: int | None) -> list[Stream]:
    found: list[Stream] = []
    chosen = None if sites is None else Selection(sites)
    for site, calls in sorted(one.calls.items(), key=lambda item: item[1].last):
        if chosen is not None and not selects(chosen, one, site):
            continue
        fits = [
            i
            for i, x in enumerate(calls.returned)
            if len(x.shape) >= 2
            and x.shape[-1] == (size or x.shape[-1])
            and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        if fits:
            found.append(Stream(calls, fits[0]))
        elif chosen is not None:
            words = ", ".join(in_words(x.dtype, x.shape) for x in calls.returned) or "no array"
            raise ValueError(
                f"{site!r} returns {words}, which is not the residual stream: "
                f"{reading.norm or reading.unembed!r} receives arrays of {size} features."
            )
    if chosen is not None:
        if not found:
            raise ValueError(no_match_text(chosen, list(one.calls)))
        return found
    return _repeated(one, found, reading)


_Given = dict[tuple[str, str, str], set[tuple[str, str]]]
"""By site, part and form of an array: the calls, each with a part, from which it is made."""


def _between(one: Observed, blocks: list[Stream]) -> list[Stream]:
    """The streams, given the repeated blocks: what they return or, where the code around them adds
    that to the stream, what comes in between the sums.
    """
    last, given = blocks[-1], _given_by_site(one)
    if last.part == INPUT:
        return blocks
    form = in_words(last.form.dtype, last.form.shape)
    end = _first_sum(one, last, given, form)
    return blocks if end is None else _sums(one, last, given, end, form)


def _place(one: Observed, site: str) -> int:
    return one.calls[site].last


def _given_by_site(one: Observed) -> _Given:
    """The edges of the pass by what receives; what encloses a call returns after it."""
    edges, borders, _ = one.flow
    found: _Given = {}
    inner = set(borders)
    for edge in (*edges, *borders):
        later = _place(one, edge.producer) - _place(one, edge.consumer)
        inward, outward = edge in inner and later >= 0, edge in inner and later <= 0
        key = (edge.consumer, OUTPUT if outward else INPUT, edge.shape)
        found.setdefault(key, set()).add((edge.producer, INPUT if inward else OUTPUT))
    return found


def _added_by(one: Observed, last: Stream, given: _Given) -> set[tuple[str, str]]:
    """What the last block returns, and what modules without parameters, as a dropout, make of
    it.
    """
    found = {last.place[:2]}
    for (site, part, _), sources in sorted(given.items(), key=lambda item: _place(one, item[0][0])):
        if part == INPUT and sources & found and _is_bare(one, site):
            found.add((site, OUTPUT))
    return found


def _before(last: Stream, form: str, given: _Given) -> set[tuple[str, str]]:
    """The calls through which the stream comes to the last block."""
    found, waiting = set[tuple[str, str]](), [last.place[:2]]
    while waiting:
        fresh = given.get((waiting.pop()[0], INPUT, form), set()) - found
        found |= fresh
        waiting += fresh
    return found


def _first_sum(
    one: Observed, last: Stream, given: _Given, form: str
) -> tuple[str, str, str] | None:
    """Where what the last block adds first comes together with the stream before it, if it does."""
    added = _added_by(one, last, given)
    before = _before(last, form, given) - added
    root, own = max(one.calls, key=lambda site: _place(one, site)), logits_in(one.shapes)
    logits = None if own is None else in_words(own.dtype, own.shape)
    sums = [
        key
        for key, sources in given.items()
        if added & sources and before & sources and (key[0] != root or key[2] == logits)
        if _place(one, key[0]) > last.calls.last and not _is_bare(one, key[0])
    ]
    return min(sums, key=lambda key: _place(one, key[0])) if sums else None


def _sums(
    one: Observed, last: Stream, given: _Given, end: tuple[str, str, str], form: str
) -> list[Stream]:
    """The places that receive the stream between its sums, up to the last."""
    number = {(a.stack[-1], a.received, a.shape): a.value for a in one.flow[2]}

    def stream_at(site: str, part: str) -> Stream | None:
        calls = one.calls[site]
        for i, x in enumerate(calls.received if part == INPUT else calls.returned):
            if in_words(x.dtype, x.shape) == form and one.walk.is_sum(site, part, i):
                return Stream(calls, i, part)
        return None

    final = stream_at(*end[:2])
    known = {number.get((end[0], end[1] == INPUT, form))}
    found: list[Stream] = []
    for site, calls in sorted(one.calls.items(), key=lambda item: item[1].last):
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


def selects(selection: Selection, one: Observed, site: str) -> bool:
    path, method = parse_key(site)
    return selection.matches(path, method, module_at(one.model, path))


def _repeated(one: Observed, found: Sequence[Stream], reading: Unembedding) -> list[Stream]:
    """The outermost blocks that repeat, the last such group before the norm."""
    end = one.calls[reading.norm].last if reading.norm in one.calls else math.inf
    groups: dict[str, list[Stream]] = {}
    for stream in found:
        site, shape = stream.calls.site, stream.calls.returned[stream.array].shape
        receives = any(x.shape == shape for x in stream.calls.received)
        block = receives and not _is_bare(one, site) and not split_operation(site)[1]
        if site and block and stream.calls.last < end:
            groups.setdefault(_group(site), []).append(stream)
    repeated = [
        group
        for group in groups.values()
        if len(group) > 1 or group[0].calls.rows or group[0].calls.count > 1
    ]
    if not repeated:
        names = ", ".join(repr(s.calls.site) for s in found if s.calls.site)
        others = f" Choose the sites that do with sites=, among {names}." if names else ""
        read_by = reading.norm or reading.unembed
        reader = repr(read_by) if read_by else "the end of the model"
        raise ValueError(
            f"No block that repeats returns the residual stream that {reader} receives.{others}"
        )
    depth = min(len(parse_key(group[0].calls.site)[0]) for group in repeated)
    outermost = [g for g in repeated if len(parse_key(g[0].calls.site)[0]) == depth]
    last = max(outermost, key=lambda group: group[-1].calls.last)
    if not _stands_beside(one, last):
        return last
    norms = [each.calls.site for each in last] + [reading.norm or reading.unembed]
    return [Stream(one.calls[site], 0, INPUT) for site in norms if site and site in one.calls]


def _stands_beside(one: Observed, group: Sequence[Stream]) -> bool:
    """Whether blocks are norms before the parts of a layer: they receive the stream. A norm that
    ends a layer returns it: the next sum holds that.
    """
    if len(group) < 2 or not all(one.is_norm(each.calls.site) for each in group):
        return False
    return group[0].place[::2] not in one.walk.of_mark(group[1].calls.site, INPUT, 0)
