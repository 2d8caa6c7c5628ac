"""The kinds of perturbation that act on gradients, while the value stays bitwise the same.

Each is the identity in the forward pass and has its own transpose. Tangents of forward mode pass
unchanged, so `jvp` and `hessian` still work. Under vmap each example's gradient is separate.
The screen's menu lists these kinds after those of values, in the order of their definition here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from nnx_inspector._compat import jaxprs
from nnx_inspector.perturbations.base import At, Form, Misfit, Perturbation, kind, static
from nnx_inspector.typing import Primitive, Value


class GradientPerturbation(Perturbation):
    """The base of every kind that acts on a cotangent."""

    acts_on = "gradient"
    how: ClassVar[str]

    def apply(self, x: jax.Array) -> jax.Array:
        dtype = jnp.float64 if jnp.finfo(x.dtype).bits == 64 else jnp.float32
        return _change_cotangent_p.bind(
            x, jnp.asarray(self._number(), dtype), how=self.how, mapped=0
        )

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        for name in self.numbers:
            if (shape := jnp.shape(getattr(self, name))) != ():
                return ValueError(f"{name} is one number, or vmapped over; it has shape {shape}")
        return super().why_not(x)

    def _number(self) -> Value:
        return 0.0


@kind(compared=True)
class ScaleGradient(GradientPerturbation):
    """Multiplies the gradient that flows back through the value by `factor`."""

    factor: Value
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="multiply its gradient by the factor", strength_name="factor", strength=0.5, high=2.0
    )
    how: ClassVar[str] = "scale"
    numbers: ClassVar[Mapping[str, float | None]] = {"factor": None}

    def _number(self) -> Value:
        return self.factor


@kind(compared=True)
class StopGradient(GradientPerturbation):
    """Makes the gradient zero, including NaN and Inf in it, as `jax.lax.stop_gradient` would."""

    at: At = static("output")
    form: ClassVar[Form] = Form(does="let no gradient back through it")
    how: ClassVar[str] = "stop"


@kind(compared=True)
class ReverseGradient(GradientPerturbation):
    """Multiplies the gradient by `-factor`.

    Source: Ganin and Lempitsky 2015, "Unsupervised Domain Adaptation by Backpropagation".
    """

    factor: Value = 1.0
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="multiply its gradient by −factor", strength_name="factor", strength=1.0, high=2.0
    )
    how: ClassVar[str] = "scale"
    numbers: ClassVar[Mapping[str, float | None]] = {"factor": None}

    def _number(self) -> Value:
        return -jnp.asarray(self.factor)


@kind(compared=True)
class ClipGradient(GradientPerturbation):
    """Scales the gradient of each array down to a norm of at most `norm`."""

    norm: Value
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="limit its gradient to this norm",
        strength_name="norm",
        strength=1.0,
        high=10.0,
        least=0.0,
    )
    how: ClassVar[str] = "clip"
    numbers: ClassVar[Mapping[str, float | None]] = {"norm": 0.0}

    def _number(self) -> Value:
        return self.norm


def _change_cotangent(ct: jax.Array, number: jax.Array, how: str) -> jax.Array:
    if how == "stop":
        return jnp.zeros_like(ct)
    if how == "scale":
        return ct * number.astype(ct.dtype)
    wide = ct if ct.dtype.itemsize >= 4 else ct.astype(jnp.float32)
    # first scaled by the largest element, whose square may overflow; in two steps, because its
    # reciprocal may overflow too, and XLA turns a division into a product with it
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), initial=0.0))
    step = 1.0 / jnp.sqrt(jnp.where(largest > 0, largest, 1.0))
    scaled = wide * step * step
    total = jnp.sum((scaled * jnp.conj(scaled)).real)
    # the root of 0 has no derivative, which second derivatives need
    norm = jnp.sqrt(jnp.where(total > 0, total, 1.0))
    too_long = (total > 0) & (norm > number * step * step)
    return jnp.where(too_long, scaled * (number / norm), wide).astype(ct.dtype)


# `jax.custom_vjp` would say in fewer lines that the forward pass is the identity and the backward
# pass changes the cotangent, but it has no rule for forward mode: `jvp`, `jacfwd` and `hessian`
# through a perturbed model would raise. So there are two primitives: the tangent of the first goes
# through the second, which is linear and whose transpose changes the cotangent. A vmap counts the
# axes that it has put in front (`mapped`), so that each example's gradient is clipped by its own
# norm.
_change_cotangent_p = jaxprs.identity_primitive("nnx_inspector_change_cotangent")
_change_cotangent_linear_p = jaxprs.identity_primitive("nnx_inspector_change_cotangent_linear")


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, of: Primitive, **params: object
) -> tuple[Value, Value]:
    (x, number), (t, _) = primals, tangents
    out = of.bind(x, number, **params)
    return out, t if type(t) is ad.Zero else _change_cotangent_linear_p.bind(t, number, **params)


def _transpose(ct: Value, t: object, number: Value, *, how: str, mapped: int) -> Value:
    if type(ct) is ad.Zero:
        return ct, None
    change = functools.partial(_change_cotangent, how=how)
    for _ in range(mapped):
        change = jax.vmap(change)
    return change(ct, jnp.broadcast_to(number, ct.shape[:mapped])), None


def _batch(
    of: Primitive, args: Sequence[Value], dims: Sequence[int | None], *, how: str, mapped: int
) -> Value:
    (x, number), (x_dim, number_dim) = args, dims
    size = x.shape[x_dim] if x_dim is not None else number.shape[number_dim]
    x = jnp.moveaxis(x, x_dim, 0) if x_dim is not None else jnp.broadcast_to(x, (size, *x.shape))
    if number_dim is None:
        number = jnp.broadcast_to(number, (size, *number.shape))
    else:
        number = jnp.moveaxis(number, number_dim, 0)
    number = number.reshape(size, *number.shape[1:], *(1,) * (mapped + 1 - number.ndim))
    return of.bind(x, number, how=how, mapped=mapped + 1), 0


for _primitive in (_change_cotangent_p, _change_cotangent_linear_p):
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, of=_primitive)
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
ad.primitive_transposes[_change_cotangent_linear_p] = _transpose
