"""Programs call Python functions, are not waited for, and keep the functions alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nnx_inspector._compat import host_calls, native, started
from nnx_inspector.program.host.primitives import EFFECT, ask, tell

PATIENCE = 60
F32 = jax.ShapeDtypeStruct((), jnp.float32)


def work(x: jax.Array) -> jax.Array:
    """Enough of it that XLA does not run the program in the thread of its caller."""
    for _ in range(4):
        x = jnp.tanh(x @ x)
    return x


def test_a_program_is_started_without_waiting_for_what_it_asks() -> None:
    """Fails where jaxlib runs such a program to its end before it returns."""
    may_answer = threading.Event()
    answers: list[bool] = []

    def host() -> tuple[Any, ...]:
        answers.append(may_answer.wait(PATIENCE))
        return (np.float32(2),)

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return work(x * ask(host, [F32])[0])

    may_answer.set()
    x = jnp.ones((300, 300))
    with started.fast_path(EFFECT):
        jax.block_until_ready(program(x))
        may_answer.clear()
        y = program(x)
        assert not y.is_ready()
        may_answer.set()
        started.wait()
        assert y.is_ready()
    assert answers == [True, True]


def test_programs_ask_in_the_order_in_which_they_were_started() -> None:
    told: list[int] = []

    @jax.jit
    def slow(x: jax.Array, i: Any) -> tuple[jax.Array, jax.Array]:
        return work(x), tell(lambda i: told.append(int(i)), True, i)

    quick = jax.jit(lambda i: tell(lambda i: told.append(int(i)), True, i))
    x = jnp.ones((300, 300))
    with started.fast_path(EFFECT):
        for i in range(20):
            slow(x, 2 * i)
            quick(2 * i + 1)
        started.wait()
    assert told == list(range(40))


KINDS = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64")


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_arrays_of_each_kind_come_and_go(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(0, 2, shape), jnp.dtype(kind)) for kind in KINDS]
    told: list[Any] = []

    @jax.jit
    def program(*xs: jax.Array) -> list[jax.Array]:
        zero = tell(lambda *ys: told.extend(ys), True, *xs)
        out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        return ask(lambda: tuple(arrays), out, after=[zero])

    answered = program(*arrays)
    started.wait()
    for sent, got, back in zip(arrays, told, answered, strict=True):
        assert isinstance(got, np.ndarray)
        assert got.flags.owndata or got.base is None
        assert (got.dtype, back.dtype) == (sent.dtype, sent.dtype)
        np.testing.assert_array_equal(got, sent)
        np.testing.assert_array_equal(np.asarray(back), sent)
    assert ml_dtypes.bfloat16 in [x.dtype for x in told]


def test_a_function_lives_as_long_as_its_program() -> None:
    class Host:
        def __call__(self) -> tuple[Any, ...]:
            return (np.float32(1),)

    def made() -> tuple[Any, weakref.ref[Host]]:
        host = Host()
        program = jax.jit(lambda x: x + ask(host, [F32])[0])
        return program, weakref.ref(host)

    program, host = made()
    with started.fast_path(EFFECT):
        for _ in range(3):
            assert program(1.0) == 2
            gc.collect()
    assert host() is not None
    del program
    jax.clear_caches()
    gc.collect()
    jax.jit(lambda x: x - ask(lambda: (np.float32(1),), [F32])[0])(1.0)  # lets go of the others
    assert host() is None


def test_a_function_outlives_what_jax_keeps_of_its_program_in_python() -> None:
    """jax's cache in C++ runs programs of which Python has no trace any more."""

    def made() -> Any:
        program = jax.jit(lambda x: x + ask(lambda: (np.float32(1),), [F32])[0])
        return program.lower(F32).compile().runtime_executable()

    executable = made()
    jax.clear_caches()
    gc.collect()
    another = jax.jit(lambda x: x + ask(lambda: (np.float32(8),), [F32])[0])
    assert another(1.0) == 9
    (out,) = executable.execute_sharded([jnp.ones(())]).disassemble_into_single_device_arrays()
    assert float(out[0]) == 2


LEAVES = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
from nnx_inspector._compat import started
from nnx_inspector.program.host.primitives import EFFECT, ask, tell

F32 = jax.ShapeDtypeStruct((), jnp.float32)
reached, told = threading.Event(), []

def host(*_):
    reached.set()
    return (np.float32(1),)

@jax.jit
def program(x):
    asked = ask(host, [F32], after=[x])[0]
    for _ in range(4):
        x = jnp.tanh(x @ x + asked)
    return x, tell(lambda y: print("told", flush=True), True, x[0, 0])

def run():
    with started.fast_path(EFFECT):
        x, _ = program(jnp.ones((300, 300)))
        jax.block_until_ready(x)
        reached.clear()
        for _ in range(3):
            x, _ = program(x)
        reached.wait()

if sys.argv[1] == "thread":
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_python_ends_while_programs_run(where: str) -> None:
    """Without care the last program waits for ever for a Python that has ended."""
    command = [sys.executable, "-c", LEAVES, where]
    done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if where == "main":
        assert done.stdout.split() == ["told"] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_raises_answers_zeros() -> None:
    """It must not; but the user's program goes on where it does."""

    def host() -> tuple[Any, ...]:
        raise ValueError("a fault of ours")

    program = jax.jit(lambda x: x + ask(host, [F32])[0])
    if native.serves_here():
        assert program(1.0) == 1


def test_a_program_that_outlives_its_function_reads_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    program = jax.jit(lambda x: x + ask(lambda: (np.float32(1),), [F32])[0])
    assert program(1.0) == 2
    if native.serves_here():
        monkeypatch.setattr(host_calls, "_functions", {})
        assert program(1.0) == 1


def test_without_the_library_jax_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves_here", lambda: False)
    told: list[Any] = []

    @jax.jit
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        zero = tell(lambda *xs: told.extend(xs), True, x, y, x)
        return x * ask(lambda: (np.float32(3),), [F32], after=[zero])[0]

    assert "callback" in program.lower(jnp.ones(2), jnp.zeros((2, 2))).as_text()
    np.testing.assert_array_equal(program(jnp.ones(2), jnp.zeros((2, 2))), [3, 3])
    started.wait()
    assert [x.shape for x in told] == [(2,), (2, 2), (2,)]
