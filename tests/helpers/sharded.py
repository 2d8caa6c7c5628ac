"""Runs models over eight devices, and prints their records as one line of JSON per case.

`python sharded.py` is one process with eight devices. `python sharded.py PORT NUMBER` is one of
two with four each. A case has the collectives of the compiled program without and with the package,
and the figures of the records over all devices and on one. Run by `test_sharded`.
"""

from __future__ import annotations

import argparse
import os

from devices import UNOPTIMIZED

parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*", help="of the cases, all if there is none")
parser.add_argument("--coordinator", help="address of the first of two processes")
parser.add_argument("--process", type=int, help="which of the two this is")
cli = parser.parse_args()
count = f"--xla_force_host_platform_device_count={4 if cli.coordinator else 8}"
os.environ["XLA_FLAGS"] = f"{count} {UNOPTIMIZED}"
os.environ["JAX_PLATFORMS"] = "cpu"

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import sharded_models as models  # noqa: E402
from collectives import collectives  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import nnx_inspector as nni  # noqa: E402
from nnx_inspector.records.record import named_summaries  # noqa: E402

FIGURES = ("mean", "std", "min", "max", "norm")
COUNTS = ("size", "finite", "zeros", "nan", "posinf", "neginf")


def make_mesh(kind: AxisType, shape: tuple[int, int] = (4, 2)) -> Any:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)


BATCH = (64, 16, models.WIDTH)
GRADED: dict[str, Any] = {
    "bare": nnx.value_and_grad(models.loss),
    "ours": nni.value_and_grad(models.loss),
    "record": lambda out: out[0][1],
}
FORWARD: dict[str, Any] = {
    "bare": lambda model, x: model(x),
    "ours": lambda model, x: nni.capture(model)(x),
    "record": lambda out: out[1],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, built for a mesh or (None) for one device, its batch and the batch's sharding.

    `bare` and `ours` are the functions to compare; `record` finds the record in the result of
    `ours`. Without `context` they run without a current mesh; without `jit` they run eagerly.
    """

    build: Callable[[Any], nnx.Module]
    bare: Callable[..., Any]
    ours: Callable[..., Any]
    record: Callable[[Any], Any]
    spec: tuple[Any, ...] = ("data",)
    shape: tuple[int, ...] = BATCH
    explicit: bool = False
    context: bool = True
    jit: bool = True


def build(cls: Any, **options: Any) -> Callable[[Any], nnx.Module]:
    return lambda mesh: cls(nnx.Rngs(0), **options)


def with_mesh(cls: Any, **options: Any) -> Callable[[Any], nnx.Module]:
    return lambda mesh: cls(nnx.Rngs(0), mesh=mesh, **options)


def microbatches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Four microbatches in a scan; `ours` returns stacked records."""

    def run(model: Any, x: Any) -> Any:
        graphdef, state = nnx.split(model)
        parts = x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1)
        parts = jax.lax.with_sharding_constraint(parts, P(None, "data"))
        one = lambda state, x: (state, step(nnx.merge(graphdef, state), x))  # noqa: E731
        return jax.lax.scan(one, state, parts)[1]

    return run


def each_example(step: Callable[..., Any]) -> Callable[..., Any]:
    """One record for each of eight examples, which lie on different devices."""

    def run(model: Any, x: Any) -> Any:
        graphdef, state = nnx.split(model)
        one = lambda state, x: step(nnx.merge(graphdef, state), x)  # noqa: E731
        return jax.vmap(one, in_axes=(None, 0))(state, x)

    return run


def case(model: Callable[[Any], nnx.Module], mode: dict[str, Any] = GRADED, **options: Any) -> Case:
    return Case(build=model, **mode, **options)


def transformed(by: Callable[..., Any], mode: dict[str, Any] = GRADED) -> dict[str, Any]:
    return {**mode, "bare": by(mode["bare"]), "ours": by(mode["ours"])}


def graded(*only: str) -> dict[str, Any]:
    """A smaller selection, which compiles faster."""
    return {**GRADED, "ours": nni.value_and_grad(models.loss, only=only, inputs=False)}


def explicit(kind: str) -> Case:
    only = graded("same" if kind == "auto" else "layer/**/up")
    return case(with_mesh(models.Explicit, kind=kind), only, explicit=True)


def mapped(mode: dict[str, Any] = GRADED, **options: Any) -> Case:
    return case(with_mesh(models.Mapped, **options), mode)


