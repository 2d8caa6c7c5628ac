"""Runs every public function on models over meshes of devices, and prints what it says.

`python meshes.py --devices 8 SETUP ...` prints a line of JSON per setup and function: the figures
that differ from those of one device, or the error. Run by `test_meshes`.
"""

from __future__ import annotations

import argparse
import os

from devices import UNOPTIMIZED

parser = argparse.ArgumentParser()
parser.add_argument("setups", nargs="*", help="the setups, all if there is none")
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--functions", nargs="*", default=())
parser.add_argument("--trace", action="store_true", help="print the traceback of each error")
cli = parser.parse_args()
count = f"--xla_force_host_platform_device_count={cli.devices}"
os.environ["XLA_FLAGS"] = f"{count} {UNOPTIMIZED}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "64")  # see elsewhere.md: the threads of XLA's exchanges

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from mesh_functions import FUNCTIONS, World, record_error  # noqa: E402
from mesh_models import MLP, Mapped, Text, images  # noqa: E402
from sharded_models import place  # noqa: E402

import nnx_inspector as nni  # noqa: E402
from nnx_inspector.stats.summary import Summary  # noqa: E402
from nnx_inspector.stats.units import Units  # noqa: E402

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SHAPES = {"data": (-1, 1), "tensor": (1, -1), "both": (-1, 2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A model over a mesh.

    Attributes:
        build: makes the model for a mesh; for None, on one device.
        kind: the axes' type, `auto` or `explicit`.
        parallel: `data`, `tensor` or `both`.
        batch: the model's argument on the host.
        current: whether the mesh is the current one.
    """

    build: Callable[[Any], nnx.Module]
    kind: str
    parallel: str
    batch: Callable[[], np.ndarray] = images
    current: bool = True

    def mesh(self) -> Any:
        shape = SHAPES[self.parallel]
        known = -int(np.prod(shape))
        shape = tuple(cli.devices // known if n < 0 else n for n in shape)
        return jax.make_mesh(shape, ("data", "model"), axis_types=(AXIS_TYPES[self.kind],) * 2)


def one_device() -> Any:
    """The mesh of one device that flax asks for where a parameter has axes."""
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=kinds, devices=jax.devices()[:1])


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 16, (16, 8)).astype(np.int32)


def setups() -> dict[str, Setup]:
    found: dict[str, Setup] = {}
    for kind in AXIS_TYPES:
        for parallel in SHAPES:
            how: Any = {"kind": kind, "parallel": parallel}
            found[f"mlp, {kind}, {parallel}"] = Setup(build=MLP, **how)
            found[f"text, {kind}, {parallel}"] = Setup(build=Text, batch=tokens, **how)
            found[f"manual, {kind}, {parallel}"] = Setup(build=Mapped, **how)
        apart: Any = {"kind": kind, "parallel": "data", "current": False}
        found[f"mlp, {kind}, no mesh is current"] = Setup(build=MLP, **apart)
    return found


SETUPS = setups()


def make_world(setup: Setup, mesh: Any) -> World:
    model, x = setup.build(mesh), setup.batch()
    if mesh is None:
        at = jnp.asarray
    else:
        place(model, mesh)

        def at(x: Any) -> Any:
            spec = P("data") if np.ndim(x) else P()
            return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

    labels = np.random.default_rng(2).integers(0, 16 if setup.batch is tokens else 8, x.shape[0])
    return World(
        model=model,
        x=at(x),
        labels=at(labels.astype(np.int32)),
        at=at,
        text=setup.batch is tokens,
        manual=setup.build is Mapped,
    )


# ------------------------------------------------------------------ comparing


def collect(value: Any, at: str, into: dict[str, Any]) -> None:
    """All figures of a result, by their place in it."""
    if isinstance(value, Exception):
        into[at] = f"{type(value).__name__}: {str(value)[:300]}"
    elif isinstance(value, (str, bool, type(None))):
        into[at] = value
    elif isinstance(value, Summary):
        counts = {n: getattr(value, n) for n in ("size", "finite", "nan", "posinf", "neginf")}
        collect(counts, at, into)
        collect(
            {n: float(getattr(value, n)) for n in ("mean", "std", "min", "max", "norm")}, at, into
        )
        into[f"{at} bins"] = value.merged().bins
    elif isinstance(value, Units):
        collect(
            {n: getattr(value, n) for n in ("size", "finite", "nan", "posinf", "neginf")}, at, into
        )
        collect({n: getattr(value, n) for n in ("mean", "std", "min", "max", "norm")}, at, into)
    elif type(value).__name__ == "DataFrame":
        rows = value.to_dict("list")
        texts = [
            name
            for name, column in rows.items()
            if any(isinstance(x, (str, tuple)) for x in column)
        ]
        for name, column in rows.items():
            if name in texts:
                into[f"{at} {name}"] = [str(x) for x in column]
            else:
                collect(
                    np.array([np.nan if x is None else x for x in column], object),
                    f"{at} {name}",
                    into,
                )
    elif isinstance(value, nni.Recording):
        collect_recording(value, at, into)
    elif type(value).__name__ == "Record":
        collect_record(value, at, into)
    elif dataclasses.is_dataclass(value) and not isinstance(value, nnx.Module):
        for field in dataclasses.fields(value):
            collect(getattr(value, field.name), f"{at}.{field.name}", into)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            collect(one, f"{at}/{key}", into)
    elif isinstance(value, (list, tuple)):
        for n, one in enumerate(value):
            collect(one, f"{at}[{n}]", into)
    elif isinstance(value, (nnx.State, nnx.Module)):
        for key, one in jax.tree_util.tree_leaves_with_path(value):
            collect(one, f"{at}{jax.tree_util.keystr(key)}", into)
    else:
        into[at] = np.asarray(jax.device_get(value))


def collect_recording(recording: Any, at: str, into: dict[str, Any]) -> None:
    into[f"{at} steps"] = np.array(recording.steps)
    for number, one in enumerate(recording.passes):
        for site, quantity in one.layout.keys:
            summary = one.summary(site, quantity)
            collect(summary, f"{at} {number} {site} {quantity}", into)


def collect_record(record: Any, at: str, into: dict[str, Any]) -> None:
    from nnx_inspector.records.record import named_summaries

    into[f"{at} unseen"] = str(record.unseen)
    for site in record:
        for number, call in enumerate(record[site].calls):
            for quantity in ("output", "input", "gradient", "changes"):
                for name, one in named_summaries(getattr(call, quantity)):
                    collect(one, f"{at} {site} {number} {quantity} {name}", into)
            collect(getattr(call, "units", None), f"{at} {site} {number} units", into)
            collect(call.ran, f"{at} {site} {number} ran", into)


DIVIDED = re.compile(r"\bdown\b|\bup 0 units|\.sites\[")
"""Figures of arrays of which each device has only a part: its part of a sum, for example."""


def differences_of(
    ours: Mapping[str, Any], one: Mapping[str, Any], *, divided: bool
) -> dict[str, str]:
    """The figures that differ, each in words."""
    found: dict[str, str] = {}
    for at in {**one, **ours}:
        if divided and DIVIDED.search(at):
            continue
        if at not in ours or at not in one:
            found[at] = "only on " + ("one device" if at in one else "the mesh")
            continue
        why = difference(at, ours[at], one[at])
        if why:
            found[at] = why
    return found


BOUNDS = np.abs((np.arange(4096, dtype=np.uint32) << 20).view(np.float32))
"""The least magnitude in each bin."""


def without_rounding(counts: np.ndarray, *, like: np.ndarray) -> np.ndarray:
    """Counts in bins, with all values in one that may be the rounding of sums of larger ones."""
    largest = BOUNDS[(like > 0) & np.isfinite(BOUNDS)].max(initial=0.0)
    small = np.flatnonzero(1e-6 * largest > BOUNDS)
    found = counts.astype(np.int64)
    found[small], found[small[:1]] = 0, found[small].sum()
    return found


def difference(at: str, ours: Any, one: Any) -> str:
    if not isinstance(one, np.ndarray) or not isinstance(ours, np.ndarray):
        same = type(ours) is type(one) and ours == one
        return "" if same else f"{ours!r}, not {one!r}"
    if ours.shape != one.shape:
        return f"shape {ours.shape}, not {one.shape}"
    if at.endswith(" bins"):  # a value may round into the bin beside its own
        here, there = (np.cumsum(without_rounding(x, like=one)) for x in (ours, one))
        near = (np.append(0, there[:-1]) <= here) & (here <= np.append(there[1:], there[-1]))
        return "" if near.all() else f"{(~near).sum()} bins differ"
    if one.dtype == object:
        ours, one = ours.astype(np.float64), one.astype(np.float64)
    if one.dtype.kind in "iub":
        return "" if (ours == one).all() else f"{ours.ravel()[:6]}, not {one.ravel()[:6]}"
    ours, one = ours.astype(np.float64), one.astype(np.float64)
    scale = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    same = np.isclose(ours, one, rtol=1e-4, atol=max(1e-5 * scale, 1e-6), equal_nan=True)
    return "" if same.all() else f"{ours[~same].ravel()[:3]}, not {one[~same].ravel()[:3]}"


@functools.cache
def run_on_one(build: Any, batch: Any, function: str) -> dict[str, Any]:
    """What a function says on one device."""
    return run_on(Setup(build=build, kind="auto", parallel="data", batch=batch), None, function)


def run_on(setup: Setup, mesh: Any, function: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    of = one_device() if mesh is None else mesh
    with jax.set_mesh(of):
        w = make_world(setup, mesh)
    with jax.set_mesh(of) if setup.current else contextlib.nullcontext():
        result: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as said, record_error("", result):
            warnings.simplefilter("always")
            result[""] = FUNCTIONS[function](w)
        collect(result[""], "", found)
        for n, warning in enumerate(sorted({str(one.message) for one in said})):
            found[f"warning {n}"] = warning
    return found


def run(name: str, function: str) -> dict[str, Any]:
    setup, began = SETUPS[name], time.perf_counter()
    ours = run_on(setup, setup.mesh(), function)
    middle = time.perf_counter()
    one = run_on_one(setup.build, setup.batch, function)
    end = time.perf_counter()
    if "" in ours and len(one) > 1:
        differences = {"": str(ours[""])}
    else:
        differences = differences_of(ours, one, divided=setup.build is Mapped)
    return {
        "setup": name,
        "function": function,
        "figures": len(one),
        "seconds": [round(middle - began, 1), round(end - middle, 1)],
        "differences": differences,
        "errors": {at: v for at, v in one.items() if isinstance(v, str) and "Error: " in v},
    }


def main() -> None:
    for name in cli.setups or SETUPS:
        for function in cli.functions or FUNCTIONS:
            line = run(name, function)
            if cli.trace:
                print(
                    line["setup"],
                    "|",
                    function,
                    "|",
                    line["figures"],
                    line["seconds"],
                    len(line["differences"]),
                )
                for title in ("differences", "errors"):
                    for at, why in list(line[title].items())[:12]:
                        print("     ", title[0], at, ":", why[:300], flush=True)
            else:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
