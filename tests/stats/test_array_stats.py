"""The program of each platform against the oracle, and what it lowers to."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_four_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from summary_oracle import CLASSES, FLOATS, check, device, values

from nnx_inspector._compat import native
from nnx_inspector.stats import array_stats as module
from nnx_inspector.stats.array_stats import array_stats, strides
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary

PLATFORMS = ["cpu", "cpus", "cuda", "tpu"]
"""Those that have a program; "cpus" is the one of several CPUs, or of one without the library."""
DTYPES = [*FLOATS[:4], FLOATS[5], np.int8, np.uint16, np.int32, np.uint64, np.bool_, np.complex64]


def run(x: Any, *, platform: str, **how: Any) -> Summary:
    """The summary by a platform's program: those of a CPU there, others on whatever there is."""
    assert platform != "cpu" or native.has_functions()  # which registers them
    there = jax.devices("cpu" if platform in ("cpu", "cpus") else None)[0]
    with jax.default_device(there):
        return _run(jax.device_put(x, there), platform=platform, **how)


@functools.partial(jax.jit, static_argnames=("platform", "rows", "sample"))
def _run(x: jax.Array, *, platform: str, rows: int = 0, sample: Any = "auto") -> Summary:
    steps = strides(x.shape[rows:], sample)
    # the program of another platform, on this one
    bins, points, sums = module._program_for(platform)(x, batch_rank=rows, steps=steps)
    return Summary(bins=bins, points=points, sums=sums)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_platforms_program_against_the_oracle(platform: str, dtype: Any) -> None:
    for kind in CLASSES:
        x = values(11, kind, dtype, (257,))
        with jax.enable_x64(x.dtype.itemsize == 8 and dtype != np.complex64):
            check(run(device(x), platform=platform), x)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "make",
    [
        lambda z: 1e4 + 1e-2 * z,
        lambda z: np.where(np.arange(z.size) == 5, -1e30, z),
        lambda z: np.sign(z) * 3.4e38,
        lambda z: 1e-30 * z,
        lambda z: np.where(np.arange(z.size) == 3_001, 3e38, 1e-30 * z),
        lambda z: np.full_like(z, 0.1),
        lambda z: np.where(np.arange(z.size) == 0, 1e3, z),
        lambda z: np.where(np.arange(z.size) == 0, np.inf, 1e4 + z),
    ],
)
def test_one_reduction_needs_no_scale_beforehand(platform: str, make: Any) -> None:
    x = make(np.random.default_rng(1).normal(size=4_000)).astype(np.float32)
    # A CPU adds these one after the other, which loses more than an accelerator's tree.
    check(run(x, platform=platform), x, tolerance=3e-4)


@pytest.mark.parametrize("shape", [(6, 130, 200), (2**21 + 5,), (3, 2**19 + 1)])
def test_all_programs_count_alike(shape: tuple[int, ...]) -> None:
    x = np.maximum(np.random.default_rng(0).normal(size=shape), 0).astype(np.float32)
    x.ravel()[::97] = np.nan
    for rows in range(len(shape)):
        for sample in ("auto", 1):
            how = {"rows": rows, "sample": sample}
            first, *others = (run(x, platform=platform, **how) for platform in PLATFORMS)
            for other in others:
                np.testing.assert_array_equal(other.bins, first.bins)
                np.testing.assert_array_equal(other.points[..., :2], first.points[..., :2])


def test_what_is_counted_apart_in_a_sample_is_counted_once() -> None:
    """Zeros, NaN and Inf have exact counts, and add nothing to what no bin has counted."""
    x = np.random.default_rng(2).normal(size=(64, 50, 64)).astype(np.float32)
    x.ravel()[::3], x.ravel()[1::7], x.ravel()[2::11] = 0, np.nan, -np.inf
    first, *others = (run(x, platform=platform) for platform in PLATFORMS)
    assert first.seen < x.size
    assert first.zeros == np.count_nonzero(x == 0)
    assert first.size == x.size
    for other in others:
        np.testing.assert_array_equal(other.bins, first.bins)


def lowered(shape: tuple[int, ...], platform: str, **how: Any) -> str:
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    traced = jax.jit(functools.partial(summarize, **how)).trace(x)
    return traced.lower(lowering_platforms=(platform.rstrip("s"),)).as_text()


