"""Everything that a model does with its residual stream after a place of the pass.

It serves where the final norm and the unembedding are not modules, or do not cover all that lies
between the stream and the logits: a product with a tied embedding, a norm written by hand, a
pooling, a soft cap. Invariant: given the stream of the pass, it returns the model's own logits.
Changes no model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.sharding import keeping_sharding
from nnx_inspector.lenses.traced_pass import TracedPass, logits_in
from nnx_inspector.program.analysis.equations import Body, bodies_of, kind_of
from nnx_inspector.program.marks import mark, move_vmap_axes_first
from nnx_inspector.typing import Array, Atom, Equation, Float, OpenJaxpr, Value

SCALES = {"rsqrt", "sqrt", "cbrt", "pow"}
"""The primitives that make the scale of a norm."""
_SUMS = {"add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "concatenate", "pad", "rev"}
_RESHAPES = {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze"}
_RESHAPES |= {"expand_dims", "slice", "split", "reduce_precision"} | jaxprs.IDENTITIES
_INDEXING = {"dynamic_slice", "gather"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_LOGIT_PRIMITIVES = {"add", "add_any", *_PRODUCTS}
"""What may make logits; a scaling after it may belong to a soft cap, `c * tanh(logits / c)`."""

FIXED, LINEAR, OTHER = range(3)
"""How a value depends on the stream: not at all, as a linear function plus a constant, or else."""


Place = tuple[str, str, int]
"""A site, what it receives or returns, and the number of the array in that."""


@dataclasses.dataclass(frozen=True, eq=False)
class Downstream:
    """The pass from a place on, as a function of the array there.

    Attributes:
        site, part, array: the place: a call, what it receives or returns, and which array of it.
        distribution: whether the model returns probabilities; the logits are their logarithms.
    """

    traced: TracedPass
    site: str
    part: str
    array: int
    distribution: bool = False

    norm = ""

    @property
    def unembed(self) -> str:
        """The rest of the model, as the site that unembeds."""
        before = "before" if self.part == "input" else "after"
        return f"(all {before} {self.site})" if before == "after" else f"(all from {self.site} on)"

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch vocabulary"]:
        last = self.traced.marks_of(self.site, self.part)[-1]

        def replaced(values: list[Value]) -> list[Value]:
            new = list(values)
            like = functools.partial(_as_in_program, mapped=last.mapped[self.array])
            new[self.array] = keeping_sharding(like, values[self.array], x)
            return new

        own = logits_in(self.traced.output_with(last, replaced, self.traced.stage.inputs))
        return jnp.log(own) if self.distribution else own

    @property
    def is_replaceable(self) -> bool:
        """Whether the array at the place can be replaced: not in an ensemble's member."""
        places = self.traced.marks_of(self.site, self.part)
        return bool(places) and not places[-1].members


def _as_in_program(old: jax.Array, x: jax.Array, *, mapped: Sequence[int]) -> jax.Array:
    """An array with the axes of vmaps at the front, in the order in which the program has it."""
    # `move_vmap_axes_first` only permutes axes, so its transpose is its inverse
    x = x.astype(old.dtype)
    return jax.linear_transpose(lambda value: move_vmap_axes_first(value, mapped), old)(x)[0]


# ----------------------------------------------- the linear part of a function


@dataclasses.dataclass
class LinearEvaluation:
    """Evaluates a function of the stream with the scales of its norms held constant.

    Attributes:
        classes: how many logits there are.
        product: whether a matrix makes them from what depends on the stream.
        window: whether a convolution over several positions does.
        logits: the last sum or product that is linear in the stream and has this many classes.
    """

    classes: int
    product: bool = False
    window: bool = False
    logits: Array | None = None

    def run(
        self,
        jaxpr: OpenJaxpr,
        consts: Sequence[Value],
        args: Sequence[object],
        kinds: Sequence[int],
    ) -> tuple[list[Value], list[int]]:
        """The results, and how each depends on the stream."""
        env: dict[Any, tuple[Any, int]] = {}
        env.update(zip(jaxpr.constvars, ((c, FIXED) for c in consts), strict=True))
        env.update(zip(jaxpr.invars, zip(args, kinds, strict=True), strict=True))

        def read(atom: Atom) -> tuple[Any, int]:
            return (atom.val, FIXED) if jaxprs.is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            values = [read(v)[0] for v in equation.invars]
            given = [read(v)[1] for v in equation.invars]
            if kind_of(equation) in ("jit", "inline", "remat"):
                bare, inner = jaxprs.open_jaxpr(bodies_of(equation)[0].jaxpr)
                out, made = self.run(bare, inner, values, given)
            else:
                out, kind = self._evaluate_equation(equation, values, given)
                made = [kind] * len(out)
                if equation.primitive is mark:
                    made = given
                elif kind_of(equation) == "scan" and any(given):
                    made = _dependence_of_scan(bodies_of(equation)[0], values, given)
            env.update(zip(equation.outvars, zip(out, made, strict=True), strict=True))
        found = [read(v) for v in jaxpr.outvars]
        return [value for value, _ in found], [kind for _, kind in found]

    def _evaluate_equation(
        self, equation: Equation, values: list[Value], given: list[int]
    ) -> tuple[list[Value], int]:
        out, name = jaxprs.bind(equation, values), equation.primitive.name
        if not any(given):
            return out, FIXED
        # the path to the logits is linear only with the scale of the norm as a constant, so what
        # makes the scale gets no derivative, and counts as not depending on the stream
        if name in SCALES:
            return [jax.lax.stop_gradient(x) for x in out], FIXED
        kind = _dependence(name, given)
        if getattr(out[0], "shape", ())[-1:] == (self.classes,):
            wide = name == "conv_general_dilated" and _is_wide(equation)
            self.product |= name in _PRODUCTS and not wide
            self.window |= wide
            if kind == LINEAR and name in _LOGIT_PRIMITIVES:
                self.logits = out[0]
        return out, kind


def _is_wide(convolution: Value) -> bool:
    """Whether a convolution reads several positions for one."""
    kernel = convolution.invars[1].aval.shape
    return any(kernel[i] > 1 for i in convolution.params["dimension_numbers"].rhs_spec[2:])


def _dependence_of_scan(body: Body, values: Sequence[Value], given: Sequence[int]) -> list[int]:
    """How the results of a scan depend on the stream, if its operands do so."""
    bare, consts = jaxprs.open_jaxpr(body.jaxpr)
    start = body.consts + body.carry
    each = [*values[:start], *(x[0] for x in values[start:])]
    kinds, made = list(given), list[int]()
    for _ in range(OTHER + 1):  # what is carried becomes no simpler from one iteration to the next
        inner = lambda xs: made.extend(LinearEvaluation(-1).run(bare, consts, xs, kinds)[1])  # noqa: E731
        made.clear()
        jax.eval_shape(inner, each)
        kinds[body.consts : start] = map(max, kinds[body.consts : start], made)
    return made


def _dependence(name: str, given: Sequence[int]) -> int:
    """How the result of a primitive depends on the stream, if its operands do so."""
    linear = max(given) == LINEAR
    if name in _SUMS | _RESHAPES:
        return max(given)
    single = linear and sum(map(bool, given)) == 1
    if name in _PRODUCTS | {"mul"}:
        return LINEAR if single else OTHER
    first = name in {"div", *_INDEXING} and single and given[0] == LINEAR
    chosen = name == "select_n" and linear and given[0] == FIXED
    return LINEAR if first or chosen else OTHER
