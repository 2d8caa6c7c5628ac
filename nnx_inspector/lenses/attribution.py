"""Attribution: how much each token or pixel of the input counts for an output.

The traced pass is differentiated with respect to an argument of floating-point numbers or, for
tokens, with respect to what the embedding returns. Invariant: `values` has the shape of what it
belongs to, and each example of a batch is attributed by itself; where one changes the outputs of
another (a BatchNorm in training), the others are held fixed. Changes no model.

Source: Simonyan et al. 2014, "Deep Inside Convolutional Networks"; Sundararajan et al. 2017,
"Axiomatic Attribution for Deep Networks" (integrated gradients).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector._compat.sharding import auto_sharded, keeping_sharding, take_index
from nnx_inspector.hooks.sites import closest_keys, parse_key
from nnx_inspector.lenses.lens import axis_names, token_at
from nnx_inspector.lenses.traced_pass import (
    TracedPass,
    arrays_in,
    logits_in,
    trace_pass,
    with_operations,
)
from nnx_inspector.program.analysis.dataflow import inputs_received
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.plan import Plan
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Array, Float, PyTree, Value

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

Method = Literal["gradient", "gradient_times_input", "integrated_gradients"]
_Floats = npt.NDArray[np.floating[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Attribution:
    """How much each number of the input, or of a site's output, counts for an output.

    Attributes:
        of: the site, `"token"` (of several calls, `"token call 0"`), or `""` for an argument of
            the call.
        method: "gradient", "gradient_times_input" or "integrated_gradients".
        values: the attribution of each number, in the shape of the argument or of the site's
            output.
        scores: one for each place: for a site, the sum over its features (for "gradient", their
            norm); for an argument, `values` itself.
        output: the chosen output for each example.
        classes: the number of the logit that `output` is, for each example; None if a function
            chose the output.
        baseline_output: the output of the baseline, for integrated gradients; else None.
        error: for integrated gradients, the largest difference over the examples between the sum of
            `values` and `output - baseline_output`; more steps make it smaller. Else None.
    """

    of: str
    method: Method
    values: _Floats
    scores: _Floats
    output: _Floats
    baseline_output: _Floats | None
    error: float | None
    classes: npt.NDArray[np.integer[Any]] | None = None

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas DataFrame, with a row for each place.

        Columns: `example, position` for tokens, `example, row, column, channel` for pixels, or
        `axis_0, ...` for another number of axes; `score`.
        """
        import pandas as pd

        shape = self.scores.shape
        pixels = {3: ("row", "column"), 4: ("row", "column", "channel")}
        names = axis_names(len(shape))
        names = ("example", *pixels[len(shape)]) if len(shape) in pixels else names
        index = np.indices(shape).reshape(len(shape), -1)
        return pd.DataFrame({**dict(zip(names, index, strict=True)), "score": self.scores.ravel()})

    def __repr__(self) -> str:
        of = repr(self.of) if self.of else "the input"
        error = "" if self.error is None else f", error {self.error:.2g}"
        return f"Attribution({self.method} of {of}, scores {list(self.scores.shape)}{error})"


