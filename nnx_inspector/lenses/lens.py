"""The logit lens: what a model's residual stream already says after each of its layers.

The model's own final norm and unembedding are applied to the stream of every layer, one layer at a
time, and only the likeliest tokens are kept. If the two do not turn the last layer's stream into
the model's logits, everything that the model does after that layer is applied instead. Invariant:
the last layer's lens is the model's own answer, unless the user has chosen otherwise; `gap` is the
difference. Changes no model.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector._compat.sharding import auto_sharded, keeping_sharding
from nnx_inspector.hooks.sites import Only
from nnx_inspector.lenses.downstream import LINEAR, Downstream, LinearEvaluation, Place
from nnx_inspector.lenses.residual_stream import ResidualStream, last_stream, streams_of
from nnx_inspector.lenses.traced_pass import (
    TracedPass,
    logits_in,
    rows_of,
    trace_pass,
    with_operations,
)
from nnx_inspector.lenses.unembedding import (
    Norm,
    Unembed,
    Unembedding,
    no_matrix_text,
    unembedding_of,
)
from nnx_inspector.program.marks import INPUT
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Array, Float, Int, PyTree, Value

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_Floats = npt.NDArray[np.floating[Any]]
_Ints = npt.NDArray[np.integer[Any]]
Decode = Callable[[int], str] | Sequence[str] | Mapping[int, str]
"""Turns a token's number into text."""
Readout = Unembedding | Downstream
"""What turns the residual stream into logits."""
_ROUNDING = 0.01
"""How far a sum of probabilities may be from 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lens:
    """What the residual stream says after each layer.

    The arrays have an axis for the layers and then those of the positions, `[batch, length]`.

    Attributes:
        sites: the layers, such as `"blocks/0"`, or `"blocks[0]"` for one of a stack. The first is
            what the first block receives, `"blocks/0 input"`.
        unembed, norm: the sites that turn the stream into logits; `""` for no norm,
            `"(function)"` for a function, `"(all after blocks/3)"` for everything that the model
            does after its last layer.
        tokens: the k likeliest tokens, `[layers, *positions, k]`.
        probabilities: their probabilities.
        answer: the token that is followed through the layers, `[*positions]`.
        answer_probability: its probability, `[layers, *positions]`.
        answer_rank: its rank; 1 for the likeliest.
        gap: the largest difference between the logits of the last layer and the model's own; None
            if they cannot be compared.
    """

    sites: tuple[str, ...]
    unembed: str
    norm: str
    tokens: _Ints
    probabilities: _Floats
    answer: _Ints
    answer_probability: _Floats
    answer_rank: _Ints
    gap: float | None

    def to_frame(self, decode: Decode | None = None) -> pd.DataFrame:
        """A tidy pandas DataFrame, with a row for each layer and position.

        Args:
            decode: a function of a token's number that returns its text, or the texts of all
                numbers, for the columns `token` and `answer`.

        Columns: `layer, site`; `example, position` (or `axis_0, ...` for another number of axes);
        `token`, the likeliest, and its `probability`; `answer, answer_probability, answer_rank`.
        """
        import pandas as pd

        shape = self.answer_rank.shape
        index = np.indices(shape).reshape(len(shape), -1)
        text = text_function(decode)
        answers = np.broadcast_to(self.answer, shape)
        columns = {
            "layer": index[0],
            "site": np.asarray(self.sites)[index[0]],
            **dict(zip(axis_names(len(shape) - 1), index[1:], strict=True)),
            "token": text(self.tokens[..., 0].ravel()),
            "probability": self.probabilities[..., 0].ravel(),
            "answer": text(answers.ravel()),
            "answer_probability": self.answer_probability.ravel(),
            "answer_rank": self.answer_rank.ravel(),
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        gap = "" if self.gap is None else f", gap {self.gap:.2g}"
        how, shape = readout_name(self.unembed, self.norm), self.answer.shape
        return f"Lens({len(self.sites)} layers, {how}, positions {shape}{gap})"


def text_function(decode: Decode | None) -> Callable[[_Ints], Any]:
    """A function that turns an array of tokens into texts; without `decode` they stay numbers."""
    if decode is None:
        return lambda tokens: tokens
    text = decode if callable(decode) else decode.__getitem__
    return np.vectorize(text, otypes=[object])


def axis_names(count: int) -> tuple[str, ...]:
    """Names for the axes of an array over places."""
    known = {1: ("example",), 2: ("example", "position")}
    return known.get(count, tuple(f"axis_{i}" for i in range(count)))


def lens(
    f: object,
    /,
    *args: object,
    unembed: Unembed = None,
    norm: Norm = None,
    answer: object = None,
    k: int = 5,
    sites: Only = None,
    **kwargs: object,
) -> Lens:
    """Read, after each layer, the tokens that the residual stream already says.

    The stream is what the repeated blocks return. The model's own final norm and unembedding are
    applied to it, at every position. Each position has rows of its own, so padding needs no
    `where=`; only `gap` is the largest over all of them. The model does not change.

    Args:
        f: the model, or a method of it or a function of it that returns logits `[..., classes]`: of
            several arrays the one named `logits`, or else the first.
        args: its arguments.
        unembed: the site that turns the normalised stream into logits: `"head"`, or
            `"token:attend"` for an embedding that is tied; or a function of an array. By default
            the last matrix that makes as many classes as the model's output has. If no module has
            it, or more happens to the logits (a soft cap, a pooling, a norm written by hand), it is
            everything that the model does after its last layer.
        norm: the final norm before it, in the same way; False for none. By default the norm whose
            output it receives.
        answer: the token to follow: a number, or an array of them that broadcasts to the
            positions. By default what the last layer says at each position.
        k: how many of the likeliest tokens to keep.
        sites: the sites that return the stream; see `intercept_methods`. By default the outermost
            blocks that repeat, in a list, a scan or a loop; or, where the code around them adds
            what they return to the stream, the sites that receive the sums. Where no module
            returns or receives it, an operation returns it: `"blocks/*@add[1]"`.
        kwargs: keyword arguments of `f`.

    Raises:
        ValueError: no logits, no unembedding or no repeated block is found (the text says what
            is); a chosen site is not called; a token is out of range.
        TypeError: `f` is neither a module nor a function of one.
        InspectorError: it is called within a traced function.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.mlp = nnx.Linear(4, 4, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         return x + self.mlp(x)
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.token = nnx.Embed(7, 4, rngs=rngs)
        ...         self.blocks = nnx.Sequential(*[Block(rngs) for _ in range(2)])
        ...         self.norm, self.head = nnx.RMSNorm(4, rngs=rngs), nnx.Linear(4, 7, rngs=rngs)
        ...
        ...     def __call__(self, tokens):
        ...         return self.head(self.norm(self.blocks(self.token(tokens))))
        >>> found = nni.lens(Model(nnx.Rngs(0)), jnp.ones((1, 3), int), k=2)
        >>> found.unembed, found.norm, found.tokens.shape
        ('head', 'norm', (3, 1, 3, 2))
        >>> found.sites
        ('blocks/layers/0 input', 'blocks/layers/0', 'blocks/layers/1')
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a number of tokens, 1 or more, got {k!r}.")
    with trace_pass(f, args, kwargs, what="lens", only=with_operations(sites)) as traced:
        unembedding = unembedding_of(traced, unembed, norm)
        streams = streams_of(traced, unembedding, sites)
        end = streams[-1] if sites is None else last_stream(traced, unembedding) or streams[-1]
        names, stack, last, out = stack_streams(traced, streams, end)
        own, distribution = as_logits(logits_in(out))
        readouts = readout_candidates(traced, unembedding, end.place, last, distribution)
        if last.shape != stack.shape[1:]:  # the layers were chosen, and are of another form
            readouts = [each for each in readouts if each is unembedding] or readouts
        required = unembedding.proposed and sites is None
        readout, gap = choose_readout(traced, readouts, last, own, required=required)
        shape = jax.eval_shape(readout, last).shape
        wanted = token_at(answer, shape)
        ranking = _compile_ranking(readout, min(k, shape[-1]))
        found: Any = jax.device_get(ranking(stack, last, wanted))
    return Lens(names, readout.unembed, readout.norm, *found, gap=gap)


def readout_candidates(
    traced: TracedPass, unembedding: Unembedding, place: Place, last: jax.Array, distribution: bool
) -> list[Readout]:
    """The ways in which logits may be read from the stream at a place, the preferred one first."""
    takes_it = unembedding.stream[-1:] in ((), last.shape[-1:])
    found: list[Readout] = [unembedding] if unembedding.unembed and takes_it else []
    downstream = Downstream(traced, *place, distribution)
    return [*found, downstream] if unembedding.proposed and downstream.is_replaceable else found


def readout_name(unembed: str, norm: str) -> str:
    """What reads logits, in words: `"head after norm"`."""
    return " after ".join(filter(None, (unembed, norm)))


def choose_readout(
    traced: TracedPass,
    readouts: Sequence[Readout],
    last: Float[Array, "*batch d"],
    own: Value,
    *,
    required: bool,
) -> tuple[Readout, float | None]:
    """The first reading that turns its last stream into the model's own logits, and how far off it
    is.

    Raises:
        ValueError: none does, and one is required; or nothing makes logits.
    """
    found: list[tuple[Readout, float | None]] = []
    for readout in readouts:
        if isinstance(readout, Downstream) and not makes_logits(readout, last, own):
            continue
        gap = logit_gap(jax.jit(readout)(last), own)
        found.append((readout, gap))
        if is_rounding(gap, own):
            return found[-1]
    if not found:
        raise ValueError(no_matrix_text(traced))
    if required:
        place = next((readout for readout in readouts if isinstance(readout, Downstream)), None)
        raise ValueError(_mismatch_text(traced, place, found[0], own))
    return found[0]


def makes_logits(downstream: Downstream, last: jax.Array, own: Value) -> bool:
    """Whether a matrix makes logits from what enters at a place."""
    evaluation = LinearEvaluation(own.shape[-1])

    def run(x: object) -> PyTree:
        closed: Value = jax.make_jaxpr(downstream)(x)
        return evaluation.run(closed.jaxpr, closed.consts, [x], [LINEAR])[0]

    jax.eval_shape(run, last)
    # of a window there is one answer, by a pooling after it
    return evaluation.product or (evaluation.window and own.ndim == 2)


def _mismatch_text(
    traced: TracedPass,
    downstream: Downstream | None,
    best: tuple[Readout, float | None],
    own: Value,
) -> str:
    how = readout_name(best[0].unembed, best[0].norm)
    differ = "are of another shape" if best[1] is None else f"differ by up to {best[1]:.2g}"
    site = downstream.site if downstream is not None else ""
    rows = traced.calls[site].rows if site in traced.calls else ()
    times = f" {site!r} runs in a scan of {rows[0]}: time steps are not layers." if rows else ""
    return (
        f"The logits that {how!r} reads from the last layer are not the model's: they "
        f"{differ}, and the model's are {type_text(own.dtype, own.shape)}.{times} Choose the sites "
        f"that return the residual stream with sites=, or pass unembed= a function of it."
    )


def _compile_ranking(readout: Readout, k: int) -> PyTree:
    @jax.jit
    def ranking(stack: object, last: Value, wanted: object) -> PyTree:
        chosen = likeliest(readout(last)) if wanted is None else wanted

        def ranked_at(x: Value) -> PyTree:
            return auto_sharded(ranked, readout(x), chosen)

        tokens, top, probability, rank = jax.lax.map(ranked_at, stack)
        return tokens, top, chosen, probability, rank

    def ranked(logits: Value, chosen: Value) -> PyTree:
        logits = logits.astype(jnp.float32)
        top, tokens = jax.lax.top_k(logits, k)
        own = jnp.take_along_axis(logits, chosen[..., None], -1)
        total = jax.nn.logsumexp(logits, -1, keepdims=True)
        rank = 1 + (logits > own).sum(-1)
        return tokens, jnp.exp(top - total), jnp.exp(own - total)[..., 0], rank

    return ranking


def likeliest(logits: Float[Array, "*batch vocabulary"]) -> Int[Array, "*batch"]:
    return auto_sharded(lambda x: jnp.argmax(x, -1), logits)


def stack_streams(
    traced: TracedPass, streams: Sequence[ResidualStream], end: ResidualStream
) -> tuple[tuple[str, ...], jax.Array, jax.Array, Any]:
    """The layers' names, their residual streams as one array, the stream at the end, the pass's
    result.

    The first layer is what the first block receives, if that is a stream too.
    """
    first = streams[0].calls
    shape = streams[0].form.shape
    received = [
        i
        for i, x in enumerate(first.received)
        if x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    # a norm may receive an unfinished sum
    if streams[0].part == INPUT or traced.is_norm(first.site):
        received = []
    wanted = {stream.place[:2] for stream in (*streams, end)}
    if received:
        wanted.add((first.site, INPUT))
    out, values = traced.run(wanted)
    names: list[str] = []
    found: list[Value] = []
    if received:
        names.append(f"{first.site} input")
        found.append(values[first.site, INPUT][0][received[0]][(0,) * len(first.rows)])
    for stream in streams:
        site, rows = stream.calls.site, stream.calls.rows
        for number, arrays in enumerate(values[stream.place[:2]]):
            call = f" call {number}" * (stream.calls.count > 1)
            call += " input" * (stream.part == INPUT)
            for name, at in rows_of(site, rows):
                names.append(name + call)
                found.append(arrays[stream.array][at])
    shapes = {x.shape for x in found}
    if len(shapes) > 1:
        raise ValueError(
            f"The residual streams of {names[0]!r} to {names[-1]!r} have different shapes, "
            f"{sorted(shapes)}. Choose sites of one shape with sites=."
        )
    last = values[end.place[:2]][-1][end.array][(-1,) * len(end.calls.rows)]
    # stacked along a new first axis, each where the last one lies
    stack = jnp.stack([keeping_sharding(lambda _, x: x, found[-1], x) for x in found])
    return tuple(names), stack, last, out


def token_at(token: object, shape: Sequence[int], *, what: str = "A token") -> jax.Array | None:
    """The chosen token at each position; None for none. Errors call it `what`."""
    if token is None:
        return None
    given = np.asarray(token)  # NumPy takes a text too, which jax refuses in words of its own
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"{what} is an integer, or an array of them, got {given.dtype}.")
    chosen = jnp.asarray(given)
    places, classes = tuple(shape[:-1]), shape[-1]
    if bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(f"{what} is out of range: there are {classes}, from 0 to {classes - 1}.")
    if chosen.ndim == 1 and len(places) == 2 and chosen.shape == places[:1] != places[1:]:
        chosen = chosen[:, None]  # one for each example
    try:
        return jnp.broadcast_to(chosen, places)
    except ValueError:
        raise ValueError(
            f"Tokens of shape {list(chosen.shape)} do not fit the positions {list(places)}."
        ) from None


def as_logits(own: jax.Array | None) -> tuple[jax.Array | None, bool]:
    """A model's output as logits, and whether it is probabilities, which become logarithms."""
    if own is None:
        return None, False
    sums = jnp.abs(own.sum(-1) - 1) <= _ROUNDING
    distribution = bool((own >= 0).all() & sums.all())
    return (jnp.log(own), True) if distribution else (own, False)


def logit_gap(
    last: Float[Array, "*batch vocabulary"], own: Float[Array, "*batch vocabulary"] | None
) -> float | None:
    """The largest difference of logits.

    The model's own may be those of the last position, or logarithms of probabilities, which
    determine logits up to a constant.
    """
    if own is None:
        return None
    at_last = own.size != last.size and last.ndim > 2
    if own.size != (last.size // last.shape[-2] if at_last else last.size):
        return None

    def largest(last: jax.Array, own: jax.Array) -> jax.Array:
        last = last[..., -1, :] if at_last else last
        last, own = (x.astype(jnp.float32) for x in (last.reshape(own.shape), own))
        logarithms = (jnp.abs(jax.nn.logsumexp(own, -1)) <= _ROUNDING).all()
        last = jnp.where(logarithms, jax.nn.log_softmax(last), last)
        known = jnp.isfinite(own)
        gap = jnp.abs(jnp.where(known, last - own, 0)).max()
        return jnp.where(known.any(), gap, jnp.nan)

    return float(auto_sharded(largest, last, own))


def is_rounding(gap: float | None, own: jax.Array | None) -> bool:
    """Whether a gap is only rounding."""
    if gap is None or own is None:
        return False
    size = float(jnp.abs(jnp.where(jnp.isfinite(own), own, 0)).max())
    return not gap > max(1e-3, 8 * float(jnp.finfo(own.dtype).eps)) * size
