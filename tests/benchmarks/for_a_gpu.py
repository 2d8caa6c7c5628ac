"""What XLA makes of our programs for an H100, compiled without one: kernels, CPU time, memory.

    python -m tests.benchmarks.for_a_gpu [--layers N]

Needs jax's plugin for CUDA (`pip install jax-cuda13-plugin jax-cuda13-pjrt` of jax's own version)
and no GPU: XLA compiles for a device that is described to it. Nothing is tuned on the device, so
matrix products may become other kernels than there. Not a test.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it asks for a driver
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import nnx_inspector as nni
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.stats.summarize import summarize
from tests.benchmarks import nets
from tests.benchmarks.cost_jax import Case, model_of
from tests.benchmarks.kernels import kernels

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def programs(layers: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """The functions to compile, each with its arguments."""
    case = Case("", "Transformer", (512, layers, 32_000), (8, 128), 32_000)
    x, labels = map(jnp.asarray, case.data())
    graphdef, state = nnx.split(model_of(case))

    def loss_fn(model: Any, x: Any, labels: Any) -> Any:
        return nets.cross_entropy(model(x), labels)

    def train(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, x, labels: of(nnx.merge(graphdef, state), x, labels)

    ours = nni.value_and_grad(loss_fn, inputs=False)
    capture = lambda model: nni.capture(model, inputs=False)  # noqa: E731
    array = jax.ShapeDtypeStruct((8, 128, 2048), jnp.float32)
    return {
        "a sum": (jnp.sum, (array,)),  # the first one pays for starting the compiler
        "a summary": (summarize, (array,)),
        "a sample of units": (sample_units, (array,)),
        "forward pass": (lambda state, x: nnx.merge(graphdef, state)(x), (state, x)),
        "ours": (lambda state, x: capture(nnx.merge(graphdef, state))(x), (state, x)),
        "train step": (train(nnx.value_and_grad(loss_fn)), (state, x, labels)),
        "ours, with gradients": (train(ours), (state, x, labels)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    jax.devices()  # registers the plugins
    described = {"target_config": H100, "topology": "1x1x1"}
    device = topologies.get_topology_desc("h100", "cuda", **described).devices[0]
    there = SingleDeviceSharding(device)
    print("| for an H100 | kernels | CPU seconds to compile | memory, MB |\n|---|--:|--:|--:|")
    for name, (f, arguments) in programs(parser.parse_args().layers).items():
        jitted = jax.jit(f, in_shardings=there, out_shardings=there)
        lowered = jitted.trace(*jax.eval_shape(lambda *x: x, *arguments)).lower(
            lowering_platforms=("cuda",)
        )
        began = time.process_time()
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        seconds, used = time.process_time() - began, compiled.memory_analysis()
        memory = (used.temp_size_in_bytes + used.output_size_in_bytes) / 1e6
        print(f"| {name} | {kernels(compiled.as_text())} | {seconds:.1f} | {memory:.1f} |")


if __name__ == "__main__":
    main()