def attribute(
    f: object,
    /,
    *args: object,
    output: object = None,
    method: Method = "gradient_times_input",
    position: int = -1,
    site: str | None = None,
    baseline: object = 0.0,
    steps: int = 32,
    **kwargs: object,
) -> Attribution:
    """Attribute an output to the tokens or the pixels of the input.

    Args:
        f: the model, or a method of it or a function of it.
        args: its arguments. The output is attributed to the first array: directly if it holds
            floating-point numbers, or, if it holds tokens, through the site that embeds it.
        output: the number of a class or token, or an array of them, one for each example; or a
            function of what `f` returns that returns a number, or one for each example. By default
            the largest logit of each example. Of several arrays that `f` returns, the one named
            `logits` holds them, or else the first.
        method: "gradient"; "gradient_times_input"; or "integrated_gradients", the mean gradient on
            the way from the baseline to the input, times their difference.
        position: for logits `[batch, position, classes]`, the position of the output. The last one
            may be padding. Each position has a score of its own, so there is no `where=`.
        site: the site, of any layer, to whose output to attribute instead.
        baseline: where integrated gradients begin: a number or an array that broadcasts.
        steps: how many gradients integrated gradients take.
        kwargs: keyword arguments of `f`.

    Raises:
        ValueError: the method or the site is unknown; the site is called several times; a class
            is out of range; there are no logits, or nothing embeds the tokens.
        TypeError: `f` is neither a module nor a function of one, or there is nothing to
            differentiate with respect to.
        InspectorError: it is called within a traced function.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> found = nni.attribute(model, jnp.ones((4, 3)), output=1, method="gradient")
        >>> bool((found.values == model.kernel[:, 1]).all())
        True
        >>> nni.attribute(model, jnp.ones((4, 3)), method="integrated_gradients").error < 1e-5
        True
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a number of gradients, 1 or more, got {steps!r}.")
    with trace_pass(f, args, kwargs, what="attribute", only=with_operations(site)) as traced:
        number, chosen, call = (None, site, None) if site is not None else _input_of(traced)
        run, x = _pass_as_function(traced, number, chosen, call)
        out = jax.jit(run)(x, traced.stage.inputs)
        chosen_logit = None if callable(output) else _logit_selector(out, output, position)
        pick, classes = chosen_logit or (output, None)
        start = _baseline_array(baseline, x)

        def program(one_by_one: bool) -> PyTree:
            def make(x: object, start: object, inputs: Sequence[Value]) -> PyTree:
                return _attribution(x, start, inputs, run, pick, method, steps, one_by_one)

            return jax.device_get(jax.jit(make)(x, start, traced.stage.inputs))

        found = program(False)
        (values, output_of, of_baseline), _ = program(True) if found[1] else found
    each = (values if values.ndim and output_of.ndim else values[None]).astype(np.float64)
    sums = each.reshape(len(each), -1).sum(1) if output_of.ndim else values.sum()
    integrated = method == "integrated_gradients"
    scores = values
    if number is None:
        scores = np.linalg.norm(values, axis=-1) if method == "gradient" else values.sum(-1)
    return Attribution(
        of=(chosen or "") + ("" if call is None else f" call {call}"),
        method=method,
        values=values,
        scores=scores,
        output=output_of,
        baseline_output=of_baseline if integrated else None,
        error=float(abs(sums - (output_of - of_baseline)).max()) if integrated else None,
        classes=None if classes is None else np.broadcast_to(classes, np.shape(output_of)),
    )


def _baseline_array(baseline: object, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The baseline in the form of what is attributed to."""
    try:
        given = jnp.asarray(baseline, x.dtype)
        return keeping_sharding(lambda x, given: jnp.broadcast_to(given, x.shape), x, given)
    except (TypeError, ValueError) as error:
        given = np.asarray(baseline)
        raise type(error)(
            f"baseline= must be a number, or an array like {type_text(x.dtype, x.shape)}; got "
            f"{type_text(given.dtype, given.shape)}."
        ) from error


PassFunction = Callable[[Value, Sequence[Value]], PyTree]
"""`(x, inputs) -> output`: the pass with another value of what is attributed to."""


def _attribution(
    x: Value,
    start: object,
    inputs: Sequence[Value],
    run: PassFunction,
    pick: Value,
    method: Method,
    steps: int,
    one_by_one: bool,
) -> PyTree:
    """The attribution, the outputs for input and baseline, and whether examples interact."""

    def picked(x: Value) -> Array:
        value = jnp.asarray(pick(run(x, inputs)))
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"The output to attribute must be a real number, got {value.dtype}.")
        if value.ndim and not (value.ndim == 1 and value.shape[:1] == x.shape[:1]):
            raise ValueError(
                f"output= must return one number, or one for each of the {x.shape[0]} examples; it "
                f"returned {type_text(value.dtype, value.shape)}."
            )
        return value

    def alone(i: object) -> PyTree:
        def with_row(row: object) -> PyTree:
            whole = keeping_sharding(lambda x, row, i: x.at[i].set(row), x, row, i)
            return take_index(picked(whole), i)

        return _gradient_attribution(
            with_row, take_index(x, i), take_index(start, i), method, steps
        )

    if one_by_one:
        return jax.lax.map(alone, jnp.arange(len(x))), False
    value, pull = jax.vjp(picked, x)
    mixed = _examples_interact(pull, value, x) if value.ndim and len(value) > 1 else False
    return _gradient_attribution(picked, x, start, method, steps), mixed


