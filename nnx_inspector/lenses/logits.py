"""Direct logit attribution: what each site adds to the logit of one token.

The final residual stream is a sum of what sites add to it, and the path from it to a logit is
linear once the scale of the final norm is held at its value in the pass. Invariant: the rows add up
to the logit within rounding; what no site accounts for has rows of its own. Changes no model.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector._compat.sharding import auto_sharded, keeping_sharding
from nnx_inspector.hooks.sites import Only, Selection, no_match_text
from nnx_inspector.lenses.downstream import LINEAR, LinearEvaluation
from nnx_inspector.lenses.lens import (
    Decode,
    Readout,
    as_logits,
    axis_names,
    choose_readout,
    likeliest,
    readout_candidates,
    readout_name,
    text_function,
    token_at,
)
from nnx_inspector.lenses.residual_stream import last_stream, selects
from nnx_inspector.lenses.residual_terms import ResidualTerm
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
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.typing import Array, Float, Int, PyTree, Value

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

REST, BIAS, NOT_ADDITIVE = "(rest of the stream)", "(biases)", "(not additive)"
_Floats = npt.NDArray[np.floating[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What each site adds to the logit of a token.

    The arrays have the axes of the positions, `[batch, length]`, after that of the sites.

    Attributes:
        sites: the sites that add to the stream, in the order of the pass (`"blocks/mlp[3]"` for a
            layer of a stack); then `"(rest of the stream)"`, what no named site adds;
            `"(biases)"`, what the norm and the unembedding add by themselves; and, if the model
            bends its logits afterwards (a soft cap), `"(not additive)"`, what that changes.
        contributions: what each adds to the logit, `[sites, *positions]`.
        token: the token whose logit it is, `[*positions]`.
        logit: the logit, or the difference of two, `[*positions]`.
        unembed, norm: the sites that turn the stream into logits; see `Lens`.
        gap: the largest difference between these logits and the model's own; None if they cannot
            be compared.
    """

    sites: tuple[str, ...]
    contributions: _Floats
    token: npt.NDArray[np.integer[Any]]
    logit: _Floats
    unembed: str
    norm: str
    gap: float | None

    def to_frame(self, decode: Decode | None = None) -> pd.DataFrame:
        """A tidy pandas DataFrame, with a row for each site and position.

        Args:
            decode: a function of a token's number that returns its text, or the texts of all
                numbers, for the column `token`.

        Columns: `site`; `example, position` (or `axis_0, ...`); `token, contribution, logit`.
        """
        import pandas as pd

        shape = self.contributions.shape
        index = np.indices(shape).reshape(len(shape), -1)
        tokens = np.broadcast_to(self.token, shape).ravel()
        columns = {
            "site": np.asarray(self.sites)[index[0]],
            **dict(zip(axis_names(len(shape) - 1), index[1:], strict=True)),
            "token": text_function(decode)(tokens),
            "contribution": self.contributions.ravel(),
            "logit": np.broadcast_to(self.logit, shape).ravel(),
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        how, shape = readout_name(self.unembed, self.norm), self.token.shape
        return f"LogitAttribution({len(self.sites)} rows, {how}, positions {shape})"


def logit_attribution(
    f: object,
    /,
    *args: object,
    token: object = None,
    minus: object = None,
    unembed: Unembed = None,
    norm: Norm = None,
    sites: Only = None,
    **kwargs: object,
) -> LogitAttribution:
    """Divide a token's logit into what each site adds to it (direct logit attribution).

    Which sites add to the residual stream is read from the traced program. The scale of the final
    norm (the root of a variance, or of a mean square) is held at its value in the pass. Each
    position has parts of its own, so padding needs no `where=`.

    Args:
        f: the model, or a method of it or a function of it that returns logits.
        args: its arguments.
        token: the token: a number, or an array of them that broadcasts to the positions. By
            default what the model says at each position.
        minus: another token, whose logit is subtracted: what says the one rather than the other?
        unembed, norm: as in `lens`.
        sites: which of the sites that add to the stream get a row of their own; see
            `intercept_methods`. By default all. Name operations too where something is added that
            no module returns: `["**", "**@relu"]`.
        kwargs: keyword arguments of `f`.

    Raises:
        ValueError: as in `lens`; or `sites` names a site that adds nothing to the stream itself.
        TypeError: `f` is neither a module nor a function of one, or a token is not an integer.
        InspectorError: it is called within a traced function.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.token, self.mlp = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        ...         self.norm, self.head = nnx.RMSNorm(4, rngs=rngs), nnx.Linear(4, 7, rngs=rngs)
        ...
        ...     def __call__(self, tokens):
        ...         x = self.token(tokens)
        ...         return self.head(self.norm(x + self.mlp(x)))
        >>> found = nni.logit_attribution(Model(nnx.Rngs(0)), jnp.ones((1, 3), int), token=2)
        >>> found.sites
        ('token', 'mlp', '(rest of the stream)', '(biases)')
        >>> bool(jnp.allclose(found.contributions.sum(0), found.logit, atol=1e-5))
        True
    """
    with trace_pass(
        f, args, kwargs, what="logit_attribution", only=with_operations(sites)
    ) as traced:
        unembedding = unembedding_of(traced, unembed, norm)
        end, named = _residual_terms(traced, unembedding)
        if sites is not None:
            chosen = Selection(sites)
            named = tuple(each for each in named if selects(chosen, traced, each[0]))
            if not named:
                raise ValueError(_no_terms_text(chosen, traced))
        out, values = traced.run({*((site, OUTPUT) for site, _ in named), end[:2]})
        stream = values[end[:2]][-1][end[2]]
        stream = stream[(-1,) * (stream.ndim - len(end[3]))]
        names: list[str] = []
        terms: list[Value] = []
        for site, array in named:
            for arrays in values[site, OUTPUT]:
                for name, at in rows_of(site, traced.calls[site].rows):
                    names.append(name)
                    terms.append(arrays[array][at])
        own, distribution = as_logits(logits_in(out))
        readouts = readout_candidates(traced, unembedding, end[:3], stream, distribution)
        readout, gap = choose_readout(traced, readouts, stream, own, required=False)
        shape = jax.eval_shape(readout, stream).shape
        divided = _compile_contributions(readout, distribution)
        found = divided(stream, terms, token_at(token, shape), token_at(minus, shape))
    contributions, chosen_token, logit, beyond = jax.device_get(found)
    also = (NOT_ADDITIVE,) if beyond is not None else ()
    return LogitAttribution(
        sites=(*names, REST, BIAS, *also),
        contributions=contributions if beyond is None else np.stack([*contributions, beyond]),
        token=chosen_token,
        logit=logit,
        unembed=readout.unembed,
        norm=readout.norm,
        gap=gap,
    )


_FinalStream = tuple[str, str, int, tuple[int, ...]]
"""The site, the part, the number of the array, and its shape, of the final stream."""


def _residual_terms(
    traced: TracedPass, unembedding: Unembedding
) -> tuple[_FinalStream, tuple[ResidualTerm, ...]]:
    """Where the final stream is, and its addends."""
    ends: list[_FinalStream] = []
    first = unembedding.first_site
    if first and first in traced.calls:
        ends.append((first, INPUT, 0, unembedding.stream))
    last = last_stream(traced, unembedding)
    if last is not None:  # where only some positions reach the norm
        ends.append((*last.place, tuple(last.form.shape)))
    if not ends:
        raise ValueError(no_matrix_text(traced))
    for end in ends:
        counts = Counter(traced.residual_sums.terms_of(*end[:3]))
        named = [each for each, count in counts.items() if count == traced.calls[each[0]].count]
        if named:
            return end, tuple(sorted(named, key=lambda each: traced.last_call(each[0])))
    return ends[0], ()


def _no_terms_text(chosen: Selection, traced: TracedPass) -> str:
    known = list(traced.calls)
    if not any(selects(chosen, traced, site) for site in known):
        return no_match_text(chosen, known)
    return (
        "None of the chosen sites adds to the residual stream directly: something else is computed "
        "from what they return. Leave sites= out to see those that do."
    )


def _compile_contributions(readout: Readout, distribution: bool) -> PyTree:
    @jax.jit
    def divide(stream: Value, terms: Sequence[Value], wanted: object, other: object) -> PyTree:
        stream = stream.astype(jnp.float32)
        closed: Value = jax.make_jaxpr(readout)(stream)
        own: Value = closed.out_avals[0]

        def linear(x: object) -> tuple[Value, Value]:
            evaluation = LinearEvaluation(own.shape[-1])
            (out,), (kind,) = evaluation.run(closed.jaxpr, closed.consts, [x], [LINEAR])
            logits = out if kind == LINEAR else evaluation.logits
            if logits is None:
                raise ValueError(
                    f"What {readout_name(readout.unembed, readout.norm)!r} does to the residual "
                    f"stream is not linear, so its logits are not a sum over sites. Pass unembed= "
                    f"the last matrix, or a linear function; nni.attribute serves any model."
                )
            return logits.astype(jnp.float32), None if kind == LINEAR else out

        logits, pull, out = jax.vjp(linear, stream, has_aux=True)
        last = logits if out is None or distribution else out.astype(jnp.float32)
        if last.shape != logits.shape:  # what comes after it is of another form
            last = logits
        token = likeliest(last) if wanted is None else wanted
        onehot = keeping_sharding(_onehot, logits, token, other)
        direction = pull(onehot)[0]
        summed = (*range(logits.ndim - 1, stream.ndim - 1), -1)  # of a pooling, the positions too

        def added(
            stream: Value, direction: object, terms: Value, onehot: object, logits: Value
        ) -> PyTree:
            def along(x: Value) -> PyTree:
                return (direction * x.astype(jnp.float32)).sum(summed)

            before, logit = ((x * onehot).sum(-1) for x in logits)
            whole = along(stream)
            found = [along(jnp.broadcast_to(term, stream.shape)) for term in terms]
            rest = whole - sum(found, jnp.zeros_like(whole))
            return jnp.stack([*found, rest, before - whole]), logit, logit - before

        args = stream, direction, terms, onehot, (logits, last)
        contributions, logit, beyond = auto_sharded(added, *args)
        return contributions, token, logit, None if last is logits else beyond

    return divide


def _onehot(
    logits: Float[Array, "*batch vocabulary"],
    token: Int[Array, "*batch"],
    other: Int[Array, "*batch"] | None,
) -> Float[Array, "*batch vocabulary"]:
    """1 for each token, -1 for the other one."""
    tokens = (token,) if other is None else (token, other)
    found = [jax.nn.one_hot(t, logits.shape[-1], dtype=jnp.float32) for t in tokens]
    return found[0] - sum(found[1:], jnp.zeros_like(found[0]))
