"""Two processes with two devices each launch the same programs, and print what each of them saw.

`python launch_two_processes.py ADDRESS NUMBER`; run by `test_launch_devices`, which gives it the
devices.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from marked import Watch, knob, mark

from nnx_inspector._compat import configuration
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.resources import open_all

VALUES = np.arange(8, dtype=np.float32)


def loss(x: Any) -> Any:
    return (mark("a", x) ** 2).sum() * knob("k")


def main() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("a")), lambda i: VALUES[i])

    @jax.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    def mapped(x: Any) -> Any:
        return mark("part", x) * knob("k")

    with configuration.hooks_key(object()), open_all(LaunchInterception(watch := Watch(k=3))):
        for f in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss)), jax.jit(mapped)):
            out = f(x)
        assert not watch.errors
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(out)
    print(json.dumps({"seen": watch.sums(), "out": np.asarray(whole).tolist()}))


jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)
main()
