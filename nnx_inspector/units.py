import dataclasses

import jax
import jax.numpy as jnp

MAX_UNITS = 65536


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Units:
    total: object


def measure_units(x, *, axis=-1):
    return Units(jnp.sum(x, axis=tuple(i for i in range(x.ndim) if i != axis % x.ndim)))


def merge_units(parts):
    return Units(sum(p.total for p in parts))
