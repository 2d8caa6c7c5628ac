"""Samples of arrays over eight devices: prints one line of JSON per case, with the data that the
compiled program moves, and its figures next to those of one device. Run by `test_sharded`.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import json

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_inspector.stats.samples.sample_parameters import sample_parameter
from nnx_inspector.stats.samples.sample_units import sample_units

SHAPE = (1024, 64, 64)
"""Eight times as large as the part that is examined."""
CASES = {
    "data": (SHAPE, P("data")),
    "units": (SHAPE, P(None, None, "data")),
    "positions": (SHAPE, P(None, "data")),
    "both": (SHAPE, P("data", None, "model")),
    "all axes": ((1000, 16, 24, 136), P("data", None, "model", None)),
    "wide": ((256, 4096), P("data", "model")),
    "uneven": ((1001, 63, 67), P()),
}


def main() -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        for name, (shape, spec) in CASES.items():
            if name == "all axes" and kind == AxisType.Explicit:
                continue
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            y = x.copy()
            y.flat[-1], y.flat[-2] = np.nan, np.inf
            with jax.set_mesh(mesh):
                at = NamedSharding(mesh, spec)
                there = [jax.device_put(jnp.asarray(z), at) for z in (x, y)]
                both = list(zip((sample_units, sample_parameter), there, strict=True))
                programs = [jax.jit(f).lower(z).compile() for f, z in both]
                found = [np.asarray(f(z)).tolist() for f, z in zip(programs, there, strict=True)]
            alone = [
                np.asarray(f(jnp.asarray(z))).tolist()
                for f, z in ((sample_units, x), (sample_parameter, y))
            ]
            moved = [collectives(str(one.as_text())) for one in programs]
            said = {"name": f"{name}, {kind}", "moved": moved, "found": found, "alone": alone}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
