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

from nnx_inspector._compat import jaxprs
from nnx_inspector.hooks.sites import Only, Selection, nothing_selected
from nnx_inspector.lenses.addends import Addend, Walk
from nnx_inspector.lenses.lens import (
    Decode,
    gap_between,
    logits_in,
    place_names,
    texts_by,
    token_at,
)
from nnx_inspector.lenses.observed import Observed, and_operations, observed, rows_of
from nnx_inspector.lenses.reading import (
    Norm,
    Reading,
    Unembed,
    reading_of,
    selects,
    streams_of,
)
from nnx_inspector.program.analysis.equations import bodies_of, kind_of
from nnx_inspector.program.marks import INPUT, OUTPUT

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

REST, BIAS = "(rest of the stream)", "(biases)"
_SCALES = {"rsqrt", "sqrt", "cbrt", "pow"}
"""The primitives that make the scale of a norm."""

_Floats = npt.NDArray[np.floating[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What each site adds to the logit of a token.

    The arrays have the axes of the positions, `[batch, length]`, after that of the sites.

    Attributes:
        sites: the sites that add to the stream, in the order of the pass (`"blocks/mlp[3]"` for a
            layer of a stack); then `"(rest of the stream)"`, what is in the stream and no named
            site adds; then `"(biases)"`, what the norm and the unembedding add by themselves.
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
            **dict(zip(place_names(len(shape) - 1), index[1:], strict=True)),
            "token": texts_by(decode)(tokens),
            "contribution": self.contributions.ravel(),
            "logit": np.broadcast_to(self.logit, shape).ravel(),
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        how = " after ".join(filter(None, (self.unembed, self.norm)))
        return f"LogitAttribution({len(self.sites)} rows, {how}, positions {self.token.shape})"


def logit_attribution(
    f: Any,
    /,
    *args: Any,
    token: Any = None,
    minus: Any = None,
    unembed: Unembed = None,
    norm: Norm = None,
    sites: Only = None,
    **kwargs: Any,
) -> LogitAttribution:
    """Divide a token's logit into what each site adds to it (direct logit attribution).

    Which sites add to the residual stream is read from the traced program. The scale of the final
    norm (the root of a variance, or of a mean square) is held at its value in the pass.

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
    with observed(f, args, kwargs, what="logit_attribution", only=and_operations(sites)) as one:
        reading = reading_of(one, unembed, norm)
        end, named = _addends(one, reading)
        if sites is not None:
            chosen = Selection(sites)
            named = tuple(each for each in named if selects(chosen, one, each[0]))
            if not named:
                raise ValueError(_adds_nothing(chosen, one))
        out, values = one.run({*((site, OUTPUT) for site, _ in named), end[:2]})
        stream = values[end[:2]][-1][end[2]]
        stream = stream[(-1,) * (stream.ndim - len(end[3]))]
        names: list[str] = []
        terms: list[Any] = []
        for site, array in named:
            for arrays in values[site, OUTPUT]:
                for name, at in rows_of(site, one.calls[site].rows):
                    names.append(name)
                    terms.append(arrays[array][at])
        shape = jax.eval_shape(reading, stream).shape
        *found, logits = _divide(reading)(
            stream, terms, token_at(token, shape), token_at(minus, shape)
        )
    contributions, chosen_token, logit = jax.device_get(found)
    return LogitAttribution(
        sites=(*names, REST, BIAS),
        contributions=contributions,
        token=chosen_token,
        logit=logit,
        unembed=reading.unembed,
        norm=reading.norm,
        gap=gap_between(logits, logits_in(out)),
    )


_End = tuple[str, str, int, tuple[int, ...]]
"""The site, the part, the number of the array, and its shape, of the final stream."""


def _addends(one: Observed, reading: Reading) -> tuple[_End, tuple[Addend, ...]]:
    """Where the final stream is, and what is added to make it."""
    walk = Walk(one.stage.survey.jaxpr, one.stage.owner)
    ends: list[_End] = []
    first = reading.norm if reading.norm in one.calls else reading.unembed
    if first in one.calls:
        ends.append((first, INPUT, 0, reading.stream))
    try:
        last = streams_of(one, reading, None)[-1]
    except ValueError:
        if not ends:
            raise
    else:  # where only some positions reach the norm
        shape = tuple(last.calls.returned[last.array].shape)
        ends.append((last.calls.site, OUTPUT, last.array, shape))
    for end in ends:
        counts = Counter(walk.of_mark(*end[:3]))
        named = [each for each, count in counts.items() if count == one.calls[each[0]].count]
        if named:
            return end, tuple(sorted(named, key=lambda each: one.calls[each[0]].last))
    return ends[0], ()


def _adds_nothing(chosen: Selection, one: Observed) -> str:
    known = list(one.calls)
    if not any(selects(chosen, one, site) for site in known):
        return nothing_selected(chosen, known)
    return (
        "None of the chosen sites adds to the residual stream directly: something else is computed "
        "from what they return. Leave sites= out to see those that do."
    )


def _divide(reading: Reading) -> Any:
    @jax.jit
    def divide(stream: Any, terms: Sequence[Any], wanted: Any, other: Any) -> Any:
        stream = stream.astype(jnp.float32)
        logits = reading(stream).astype(jnp.float32)
        token = jnp.argmax(logits, -1) if wanted is None else wanted
        onehot = jax.nn.one_hot(token, logits.shape[-1], dtype=jnp.float32)
        if other is not None:
            onehot -= jax.nn.one_hot(other, logits.shape[-1], dtype=jnp.float32)
        norm = jax.make_jaxpr(reading.normalised)(stream)

        def linear(x: Any) -> Any:
            (normalised,) = _held(norm.jaxpr, norm.consts, [x])
            return reading.logits(normalised).astype(jnp.float32)

        direction = jax.vjp(linear, stream)[1](onehot)[0]

        def along(x: Any) -> Any:
            return (direction * x.astype(jnp.float32)).sum(-1)

        logit = (logits * onehot).sum(-1)
        whole = along(stream)
        found = [along(jnp.broadcast_to(term, stream.shape)) for term in terms]
        rest = whole - sum(found, jnp.zeros_like(whole))
        return jnp.stack([*found, rest, logit - whole]), token, logit, logits

    return divide


def _held(jaxpr: Any, consts: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a norm, with its scale held: a constant for the derivative."""
    env: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    for equation in jaxpr.eqns:
        values = [v.val if jaxprs.is_literal(v) else env[v] for v in equation.invars]
        if kind_of(equation) in ("jit", "inline", "remat"):
            out = _held(*jaxprs.open_jaxpr(bodies_of(equation)[0].jaxpr), values)
        else:
            out = jaxprs.bind(equation, values)
        if equation.primitive.name in _SCALES:
            out = [jax.lax.stop_gradient(x) for x in out]
        env.update(zip(equation.outvars, out, strict=True))
    return [v.val if jaxprs.is_literal(v) else env[v] for v in jaxpr.outvars]
