"""What each process of a job says of an inspector in it: passes, and loops that one of them steers.

Run by `multi_process_training.main`: a case gets the mesh, and returns what is printed as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from collectives import collectives
from compilations import ProgramTexts
from flax import nnx
from inside import inside
from jax.sharding import PartitionSpec as P
from multi_process_training import RATE, STEPS, D, Net, X, loss_of, made, placed, whole

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.live.programs import process_group
from nnx_inspector.screen.control.state import CONTROL, ControlState

SITES = ("", "a", "b")
MOMENTS = ("size", "mean", "std", "min", "max", "zeros")
LAST = 12
"""The last step of a steered loop; every third is measured."""


def figures(summary: Any) -> list[float]:
    return [float(getattr(summary, name)) for name in MOMENTS]


def steps_of(insp: Any) -> list[Any]:
    """The steps of the recorded passes, and whether they are perturbed."""
    return [[one.step, one.perturbed] for one in insp.recording.passes]


def refused(read: Callable[[], object]) -> str:
    try:
        read()
    except InspectorError as error:
        return str(error)
    return "no error"


def alone(mesh: Any) -> dict[str, Any]:
    """Process 0 reads all that needs a pass, and perturbs; process 1 only trains afterwards."""
    net, optimizer, x = made(mesh, "data", Net)
    said: dict[str, Any] = {}
    if jax.process_index() == 0:
        # jax puts these arrays on the whole mesh, which is the current one
        with contextlib.closing(nni.Inspector(Net(nnx.Rngs(0)), X)) as unplaced:
            said["unplaced"] = refused(lambda: unplaced.values("a"))
    if jax.process_index() == 0:
        insp = nni.Inspector(net, x)
        insp.perturb("a", nni.Zero())
        insp.perturb("b", nni.Noise(0.5))
        said["effect"] = insp.effect is None
        said["passes"] = len(insp.recording)
        with tempfile.TemporaryDirectory() as folder:
            reads = {
                "findings": lambda: insp.findings,
                "first_nan": insp.first_nan,
                "values": lambda: insp.values("a"),
                "parameter values": lambda: insp.values("a", part="parameter"),
                "parameters": lambda: insp.parameters("a"),
                "units": lambda: insp.units("a"),
                "sweep": lambda: insp.sweep(progress=False),
                "sweep in a thread": insp.start_sweep,
                "examples": lambda: insp.examples(None, "a"),
                "compare": lambda: insp.compare(net),
                "page": lambda: insp.to_html(pathlib.Path(folder) / "page.html"),
            }
            said["errors"] = {name: refused(read) for name, read in reads.items()}
        said["notices"] = inside(insp).notices
        insp.close()
    step = whole()
    return {**said, "losses": [float(step(net, optimizer, x)) for _ in range(3)]}


def local(mesh: Any) -> dict[str, Any]:
    """Process 1 has a model of its own, of which the other knows nothing."""
    if jax.process_index() == 0:
        return {}
    net, optimizer, x = made(None, "data", Net)
    insp, step = nni.Inspector(net, x, display=False), whole()
    insp.perturb("a", nni.Scale(0.5))
    said = {"output": figures(insp.recording.summary("a")), "values": insp.values("a").shape}
    said |= {"change": insp.effect.output_change, "rows": len(insp.sweep(progress=False))}
    insp.switch_all(False)
    said["losses"] = [float(step(net, optimizer, x)) for _ in insp.watch(range(4), every=2)]
    with nni.watch(net, every=2) as recording:
        said["losses"] += [float(step(net, optimizer, x)) for _ in range(4)]
    said["steps"] = [*steps_of(insp), *([one.step, False] for one in recording.passes)]
    insp.close()
    return said


def passes(mesh: Any) -> dict[str, Any]:
    """Every function that makes a pass, called in all processes; with no mesh, in one."""
    said, unlike = dict[str, Any](), ""
    for layout in ("data", "tensor", "replicated"):
        net, _, x = made(mesh, layout, Net)
        found = said[layout] = {}
        insp = nni.Inspector(net, x, display=False)
        insp.run()
        found["run"] = [figures(insp.recording.summary(site)) for site in SITES]
        found["loss"] = float(insp.step(loss_of, x))
        found["step"] = [figures(insp.recording.summary(site, "gradient")) for site in SITES]
        insp.perturb("a", nni.Noise(0.5))
        if mesh is not None and layout == "data":
            more = insp.perturb("b", nni.Scale(3.0)) if jax.process_index() == 0 else None
            unlike = refused(functools.partial(insp.step, loss_of, x))
            if more is not None:
                more.remove()
        insp.perturb("b", nni.Scale(2.0))
        found["perturbed"] = float(insp.step(loss_of, x))
        found["effect"] = [insp.effect.output_change, insp.effect.clean["loss"]]
        insp.close()
        functions = {
            "capture": lambda net, x: nni.capture(net)(x)[1],
            "value_and_grad": lambda net, x: nni.value_and_grad(loss_of)(net, x)[0][1],
        }
        for name, function in functions.items():
            for how, f in (("", function), (" in jit", nnx.jit(function))):
                if how or name == "capture":  # line by line
                    record = f(net, x)
                    found[name + how] = [figures(record[site].output) for site in SITES]
        found["gradient"] = [figures(record[site].gradient) for site in SITES]
    return {"layouts": said, "unlike": unlike}


class Stages(nnx.Module):
    """Stages that pass the batch around, one on each device of a pipeline."""

    def __init__(self, stages: int, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs), in_axes=0, out_axes=0)
        self.stages = nnx.split_rngs(splits=stages)(make)(rngs)
        self.head, self.mesh = nnx.Linear(D, D, rngs=rngs), nnx.static(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.stages.kernel[...], self.stages.bias[...]
        count = kernel.shape[0]
        if self.mesh is None:
            for i in range(count):
                x = nnx.tanh(x @ kernel[i] + bias[i])
            return self.head(x)

        def run(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
            ring, number = [(i, (i + 1) % count) for i in range(count)], jax.lax.axis_index("d")
            for _ in range(count):
                x = jax.lax.ppermute(nnx.tanh(x @ kernel[0] + bias[0]), "d", ring)
            return jax.lax.psum(jnp.where(number == 0, x, 0), "d")

        how = {"mesh": self.mesh, "in_specs": (P("d"), P("d"), P()), "out_specs": P()}
        return self.head(jax.shard_map(run, check_vma=False, **how)(kernel, bias, x))


def pipeline(mesh: Any, stages: int = 4) -> dict[str, Any]:
    """A loop whose stages lie on the devices of all processes; with no mesh, on one."""
    net = Stages(stages, nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(RATE), wrt=nnx.Param)
    x = jnp.asarray(X) if mesh is None else placed(mesh, X, P())
    if mesh is not None:
        net.mesh = nnx.static(mesh)
        for one in (net, optimizer):

            def place(path: Any, x: Any) -> jax.Array:
                staged = "stages" in [getattr(key, "key", None) for key in path]
                return placed(mesh, x, P("d") if staged else P())

            nnx.update(one, jax.tree.map_with_path(place, nnx.state(one)))
    step = whole()
    with nni.watch(net, every=2) as recording:
        losses = [float(step(net, optimizer, x)) for _ in range(STEPS)]
    found = [
        [one.step, site, what, *figures(s)]
        for one in recording.passes
        for site, what, s in one.items()
        if site in ("", "head")
    ]
    return {"losses": losses, "record": found}


def steered(mesh: Any) -> dict[str, Any]:
    """Process 0 switches, adds, tunes and removes; process 1 switches something in vain."""
    me, steers = jax.process_index(), jax.process_index() == 0
    net, optimizer, x = made(mesh, "data", Net)
    insp, step, losses = nni.Inspector(net, x, display=False), whole(), list[float]()
    handle = insp.perturb("a", nni.Scale(0.5))
    units = insp.perturb("a", nni.Mask([1.0, 0.5] * D))
    handle.enabled = units.enabled = False
    for i in insp.watch(range(LAST + 1), every=3):
        if steers and i == 1:
            handle.enabled = True
        if me == 1 and i == 4:
            insp.perturb("b", nni.Zero())
        if steers and i == 5:
            insp.perturb("b", nni.Shift(0.3).only([1, 2]))
            handle.strength = 0.25
            units.enabled = True
            insp.perturb("b", nni.Apply(lambda x: 0 * x))  # no text holds it
        if i == 8:
            handles = [[h.site, h.enabled, h.not_acting] for h in insp.perturbations]
        if i == 10:  # in all of them alike
            for one in insp.perturbations:
                one.enabled = False
        losses.append(float(step(net, optimizer, x)))
    found = {"losses": losses, "steps": steps_of(insp), "handles": handles}
    insp.close()
    return found


def by_settings() -> list[float]:
    """The losses of `steered` in one process: a loop for each setting, which begins with it."""
    net, optimizer, x = made(None, "data", Net)
    insp, step, losses = nni.Inspector(net, x, display=False), whole(), list[float]()
    handle = insp.perturb("a", nni.Scale(0.5))
    units = insp.perturb("a", nni.Mask([1.0, 0.5] * D))
    handle.enabled = units.enabled = False

    def train(steps: int) -> None:
        losses.extend(float(step(net, optimizer, x)) for _ in insp.watch(range(steps), every=1))

    train(3)
    handle.enabled = True
    train(3)
    handle.strength, units.enabled = 0.25, True
    insp.perturb("b", nni.Shift(0.3).only([1, 2]))
    train(6)
    insp.switch_all(False)
    train(1)
    insp.close()
    return losses


def left(mesh: Any) -> dict[str, Any]:
    """Each process in turn leaves a loop that it goes on training, or closes its inspector."""
    net, optimizer, x = made(mesh, "data", Net)
    step, said = whole(), dict[str, Any]()
    for how in ("interrupted", "closed"):
        for number in range(jax.process_count()):
            insp, losses = nni.Inspector(net, x, display=False), list[float]()
            mine, rest = number == jax.process_index(), iter(range(LAST))
            try:
                for i in insp.watch(rest, every=3):
                    losses.append(float(step(net, optimizer, x)))
                    if mine and i == 4 and how == "closed":
                        insp.close()
                    if mine and i == 4 and how == "interrupted":
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                losses += [float(step(net, optimizer, x)) for _ in rest]
            steps = [one.step for one in inside(insp).core.recording.passes]
            said[f"{how} {number}"] = {"losses": losses, "steps": steps}
            insp.close()
    with nni.watch(net, every=3) as recording:  # they still agree
        said["after"] = [float(step(net, optimizer, x)) for _ in range(4)]
    return {**said, "steps": [one.step for one in recording.passes]}


def late(mesh: Any) -> dict[str, Any]:
    """The coordinator says nothing in time to a measured step, and nothing any more to another."""
    net, optimizer, x = made(mesh, "data", Net)
    insp, step, losses = nni.Inspector(net, x, display=False), whole(), list[float]()
    barrier = process_group.Coordinator.wait_at_barrier

    def is_gone(*_: Any) -> bool:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: it is gone")

    for i in insp.watch(range(LAST + 1), every=3):
        if i == 4:
            process_group.Coordinator.wait_at_barrier = lambda *_: False
        if i == 7:
            process_group.Coordinator.wait_at_barrier = barrier
        if i == 10:
            process_group.Coordinator.wait_at_barrier = is_gone
        losses.append(float(step(net, optimizer, x)))
    process_group.Coordinator.wait_at_barrier = barrier
    insp.close()
    said = {"steps": [one.step for one in inside(insp).core.recording.passes]}
    with tempfile.TemporaryDirectory() as folder:
        how: Any = {"save": pathlib.Path(folder) / "run.nni", "control": True}
        with nni.watch(net, every=3, **how) as recording:
            for i in range(LAST):
                if i == 4:  # a steered region meets before its measured steps too
                    process_group.Coordinator.wait_at_barrier = lambda *_: False
                losses.append(float(step(net, optimizer, x)))
    process_group.Coordinator.wait_at_barrier = barrier
    return {**said, "losses": losses, "steered": [one.step for one in recording.passes]}


def saving(mesh: Any) -> dict[str, Any]:
    """A run that saves. In the environment, RUN_FILE is the file, RUN_START the step to begin with
    and RUN_KILLS the process that kills itself in step 9, -1 for none.
    """
    net, optimizer, x = made(mesh, "data", Net)
    step, start = whole(), int(os.environ["RUN_START"])
    kills = int(os.environ["RUN_KILLS"]) == jax.process_index()
    with nni.watch(net, every=2, save=os.environ["RUN_FILE"], start=start) as recording:
        for i in range(start, LAST):
            step(net, optimizer, x).block_until_ready()
            if kills and i == 9:
                os.kill(os.getpid(), signal.SIGKILL)
    return {"steps": recording.steps}


def controlled(mesh: Any) -> dict[str, Any]:
    """Runs that are steered from elsewhere: requests are sent before the steps of CONTROLLED, and
    answered while process 0 waits. In a second run, process 1 leaves the region.
    """
    me, several = jax.process_index(), jax.process_count()
    net, optimizer, x = made(mesh, "data", Net)
    step, losses, refusals = whole(), list[float](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.nni"
        how: Any = {"save": path, "control": {"b": nni.Shift(0.3)}}
        with nni.watch(net, every=3, **how) as recording:
            for i in range(CONTROLLED_LAST + 1):
                if me == 0 and i == 2:
                    run = nni.open(path, display=False)
                if me == 0 and i in CONTROLLED:
                    CONTROLLED[i](run)
                if me == 0 and several > 1 and i == 9:
                    values = functools.partial(run.values, "a")
                    nowhere = functools.partial(run.perturb, "nowhere", nni.Zero())
                    refusals |= {"values": refused(values), "nowhere": refused(nowhere)}
                losses.append(float(step(net, optimizer, x)))
        said = {"steps": [[one.step, one.perturbed] for one in recording.passes]}
        if me == 0:
            table = ControlState.from_columns(nni.load(path).table(CONTROL))
            said |= {"done": table.done, "refusals": refusals}
            run.close()
        with nni.watch(net, every=3, **how) as recording, contextlib.suppress(StopIteration):
            for i in range(CONTROLLED_LAST + 1):
                if me == 0 and i == 2:
                    run = nni.open(path, display=False)
                    run.perturb("a", nni.Scale(0.5))
                if several > 1 and me == 1 and i == 6:
                    raise StopIteration
                if me == 0 and several > 1 and i == 7:
                    refusals["left"] = refused(run.measure_next)
                    now = ControlState.from_columns(run.recording.table(CONTROL))
                    refusals["off"] = now.perturbations[-1].not_acting
                losses.append(float(step(net, optimizer, x)))
        if several > 1 and me == 1:  # on with the training, unwatched
            losses += [float(step(net, optimizer, x)) for _ in range(6, CONTROLLED_LAST + 1)]
        if me == 0:
            run.close()
        said["left"] = [[one.step, one.perturbed] for one in recording.passes]
    return {**said, "losses": losses}


CONTROLLED: dict[int, Callable[[Any], object]] = {
    2: lambda run: run.perturb("a", nni.Scale(0.5)),
    4: lambda run: setattr(run, "every", 2),
    7: lambda run: setattr(run.perturbations[0], "enabled", True),  # what was declared
    9: lambda run: run.measure_next(),
    13: lambda run: [setattr(one, "enabled", False) for one in run.perturbations],
    15: lambda run: setattr(run, "every", 1000),
}
CONTROLLED_LAST = 18


def by_requests() -> list[float]:
    """The losses of `controlled` in one process, with each setting from its step on."""
    net, optimizer, x = made(None, "data", Net)
    step, losses = whole(), list[float]()
    scale, shift = ("a", nni.Scale(0.5)), ("b", nni.Shift(0.3))
    for steps, those in (
        (3, ()),
        (5, (scale,)),
        (6, (scale, shift)),
        (5, ()),
        (3, ()),
        (3, (scale,)),
    ):
        with contextlib.ExitStack() as stack:
            for site, one in those:
                stack.enter_context(nni.perturb(site, one))
            losses += [float(step(net, optimizer, x)) for _ in range(steps)]
    losses += [float(step(net, optimizer, x)) for _ in range(6, CONTROLLED_LAST + 1)]
    return losses


def exchanged(mesh: Any) -> dict[str, Any]:
    """What the programs of a bare loop, and of a watched one that is perturbed later, exchange
    between devices; and which of them are the bare one's, but for where their lines come from.
    """
    bare, found = "", list[Any]()
    for watched in (False, True):
        net, optimizer, x = made(mesh, "data", Net)
        step, region = whole(), contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as folder, ProgramTexts() as texts:
            path = pathlib.Path(folder) / "run.nni"
            if watched:
                region = nni.watch(net, every=3, save=path, control=True)
            with region:
                for i in range(5 if watched else 1):
                    if watched and i == 2 and jax.process_index() == 0:
                        with contextlib.closing(nni.open(path, display=False)) as run:
                            run.perturb("a", nni.Scale(0.5))
                    step(net, optimizer, x).block_until_ready()
        for text in texts.of["step"]:
            body = re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n%") :])
            bare = bare or body
            found.append([body == bare, dict(collectives(text))])
    return {"programs": found}


FUNCTIONS = (alone, local, passes, pipeline, steered, left, late, controlled, exchanged)
CASES: dict[str, Callable[[Any], dict[str, Any]]] = {f.__name__: f for f in FUNCTIONS}
"""Those that need nothing in the environment."""
