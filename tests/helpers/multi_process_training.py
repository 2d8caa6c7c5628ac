"""Processes with two devices each train models in loops that both watch, and print each what it
recorded, and what they trained beside what the same loop trains bare.

`python multi_process_training.py ADDRESS NUMBER COUNT CASE ...`, run by `test_processes`, which
gives the devices. The cases of `inspector_in_job` are run too.
What the second process compiles in a thread is never ready, and that of the first one always is:
they launch the same programs however long one of them takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_inspector as nni
from nnx_inspector import background
from nnx_inspector.live.programs import process_group

D, BATCH, STEPS, RATE = 8, 16, 7, 0.5
X = np.random.default_rng(0).normal(size=(BATCH, D)).astype(np.float32)
COMPILING = "nnx_inspector.variants"
"""The name of the threads that compile what runs in steps that are not measured."""
FIGURES = ("size", "mean", "std", "min", "max", "zeros")


class Net(nnx.Module):
    """Two layers, of which tensor parallelism divides the hidden units."""

    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.a(x)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = Net(rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.inner(x) / 4


class Deep(nnx.Module):
    """Three layers in a scan, computed again in the backward pass."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(lambda rngs: make(rngs))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Block) -> jax.Array:
            return layer(x)

        return run(x, self.layers)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


Train = Callable[[Any, Any, jax.Array], jax.Array]


def whole() -> Train:
    """A step that is one program."""

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def halves() -> Train:
    """A step that is one program forward, and others backward."""
    forward = nnx.jit(loss_of)
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(forward)(model, x)
        update(model, optimizer, grads)
        return loss

    return step


CASES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"layout": "tensor", "every": (3,)},
    "explicit": {"kind": "explicit", "every": (1,), "told": True},
    "halves": {"make": halves, "every": (3,)},
    "deep": {"model": Deep},
    # one process watches alone, then both in different ways, and then in the same way
    "disagreed": {"every": {0: (1, 1, 3), 1: (0, 2, 3)}, "patience": (2, 60, 60)},
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def placed(mesh: Any, x: Any, spec: P) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def made(mesh: Any, layout: str, model: Any) -> tuple[Any, Any, jax.Array]:
    """A model, its optimizer and the batch; on one device without a mesh."""
    net = model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(RATE), wrt=nnx.Param)
    if mesh is None:
        return net, optimizer, jax.numpy.asarray(X)
    divided = {"a": P(None, "d"), "b": P("d", None)} if layout == "tensor" else {}

    def place(path: Any, x: Any) -> jax.Array:
        names = [getattr(key, "key", None) for key in path]
        of_kernel = divided.get(names[0], P()) if "kernel" in names else P()
        return placed(mesh, x, of_kernel)

    for one in (net, optimizer):
        nnx.update(one, jax.tree.map_with_path(place, nnx.state(one)))
    return net, optimizer, placed(mesh, X, P("d") if layout == "data" else P())


def trained(
    mesh: Any,
    step: Train,
    *,
    every: int,
    layout: str = "data",
    model: Any = Net,
    told: bool = False,
) -> dict[str, Any]:
    """The losses and the parameters of a loop, and its record; 0 does not watch it. With `told`,
    process 0 alone writes to a tracker.
    """
    net, optimizer, x = made(mesh, layout, model)
    losses, recording, had = list[float](), None, list[Any]()
    to = had.append if told else None
    with contextlib.ExitStack() as stack:
        if every:
            recording = stack.enter_context(nni.watch(net, every=every, to=to))
        for _ in range(STEPS):
            losses.append(float(step(net, optimizer, x)))
            compiled()
    if told and recording is not None:
        assert len(recording) > 0
        assert [one.step for one in had] == ([] if jax.process_index() else recording.steps)
    everywhere = None if mesh is None else NamedSharding(mesh, P())
    state = jax.jit(lambda state: state, out_shardings=everywhere)(nnx.state(net))
    values = {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(state)}
    return {
        "losses": losses,
        "parameters": {name: np.asarray(x).tolist() for name, x in values.items()},
        "record": {} if recording is None else recorded(recording),
    }


def recorded(recording: Any) -> dict[str, Any]:
    """Step, site and quantity -> figures, and the counts of the bins that are in use."""
    found: dict[str, Any] = {}
    for one in recording.passes:
        for site, quantity, s in one.items():
            found[f"{one.step} {site} {quantity}"] = {
                "figures": {name: float(getattr(s, name)) for name in FIGURES},
                "bins": {str(i): int(s.bins[i]) for i in np.flatnonzero(s.bins)},
            }
        found[f"{one.step} figures"] = [one.figures.sites, one.figures.rows.tolist()]
        rows = one.figures.parameter_rows.tolist()
        found[f"{one.step} parameters"] = [one.figures.parameters, rows]
    return found


def compiled() -> None:
    """Return when nothing is being compiled in a thread."""
    for worker in list(background._running):  # what runs in threads has no public list
        if worker._name == COMPILING:
            worker.wait()


def loops(
    *,
    kind: str = "auto",
    make: Callable[[], Train] = whole,
    every: Any = (3, 1),
    patience: Sequence[float] = (),
    **how: Any,
) -> list[dict[str, Any]]:
    """Watched loops, and last the bare one, each with the same jitted functions."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(KINDS[kind],))
    step = make()
    mine = every[jax.process_index()] if isinstance(every, dict) else every
    found = list[dict[str, Any]]()
    with jax.set_mesh(mesh):
        for number, seconds in itertools.zip_longest((*mine, 0), patience, fillvalue=60.0):
            process_group.PATIENCE = seconds
            found.append(trained(mesh, step, every=number, **how))
    return found


def main(address: str, number: int, count: int, names: Sequence[str]) -> None:
    import inspector_in_job  # which reads this module

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number, initialization_timeout=60)
    if number == 1:
        start = background.Worker._start  # stands in for a thread that never comes to compile
        background.Worker._start = lambda self: None if self._name == COMPILING else start(self)
    for name in names:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if name in CASES:
                said = {"name": name, "loops": loops(**CASES[name])}
            else:
                mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
                context = contextlib.nullcontext() if name == "local" else jax.set_mesh(mesh)
                with context:
                    said = {"name": name, **getattr(inspector_in_job, name)(mesh)}
        print(json.dumps({**said, "warnings": [str(one.message) for one in found]}), flush=True)


if __name__ == "__main__":
    sys.modules["multi_process_training"] = sys.modules["__main__"]  # one module, not two
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