@pytest.mark.parametrize("sample", ["auto", 1])
def test_what_is_lowered_for_each_platform(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {p: lowered((16, 512, 1024), p, sample=sample) for p in ["cpu", "cuda", "tpu"]}
    monkeypatch.setattr(native, "can_call_on", lambda _: False)
    jax.clear_caches()
    texts["cpus"] = lowered((16, 512, 1024), "cpus", sample=sample)
    scatters = {p: text.count('"stablehlo.scatter"(') for p, text in texts.items()}
    assert scatters == {"cpu": 0, "cpus": 1, "cuda": 1, "tpu": 0}
    calls = {p: text.count("@nnx_inspector_array_stats(") for p, text in texts.items()}
    assert calls == {"cpu": 1, "cpus": 0, "cuda": 0, "tpu": 0}
    assert {p: "dot_general" in text for p, text in texts.items()} == {
        "cpu": False, "cpus": False, "cuda": False, "tpu": True,
    }  # fmt: skip
    whole = r"stablehlo.reduce\([^\n]*\n?[^\n]*tensor<16x512x1024x"
    reads = {p: len(re.findall(whole, text)) for p, text in texts.items()}
    assert reads == {"cpu": 0, "cpus": 3, "cuda": 1, "tpu": 1}  # integers, and two sums


def test_an_accelerator_reads_a_large_array_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    text = lowered((16, 512, 2048), "cuda")
    assert len(re.findall(r"stablehlo.reduce\([^\n]*\n?[^\n]*tensor<16x512x2048x", text)) == 3
    x = np.random.default_rng(4).normal(size=(4, 16, 64)).astype(np.float32)
    x[0, 3], x[1], x[2, 0, 0] = np.nan, -np.inf, 3e38
    monkeypatch.setattr(module, "_LARGE", 1)  # the way of large arrays
    _run.clear_cache()
    found = run(x, platform="cuda", rows=1)
    for i, row in enumerate(x):
        check(jax.tree.map(lambda a, i=i: a[i], found), row)
    _run.clear_cache()


def test_private_counters_where_a_gpu_counts_many() -> None:
    assert f"tensor<{512 * 4096}xui32>" in lowered((16, 512, 1024), "cuda", sample=1)
    assert f"tensor<{512 * 4096}xui32>" not in lowered((16, 512, 1024), "cuda")


def test_nothing_of_it_is_an_arrays_size() -> None:
    x = jax.ShapeDtypeStruct((16, 512, 256), jnp.float32)
    size = 4 * 16 * 512 * 256
    memory = jax.jit(summarize).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < size / 64


def test_it_runs_without_jit_and_under_every_transformation() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40, 20)).astype(np.float32))
    expected = summarize(x)
    with jax.disable_jit():
        check(summarize(x), np.asarray(x))
        check(summarize(np.asarray(x, np.float64)), np.asarray(x))
    for one in (
        jax.jit(jax.checkpoint(summarize))(x),
        jax.lax.map(summarize, x[None]).row(0),
        jax.lax.cond(True, summarize, lambda x: summarize(x), x),
        jax.vmap(summarize, in_axes=1)(x[:, None]).row(0),
        jax.value_and_grad(lambda x: (x.sum(), summarize(x)), has_aux=True)(x)[0][1],
    ):
        np.testing.assert_array_equal(one.bins, expected.bins)
        np.testing.assert_array_equal(one.points, expected.points)
    bins, points, sums = jax.eval_shape(
        functools.partial(array_stats, batch_rank=1, sample="auto"), x
    )
    assert (bins.shape, points.shape, sums.dtype) == ((3, 4096), (3, 3), jnp.float32)


# ------------------------------------------------------------------ over several devices


def test_extremes_and_counts_of_all_arrays_share_their_exchanges() -> None:
    """A gather for each array would be a round trip each between the processes of a job."""
    devices = jax.devices()[: 4 if jax.device_count() >= 4 else 1]
    mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    divided = NamedSharding(mesh, PartitionSpec("d"))
    arrays = [jax.device_put(np.ones((64, 8), np.float32), divided) for _ in range(6)]
    whole = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(lambda arrays: [summarize(x) for x in arrays], out_shardings=whole)
    text = program.lower(arrays).compile().as_text()
    gathers = len(re.findall(r" all-gather(?:-start)?\(", text))
    sums = len(re.findall(r" all-reduce(?:-start)?\(", text))
    assert gathers == 0
    assert sums == (len(devices) > 1)


def test_on_four_devices() -> None:
    on_four_devices(__file__, "share_their_exchanges")