MLP = build(models.MLP)
CASES: dict[str, Case] = {
    "data": case(MLP, spec=("data",)),
    "tensor": case(MLP, spec=()),
    "both": case(MLP, graded("up", "down")),
    "one axis": case(MLP, spec=(("data", "model"),)),
    "no mesh is current": case(MLP, context=False),
    "eager": case(MLP, jit=False, shape=(16, 16, models.WIDTH)),
    "constrained": case(build(models.Constrained)),
    "uneven": case(build(models.Uneven), graded("cut")),
    "scan": case(build(models.Deep)),
    "scan of remat": case(build(models.Deep, remat=True), graded("**/up")),
    "ensemble": case(build(models.Ensemble)),
    "inner jit": case(with_mesh(models.Jitted)),
    "image": case(build(models.Image), shape=(128, 16, 32, 2)),
    "attention": case(build(models.Attention), shape=(32, 32, models.WIDTH)),
    "loops": case(build(models.Stepped), FORWARD),
    "microbatches": case(MLP, transformed(microbatches)),
    "each example": case(MLP, transformed(each_example), shape=(8, 512, models.WIDTH)),
    "shard_map": mapped(),
    "shard_map, eager": case(with_mesh(models.Mapped), jit=False, shape=(16, 16, models.WIDTH)),
    "shard_map, scan": mapped(loops="scan"),
    "shard_map, cond": mapped(graded("up", "down", "same"), loops="cond"),
    "shard_map, while": mapped(loops="while"),
    "shard_map, unchecked": mapped(checked=False),
    "explicit, shard_map": case(with_mesh(models.Mapped), explicit=True),
    **{f"explicit, {kind}": explicit(kind) for kind in ("scan", "remat", "cond", "vmap", "auto")},
}


def arguments(case: Case, mesh: Any) -> tuple[nnx.Module, jax.Array]:
    """The model and its batch on the mesh, or on one device for None."""
    model, x = case.build(mesh), models.integers(*case.shape)
    if mesh is None:
        return model, jnp.asarray(x)
    models.place(model, mesh)
    at = NamedSharding(mesh, P(*case.spec))
    return model, jax.make_array_from_callback(x.shape, at, lambda index: x[index])


def read(record: Any) -> dict[str, Any]:
    """The content of a record: site and quantity -> the figures of each summary."""
    said: dict[str, Any] = {}
    for site in record:
        for number, call in enumerate(record[site].calls):
            for quantity in ("output", "input", "gradient", "changes"):
                for name, s in named_summaries(getattr(call, quantity)):
                    bins = s.merged().bins
                    used = np.flatnonzero(bins)
                    said[f"{site} {number} {quantity} {name}".strip()] = {
                        "rows": list(s.rows),
                        "ran": np.sum(call.ran).item(),
                        "counts": {c: getattr(s, c) for c in COUNTS},
                        "bins": {str(i): int(bins[i]) for i in used},
                        "figures": {f: getattr(s, f) for f in FIGURES},
                    }
    return said


def run(name: str) -> dict[str, Any]:
    """One case over the mesh."""
    case = CASES[name]
    mesh = make_mesh(AxisType.Explicit if case.explicit else AxisType.Auto)
    with jax.set_mesh(mesh):
        model, x = arguments(case, mesh)
    with jax.set_mesh(mesh) if case.context else contextlib.nullcontext():
        bare = ours = {}
        step = nnx.jit(case.ours) if case.jit else case.ours
        if case.jit:
            lowered = [nnx.jit(f).lower(model, x) for f in (case.bare, case.ours)]
            bare, ours = (collectives(one.compile().as_text()) for one in lowered)
        record = case.record(step(model, x))
    return {
        "bare": bare,
        "ours": ours,
        "said": read(jax.device_get(record)),
        "unseen": record.unseen,
        "whole": all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(record)),
    }


def run_on_one(name: str) -> dict[str, Any]:
    """The content of the record on one device."""
    case = CASES[name]
    with jax.set_mesh(make_mesh(AxisType.Auto, (1, 1))):
        return read(case.record(nnx.jit(case.ours)(*arguments(case, None))))


def main() -> None:
    if cli.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(cli.coordinator, 2, cli.process, initialization_timeout=60)
    for name in cli.names or CASES:
        said = {"name": name, "sharded": run(name)}
        if not cli.coordinator:
            said["one"] = run_on_one(name)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
