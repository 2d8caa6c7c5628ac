"""Arrays that are spread over several devices: each device reads its part, and one exchange adds up
what all have found. The figures are those of NumPy, however the arrays lie.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from collectives import collectives
from devices import FLAG, on_four_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from summary_oracle import CLASSES, check, values

from nnx_inspector.stats.samples.sample_parameters import sample_parameter
from nnx_inspector.stats.samples.sample_units import sample_units, sample_units_unreduced
from nnx_inspector.stats.summarize import summarize, summarize_unreduced
from nnx_inspector.stats.unreduced import reduce_tree

SPECS = [P("a"), P(None, "b"), P(("a", "b")), P("b", "a"), P()]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float64, np.int32, np.uint64, np.uint8, np.complex64]
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind: AxisType = AxisType.Auto) -> Any:
    side = 2 if jax.device_count() >= 4 else 1
    return jax.make_mesh(
        (side, side), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[: side * side]
    )


def placed(mesh: Any, x: Any, spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_figures_are_those_of_numpy_however_an_array_lies(dtype: Any):
    mesh = mesh_of()
    # every class in every place in one dtype; in the others every class, and every place
    places = {kind: [SPECS[i % len(SPECS)]] for i, kind in enumerate(CLASSES)}
    if dtype is np.float32:
        places = dict.fromkeys(CLASSES, SPECS)
    cases = [(kind, spec) for kind in CLASSES for spec in places[kind]]
    arrays = [values(3, kind, dtype, (8, 12)) for kind, _ in cases]
    with jax.enable_x64(True):
        at = [placed(mesh, x, spec) for x, (_, spec) in zip(arrays, cases, strict=True)]

        @jax.jit
        def measured(arrays: Any) -> Any:
            return reduce_tree([summarize_unreduced(x) for x in arrays])

        found = measured(at)
    for x, one in zip(arrays, found, strict=True):
        check(one, x)


def test_parts_without_a_finite_value_count_for_nothing():
    """And neither do the copies of a part, or the devices that have none."""
    mesh, x = mesh_of(), np.full((8, 4), 3.5, np.float32)
    x[:4] = np.nan
    x[4] = [7, -2, np.inf, 0]
    for spec in SPECS:
        found = jax.jit(lambda x: (summarize(x), reduce_tree(summarize_unreduced(x))))(
            placed(mesh, x, spec)
        )
        for one in found:
            check(one, x)
            assert (one.min, one.max, one.size) == (-2, 7, x.size), spec


def test_a_spread_that_is_small_beside_the_mean_is_kept():
    """Of values near 1e6 whose parts have other means, in float32."""
    mesh, rng = mesh_of(), np.random.default_rng(0)
    x = (1e6 + np.arange(64)[:, None] + rng.normal(size=(64, 32))).astype(np.float32)
    for spec in SPECS:
        one = jax.jit(lambda x: reduce_tree(summarize_unreduced(x)))(placed(mesh, x, spec))
        assert one.mean == pytest.approx(x.astype(np.float64).mean(), rel=1e-7)
        assert one.std == pytest.approx(x.astype(np.float64).std(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_axes_that_cannot_be_divided_and_explicit_meshes(kind: str):
    """A size that no device count divides arises within a program."""
    mesh, x = mesh_of(KINDS[kind]), values(1, "specials", np.float32, (4, 12, 20))
    cases = {
        "rows": (lambda x: x, P("a", None, "b"), 1),
        "all rows": (lambda x: x, P("a", "b"), 2),
        "uneven": (lambda x: x[:, :, 1:], P(None, "a"), 0),
    }
    for name, (change, spec, rank) in cases.items():
        if kind == "explicit" and name == "uneven":
            continue  # such a type does not exist
        both = [functools.partial(f, batch_rank=rank) for f in (summarize, summarize_unreduced)]
        measured = jax.jit(lambda x, both=both, change=change: [
            reduce_tree(f(change(x))) for f in both
        ])  # fmt: skip
        with jax.set_mesh(mesh):
            found = measured(placed(mesh, x, spec))
        for one in found:
            for row in np.ndindex(x.shape[:rank]):
                check(one.row(row) if rank else one, np.asarray(change(x))[row])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_one_device(kind: str):
    mesh, rng = mesh_of(KINDS[kind]), np.random.default_rng(0)
    x = rng.normal(size=(100, 6, 132)).astype(np.float32)
    x[:, :, 4], x[3, 2, 8] = 0, 9
    alone, state = (
        np.asarray(sample_units(jnp.asarray(x))),
        np.asarray(sample_parameter(jnp.asarray(x))),
    )
    for spec in SPECS:

        def whole(x):
            units = [sample_units(x), reduce_tree(sample_units_unreduced(x))]
            return [*units, sample_parameter(x)]

        with jax.set_mesh(mesh):
            *units, found = jax.jit(whole)(placed(mesh, x, spec))
        for one in units:
            np.testing.assert_allclose(one, alone, rtol=2e-5, atol=2e-5, err_msg=str(spec))
        np.testing.assert_array_equal(found, state, err_msg=str(spec))


def test_all_arrays_share_one_exchange_of_one_array():
    mesh = mesh_of()
    arrays = [placed(mesh, np.ones((16, 8 * i), np.float32), P("a", "b")) for i in range(1, 7)]

    @jax.jit
    def measured(arrays: Any) -> Any:
        return reduce_tree([[summarize_unreduced(x), sample_units_unreduced(x)] for x in arrays])

    moved = collectives(measured.lower(arrays).compile().as_text())
    assert sum(moved.values()) == (mesh.size > 1)
    assert all(name.startswith("all-reduce u32[") for name in moved)


KEPT = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from nnx_inspector.stats.unreduced import reduce_tree
from nnx_inspector.stats.summarize import summarize_unreduced
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(np.arange(32.0, dtype=np.float32), NamedSharding(mesh, P("d")))
one = jax.jit(lambda x: reduce_tree(summarize_unreduced(x)))(x)
print(one.mean, one.max, sum(name.endswith("cache_hits") for name in found))
"""


def test_a_program_that_jax_has_kept_on_disk_runs_in_another_process(tmp_path: pathlib.Path):
    command = [sys.executable, "-W", "error::UserWarning", "-c", KEPT, str(tmp_path)]
    environment = {**os.environ, "XLA_FLAGS": FLAG, "JAX_PLATFORMS": "cpu"}
    for hits in (0, 1):
        how: Any = dict(env=environment, capture_output=True, text=True, check=False)
        one = subprocess.run(command, **how)
        assert one.stdout.split() == ["15.5", "31.0", str(hits)], one.stderr[-2000:]


def test_on_four_devices():
    on_four_devices(__file__, "numpy", "finite", "spread", "rows", "samples", "share")
