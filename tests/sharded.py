"""Runs models over eight devices, and prints what their records say, as one line of JSON a case.

`python sharded.py` is one process with eight devices. `python sharded.py PORT NUMBER` is one of
two with four each. Each case: the collectives of the compiled program without and with us, and
the figures of the record, sharded and of one device. Run by `test_sharded`.
"""

from __future__ import annotations

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*", help="of the cases, all if there is none")
parser.add_argument("--coordinator", help="address of the first of two processes")
parser.add_argument("--process", type=int, help="which of the two this is")
asked = parser.parse_args()
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 if asked.coordinator else 8}"
os.environ["JAX_PLATFORMS"] = "cpu"

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
from nnx_inspector.record import named_summaries  # noqa: E402

FIGURES = ("mean", "std", "min", "max", "norm")
COUNTS = ("size", "finite", "zeros", "nan", "posinf", "neginf")


def mesh_of(kind: AxisType, shape: tuple[int, int] = (4, 2)) -> Any:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, built for a mesh or (None) for one device, and its batch and where it lies.

    `bare` and `ours` are the functions to compare; `record` finds the record in what ours returns.
    """

    build: Callable[[Any], nnx.Module]
    spec: P = P("data")
    shape: tuple[int, ...] = (128, 16, models.WIDTH)
    explicit: bool = False
    bare: Callable[..., Any] = nnx.value_and_grad(models.loss)
    ours: Callable[..., Any] = nni.value_and_grad(models.loss)
    record: Callable[[Any], Any] = lambda out: out[0][1]


def build(cls: Any, **options: Any) -> Callable[[Any], nnx.Module]:
    return lambda mesh: cls(nnx.Rngs(0), **options)


def with_mesh(cls: Any, **options: Any) -> Callable[[Any], nnx.Module]:
    return lambda mesh: cls(nnx.Rngs(0), mesh=mesh, **options)


def forward(model: Any, x: Any) -> Any:
    return model(x)


def captured(model: Any, x: Any) -> Any:
    return nni.capture(model)(x)


FORWARD: dict[str, Any] = {"bare": forward, "ours": captured, "record": lambda out: out[1]}


def microbatches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Four microbatches in a scan; of ours the records are stacked."""

    def run(model: Any, x: Any) -> Any:
        graphdef, state = nnx.split(model)
        parts = x.reshape(32, 4, *x.shape[1:]).swapaxes(0, 1)
        parts = jax.lax.with_sharding_constraint(parts, P(None, "data"))
        one = lambda state, x: (state, step(nnx.merge(graphdef, state), x))  # noqa: E731
        return jax.lax.scan(one, state, parts)[1]

    return run


def each_example(step: Callable[..., Any]) -> Callable[..., Any]:
    """A record each of eight examples, which lie on different devices."""

    def run(model: Any, x: Any) -> Any:
        graphdef, state = nnx.split(model)
        one = lambda state, x: step(nnx.merge(graphdef, state), x)  # noqa: E731
        return jax.vmap(one, in_axes=(None, 0))(state, x)

    return run


def out(spec: P) -> Callable[[Any], Any]:
    return lambda mesh: models.MLP(nnx.Rngs(0), out=None if mesh is None else spec)


CASES: dict[str, Case] = {
    "data": Case(build(models.MLP), P("data")),
    "tensor": Case(build(models.MLP), P()),
    "both": Case(build(models.MLP), P("data")),
    "all on one axis": Case(build(models.MLP), P(("data", "model"))),
    "forward": Case(build(models.MLP), **FORWARD),
    "constrained": Case(build(models.Constrained)),
    "uneven": Case(build(models.Uneven)),
    "scan": Case(build(models.Deep)),
    "scan of remat": Case(build(models.Deep, remat=True)),
    "ensemble": Case(build(models.Ensemble)),
    "inner jit": Case(with_mesh(models.Jitted)),
    "image": Case(build(models.Image), shape=(128, 16, 32, 2)),
    "attention": Case(build(models.Attention), shape=(32, 32, models.WIDTH)),
    "loops": Case(build(models.Stepped), **FORWARD),
    "microbatches": Case(
        build(models.MLP),
        bare=microbatches(nnx.value_and_grad(models.loss)),
        ours=microbatches(nni.value_and_grad(models.loss)),
    ),
    "each example": Case(
        build(models.MLP),
        shape=(8, 512, models.WIDTH),
        bare=each_example(nnx.value_and_grad(models.loss)),
        ours=each_example(nni.value_and_grad(models.loss)),
    ),
    "shard_map": Case(with_mesh(models.Mapped)),
    "shard_map, scan": Case(with_mesh(models.Mapped, loops="scan")),
    "shard_map, cond": Case(with_mesh(models.Mapped, loops="cond")),
    "shard_map, while": Case(with_mesh(models.Mapped, loops="while")),
    "shard_map, unchecked": Case(with_mesh(models.Mapped, checked=False)),
    "explicit, data": Case(out(P("data")), explicit=True),
    "explicit, shard_map": Case(with_mesh(models.Mapped), explicit=True),
}


def arguments(case: Case, mesh: Any) -> tuple[nnx.Module, jax.Array]:
    """The model and its batch: on the mesh, or for None on one device."""
    model, x = case.build(mesh), models.integers(*case.shape)
    if mesh is None:
        return model, jnp.asarray(x)
    models.place(model, mesh)
    at = NamedSharding(mesh, case.spec)
    return model, jax.make_array_from_callback(x.shape, at, lambda index: x[index])


def read(record: Any) -> dict[str, Any]:
    """All that a record says: site and quantity -> a list of what each summary says."""
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
    case = CASES[name]
    mesh = mesh_of(AxisType.Explicit if case.explicit else AxisType.Auto)
    with jax.set_mesh(mesh):
        model, x = arguments(case, mesh)
        lowered = nnx.jit(case.bare).lower(model, x)
        bare = collectives(lowered.compile().as_text())
        ours = collectives(nnx.jit(case.ours).lower(model, x).compile().as_text())
        record = case.record(nnx.jit(case.ours)(model, x))
        said = read(jax.device_get(record))
    return {"name": name, "bare": bare, "ours": ours, "said": said, "unseen": record.unseen}


def run_on_one(name: str) -> dict[str, Any]:
    case = CASES[name]
    with jax.set_mesh(mesh_of(AxisType.Auto, (1, 1))):
        record = case.record(nnx.jit(case.ours)(*arguments(case, None)))
    return {"name": name, "said": read(jax.device_get(record))}


if __name__ == "__main__":
    for name in asked.names or CASES:
        print(json.dumps([run(name), run_on_one(name)]), flush=True)
