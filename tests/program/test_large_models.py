"""Models of any size are traced without their weights; nothing is computed or allocated."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import large
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.program.analysis.trace import Trace

TOKENS = jax.ShapeDtypeStruct((1, 4096), jnp.int32)


def check(layers: int, stacked: bool) -> Trace:
    model = large.language_model(layers, stacked=stacked)
    gc.collect()
    held = sum(a.nbytes for a in jax.live_arrays())
    trace = nni.trace(model, TOKENS)
    gc.collect()
    assert sum(a.nbytes for a in jax.live_arrays()) <= held + 2**16
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    root = trace.calls[0]
    assert root.parameters == large.parameters(layers)
    assert root.parameter_bytes == 2 * root.parameters + 2 * large.WIDTH * (2 * layers + 1)
    assert root.output == f"bfloat16[1,4096,{large.WORDS}]"
    assert root.output_bytes == 2 * 4096 * large.WORDS
    assert large.products(4096, layers) < root.flops < 1.01 * large.products(4096, layers)
    return trace


def test_seventy_billion_parameters_in_one_scanned_stack():
    trace = check(large.LAYERS, stacked=True)
    assert trace.calls[0].parameters == 70_553_706_496
    block = next(c for c in trace.calls if c.site == "blocks")
    assert (block.stacked, block.times) == (80, 80)
    assert ("blocks", "blocks", True) in {(e.producer, e.consumer, e.loop) for e in trace.edges}
    assert ("blocks/query", "blocks/out") in {(e.producer, e.consumer) for e in trace.edges}


def test_a_few_layers_of_it_unrolled():
    trace = check(3, stacked=False)
    joined = {(e.producer, e.consumer) for e in trace.edges if not e.loop}
    assert {("embed", "blocks/0"), ("blocks/0", "blocks/1"), ("blocks/2", "norm")} <= joined
    assert not any(e.loop for e in trace.edges)


@pytest.mark.long
def test_seventy_billion_parameters_unrolled():
    trace = check(large.LAYERS, stacked=False)
    assert len(trace.calls) == 4 + 80 * 10
