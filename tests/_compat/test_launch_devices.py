"""Launches on several devices, and of several processes."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from devices import on_four_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from launches import (
    BATCH,
    HALVES,
    LOSS,
    SUM,
    X,
    branches,
    close,
    halved,
    halvings,
    loss,
    run,
    same,
    taken,
    twice,
)
from marked import Watch, mark


def mesh_of(kind: Any = AxisType.Auto) -> Any:
    """A mesh of four devices if there are so many, else of one."""
    devices = jax.devices()[: 4 if jax.device_count() >= 4 else 1]
    return jax.make_mesh((len(devices),), ("a",), axis_types=(kind,), devices=devices)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_returned_in_addition_is_whole_on_every_device(kind: Any):
    mesh = mesh_of(kind)
    where = NamedSharding(mesh, P("a"))
    with jax.set_mesh(mesh), taken(Watch()) as watch:
        x = jax.device_put(X, where)
        for f in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            same(f(x), jax.grad(loss)(X))
            assert not watch.errors
            for _, value in watch.seen:
                assert value.sharding.is_fully_replicated
                assert value.sharding.device_set == set(mesh.devices.flat)
            close(watch.sums(), *LOSS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_examples_on_several_devices(kind: Any):
    mesh = mesh_of(kind)
    total = lambda x: jax.vmap(branches)(x).sum()  # noqa: E731
    with jax.set_mesh(mesh):
        x = jax.device_put(BATCH, NamedSharding(mesh, P("a")))
        taken_by = [("down", 10), ("up", 12)]
        close(run(jax.jit(jax.vmap(branches)), x), *taken_by)
        close(run(jax.vmap(jax.jit(branches)), x), *taken_by)
        gradients = [("d down", 2), ("d up", 2)]
        close(sorted(run(jax.jit(jax.grad(total)), x)), *gradients, *taken_by)
        y = jax.device_put(HALVES, NamedSharding(mesh, P("a")))
        close(run(jax.jit(jax.vmap(halved)), y), ("x", sum(map(halvings, HALVES.tolist()))))


def programs_on_several(mesh: Any, where: Any) -> dict[str, Callable[[], Any]]:
    """Each runs on all devices for another reason."""

    @jax.jit
    def constrained(x: Any) -> Any:
        return twice(jax.lax.with_sharding_constraint(x, where))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    def mapped(x: Any) -> Any:
        return twice(x)

    return {
        "arguments": lambda: jax.jit(twice)(jax.device_put(X, where)),
        "in_shardings": lambda: jax.jit(twice, in_shardings=where)(np.asarray(X)),
        "out_shardings": lambda: jax.jit(twice, out_shardings=where)(np.asarray(X)),
        "constraint": lambda: constrained(np.asarray(X)),
        "shard_map": lambda: mapped(np.asarray(X)),
    }


def test_wherever_a_program_gets_its_devices_from():
    mesh = mesh_of()
    for name, f in programs_on_several(mesh, NamedSharding(mesh, P("a"))).items():
        with taken(Watch()) as watch:
            same(f(), 2 * X)
            assert not watch.errors
            for _, value in watch.seen:
                assert value.sharding.device_set == set(mesh.devices.flat), name
                assert value.sharding.is_fully_replicated, name
            close(watch.sums(), ("in", SUM), ("out", 2 * SUM))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_part_of_each_device_is_whole_on_every_device(kind: Any):
    mesh = mesh_of(kind)
    f = jax.jit(lambda x: 2 * mark("raw", x))
    with jax.set_mesh(mesh), taken(Watch()) as watch:
        out = f(jax.device_put(X, NamedSharding(mesh, P("a"))))
        assert not watch.errors
        ((_, value),) = watch.seen
        assert value.sharding.is_fully_replicated
        assert out.sharding.spec == P("a")
    same(value, X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_checked", [False, True])
def test_shard_map(kind: Any, is_checked: bool):
    mesh = mesh_of(kind)
    how = {"mesh": mesh, "in_specs": P("a"), "out_specs": P("a"), "check_vma": is_checked}
    f = jax.shard_map(twice, **how)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("a")))
        close(run(jax.jit(f), x), ("in", SUM), ("out", 2 * SUM))
        total = lambda x: (f(x) ** 2).sum()  # noqa: E731
        expected = [("in", SUM), ("out", 2 * SUM), ("d out", 4 * SUM), ("d in", 8 * SUM)]
        close(run(jax.jit(jax.grad(total)), x), *expected)
        close(run(jax.grad(jax.jit(total)), x), *expected)


def test_a_shard_map_outside_every_jit():
    mesh = mesh_of()
    f = jax.shard_map(twice, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    close(run(f, jax.device_put(X, NamedSharding(mesh, P("a")))), ("in", SUM), ("out", 2 * SUM))


def test_on_four_devices():
    if jax.device_count() < 4:
        names = "every_device", "several_devices", "its_devices", "test_shard_map", "a_shard_map"
        on_four_devices(__file__, *names)


def contexts(error: BaseException | None) -> list[str]:
    """The types of the errors during whose handling an error was raised."""
    found = []
    while error is not None:
        found.append(type(error).__name__)
        error = error.__context__
    return found


def test_arrays_on_devices_that_do_not_fit_raise_what_jax_raises():
    if jax.device_count() < 4:
        on_four_devices(__file__, "do_not_fit")
        return
    x, y = (jax.device_put(X, d) for d in jax.devices()[:2])
    f = jax.jit(lambda x, y: mark("a", x) + y)
    with taken(Watch()) as watch:
        with pytest.raises(ValueError, match="Received incompatible devices for jitted") as ours:
            f(x, y)
        assert not watch.errors
    with pytest.raises(ValueError, match="incompatible devices") as theirs:
        f(x, y)
    assert str(ours.value) == str(theirs.value)
    assert contexts(ours.value) == contexts(theirs.value)


APART = pathlib.Path(__file__).parents[1] / "helpers" / "launch_two_processes.py"


def test_two_processes_see_the_same():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    path = os.pathsep.join([str(APART.parents[2]), str(APART.parent)])
    flags = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [sys.executable, str(APART), address, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        for number in range(2)
    ]
    found = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, error[-4000:]
            found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second = found
    assert first == second
    seen = [("a", 28), ("d a", 6 * 28), ("a", 28), ("d a", 6 * 28), ("part", 28)]
    close([(name, x) for name, x in first["seen"]], *seen)
    assert first["out"] == [3 * n for n in range(8)]
