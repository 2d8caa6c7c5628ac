"""What is taken for weight decay or clipping in the equations of an update, and what is not.

The figures of those that are found have their oracles in `tests/findings/update`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.editing.gradient_transforms import GradientTransforms

P = jnp.ones((3, 4))
Update = Callable[[Any, Any, Any], Any]
"""(parameter, gradient, number) -> the new parameter."""


def norm(g: Any) -> Any:
    return jnp.sqrt(jnp.sum(g * g))


def found_in(update: Update) -> tuple[bool, bool]:
    """Whether weight decay is found in an update, and clipping."""
    bare, _ = jaxprs.open_jaxpr(jax.make_jaxpr(update)(P, P, 1.0))
    decay, clipping = GradientTransforms(bare).of(bare.invars[0], bare.outvars[0])
    return decay is not None, clipping is not None


def by(tx: optax.GradientTransformation) -> Update:
    def update(p: Any, g: Any, _: Any) -> Any:
        return optax.apply_updates(p, tx.update(g, tx.init(p), p)[0])

    return update


NEITHER: dict[str, Update] = {
    "adam": by(optax.adam(0.1)),
    "amsgrad": by(optax.amsgrad(0.1)),
    "rmsprop": by(optax.rmsprop(0.1, momentum=0.9)),
    "a trust ratio": by(optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1))),
    "a warm-up": lambda p, g, t: p - 0.1 * jnp.minimum(1.0, t / 100) * g,
    "a choice by the step": lambda p, g, t: p - jnp.where(t < 100, 0.1 * g, g),
    "an average": lambda p, g, t: p + 0.01 * (g - p),
    "a loss scale": lambda p, g, t: p - 0.1 * (g / t),
    "a skipped step": lambda p, g, t: jnp.where(jnp.isfinite(norm(g)), p - 0.1 * g, p),
    "zeros for NaN": by(optax.chain(optax.zero_nans(), optax.sgd(0.1))),
    "spectral normalisation": lambda p, g, t: p / jnp.linalg.norm(p @ P.T) - 0.1 * g,
    "complex numbers": lambda p, g, t: jnp.real((p - 0.1 * g) * (1 + 0j)),
    "a value that stays positive": lambda p, g, t: jnp.maximum(p - 0.1 * g, 1e-3),
    "towards the first weights": lambda p, g, t: p - 0.1 * (g + t * (p - P)),
    "a normalised step": lambda p, g, t: p - 0.1 * g / (norm(g) + 1e-6),
    "all gradients positive": lambda p, g, t: p - 0.1 * jnp.clip(g, 0.0, 1.0),
}
DECAY: dict[str, Update] = {
    "a function that is called": lambda p, g, t: p - 0.1 * (g + jax.jit(lambda p: t * p)(p)),
    "with the sign turned": lambda p, g, t: p + 0.1 * (-(t * p) - g),
    "in float16 for parameters in float32": lambda p, g, t: (
        p - 0.1 * (g.astype(jnp.float16) + 1e-2 * p.astype(jnp.float16)).astype(jnp.float32)
    ),
    "lamb": by(optax.lamb(0.1, weight_decay=0.1)),
    "lars": by(optax.lars(0.1, weight_decay=0.1)),
    "schedule_free": by(optax.contrib.schedule_free_sgd(0.1, weight_decay=0.1)),
}
CLIPPING: dict[str, Update] = {
    "after adam": by(optax.chain(optax.adam(0.1), optax.clip(0.01))),
    "before a sign": lambda p, g, t: p - 0.1 * jnp.sign(jnp.clip(g, -t, t) + p.sum()),
    "min(norm, limit) / norm": lambda p, g, t: (
        p - 0.1 * g * (lambda size: jnp.minimum(size, t) / size)(norm(g))
    ),
    "limit / max(norm, limit)": lambda p, g, t: p - 0.1 * g * (t / jnp.maximum(norm(g), t)),
    "of rows by hand": lambda p, g, t: (
        p - 0.1 * g * jnp.minimum(1.0, t / jnp.linalg.norm(g, axis=0, keepdims=True))
    ),
    "adafactor": by(optax.adafactor(0.1)),
}


@pytest.mark.parametrize(
    ("table", "wanted"),
    [(NEITHER, (False, False)), (DECAY, (True, False)), (CLIPPING, (False, True))],
    ids=["neither", "decay", "clipping"],
)
def test_only_what_is_decay_or_clipping_is_found(table: Any, wanted: tuple[bool, bool]) -> None:
    found = {name: found_in(update) for name, update in table.items()}
    assert found == dict.fromkeys(table, wanted)


def test_both_are_found_in_either_order() -> None:
    tx = [optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)]
    assert found_in(by(optax.chain(*tx))) == (True, True)
    assert found_in(by(optax.chain(tx[1], tx[0], tx[2]))) == (True, True)


def test_what_is_within_a_function_that_is_called_cannot_be_measured() -> None:
    step = lambda p, g, t: p - 0.1 * (jnp.clip(g, -t, t) * 2 + 0.5 * p)  # noqa: E731
    assert found_in(step) == (True, True)
    assert found_in(lambda p, g, t: jax.jit(step)(p, g, t)) == (False, False)


def test_a_parameter_that_is_a_number_has_neither() -> None:
    bare, _ = jaxprs.open_jaxpr(jax.make_jaxpr(lambda p, g: p - 0.1 * (g + 0.1 * p))(1.0, 1.0))
    assert GradientTransforms(bare).of(bare.invars[0], bare.outvars[0]) == (None, None)