def _examples_interact(pull: Callable[[Value], PyTree], value: Value, x: Value) -> PyTree:
    """Whether the outputs of some examples depend on other examples.

    The outputs are weighted by powers of 2, which scale, exactly, the gradient of an example that
    only its own output depends on. Examples whose numbers differ by a multiple of 61 (or of fewer,
    in float16) have equal weights: if only such examples depend on each other, it goes unnoticed.
    """
    most = min(30, jnp.finfo(value.dtype).maxexp // 2)
    powers = jnp.exp2(jnp.arange(len(value)) % (2 * most + 1) - float(most))
    weights = (
        keeping_sharding(lambda v, w: w.astype(v.dtype), value, w) for w in (powers**0, powers)
    )
    of_all, weighted = (pull(w)[0] for w in weights)

    def differ(of_all: object, weighted: object, powers: Value) -> PyTree:
        scaled = of_all * powers.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
        error, size = (abs(each).reshape(len(x), -1).max(1) for each in (weighted - scaled, scaled))
        return ~jnp.less_equal(error, 16 * jnp.finfo(x.dtype).eps * size).all()

    return auto_sharded(differ, of_all, weighted, powers)


def _gradient_attribution(
    picked: Value, x: Value, start: Value, method: Method, steps: int
) -> PyTree:
    """The attribution of the outputs to x, the outputs, and those of the baseline."""

    def total(x: object) -> PyTree:
        value = picked(x)
        return value.sum(), value

    gradient = jax.grad(total, has_aux=True)
    if method == "integrated_gradients":

        def step(sums: Value, share: Value) -> PyTree:
            return sums + gradient(start + share.astype(x.dtype) * (x - start))[0], None

        shares = (jnp.arange(steps) + 0.5) / steps
        sums, _ = jax.lax.scan(step, jnp.zeros_like(x), shares)
        return sums / steps * (x - start), picked(x), picked(start)
    slope, value = gradient(x)
    return (slope if method == "gradient" else slope * x), value, None


def _pass_as_function(
    traced: TracedPass, number: int | None, site: str | None, call: int | None
) -> tuple[PassFunction, jax.Array]:
    """The pass as a function of one of its inputs, or of what a site returns; and its present
    value.
    """
    stage = traced.stage
    if number is not None:
        place = len(stage.inputs) - len(stage.arrays) + number

        def of_argument(x: object, inputs: Sequence[Value]) -> PyTree:
            given = [x if i == place else value for i, value in enumerate(inputs)]
            out, _ = evaluate(stage.survey.only(lambda mark: False), given, plan=Plan())
            return traced.result(out)

        return of_argument, jnp.asarray(stage.inputs[place])
    traced.require_calls()
    calls = traced.calls.get(site or "")
    if calls is None:
        near = ", ".join(map(repr, closest_keys(site or "", list(traced.calls))))
        raise ValueError(f"{site!r} is not a site of this call. The closest are {near}.")
    if (calls.count > 1 and call is None) or calls.rows:
        times = f"{calls.count} times" if calls.count > 1 else f"in a scan of {calls.rows[0]}"
        raise ValueError(f"{site!r} is called {times}; attribute to a site that is called once.")
    arrays = [i for i, x in enumerate(calls.returned) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not arrays:
        raise TypeError(f"{site!r} returns no floating-point numbers to attribute to.")

    mark = traced.marks_of(site or "", OUTPUT)[call or 0]

    def of_site(x: object, inputs: Sequence[Value]) -> PyTree:
        replaced = lambda values: [x if i == arrays[0] else v for i, v in enumerate(values)]  # noqa: E731
        return traced.output_with(mark, replaced, inputs)

    _, values = traced.run({(site or "", OUTPUT)})
    return of_site, values[site or "", OUTPUT][call or 0][arrays[0]]


def _input_of(traced: TracedPass) -> tuple[int | None, str | None, int | None]:
    """The number of the arguments' first array; or the site that embeds it, and its call."""
    stage = traced.stage
    if not stage.arrays:
        raise TypeError("The call has no array among its arguments. Pass site= to attribute to.")
    first = stage.arrays[0]
    if jnp.issubdtype(first.dtype, jnp.floating):
        return 0, None, None
    traced.require_calls()
    embeds = [site for site in traced.calls if _embeds(traced, site)]
    held = len(stage.inputs) - len(stage.arrays)
    for number, found in sorted(inputs_received(stage.survey.jaxpr, stage.owner, embeds).items()):
        if number >= held:
            site = next(site for site in embeds if site in found)
            several = traced.calls[site].count > 1
            return None, site, _call_with(traced, site, stage.inputs[number]) if several else None
    raise ValueError(
        f"The first array of the arguments is {type_text(first.dtype, first.shape)}, and no "
        f"module returns floating-point numbers for it, as an nnx.Embed does. Pass site=, the "
        f"site whose output to attribute to: {', '.join(map(repr, list(traced.calls)[:6]))}."
    )


def _embeds(traced: TracedPass, site: str) -> bool:
    """Whether a site returns features for each of the whole numbers that it receives."""
    calls = traced.calls[site]
    if len(calls.received) != 1 or len(calls.returned) != 1:
        return False
    ids, features = calls.received[0], calls.returned[0]
    path = parse_key(site)[0]
    others = (parse_key(other)[0] for other in traced.calls)
    return (
        jnp.issubdtype(ids.dtype, jnp.integer)
        and jnp.issubdtype(features.dtype, jnp.floating)
        and features.shape[:-1] == ids.shape
        and not any(other != path and other[: len(path)] == path for other in others)
    )


def _call_with(traced: TracedPass, site: str, tokens: Value) -> int | None:
    """The only call of a site that receives these tokens; None if none or several do."""
    _, values = traced.run({(site, INPUT)})
    received = [arrays[0] for arrays in values[site, INPUT]]
    same = [i for i, x in enumerate(received) if np.array_equal(x, tokens)]
    return same[0] if len(same) == 1 else None


def _logit_selector(
    out: object, chosen: object, position: int
) -> tuple[Callable[[Any], jax.Array], Any]:
    """The function that reads the chosen logit of each example from an output, and its number."""
    logits = logits_in(out)
    if logits is None or logits.ndim > 3:
        found = ", ".join(type_text(x.dtype, x.shape) for x in arrays_in(out)) or "no array"
        raise ValueError(
            f"The call returns {found}, not logits [batch, classes] or [batch, position, "
            f"classes]. Pass output= a function of what it returns."
        )
    if logits.ndim == 3 and not -logits.shape[1] <= position < logits.shape[1]:
        raise ValueError(f"There are {logits.shape[1]} positions; there is no {position}.")

    def at_position(logits: Value) -> Array:
        return logits[:, position] if logits.ndim == 3 else logits

    def largest(logits: object) -> Array:
        return jnp.argmax(at_position(logits), -1)

    shape = (*logits.shape[:1], *logits.shape[-1:])
    given = token_at(chosen, shape, what="The logit that output= chooses")
    classes: Value = auto_sharded(largest, logits) if given is None else given

    def pick(out: object) -> jax.Array:
        return auto_sharded(chosen_of, logits_in(out), classes)

    def chosen_of(logits: object, classes: Value) -> jax.Array:
        return jnp.take_along_axis(at_position(logits), jnp.expand_dims(classes, -1), -1)[:, 0]

    return pick, classes
