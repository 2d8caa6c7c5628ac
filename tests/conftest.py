"""Set up once for all tests: the CPU, and hypothesis without deadlines (compiling takes time)."""

import contextlib
import gc
import itertools
import os
import pathlib
import platform
import signal
import time
import zlib
from collections.abc import Iterator

import platformdirs

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def processor() -> Iterator[str]:
    """What tells this processor from others: of each core, what it can do."""
    yield platform.machine()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        yield from sorted({line for line in lines if line.startswith(("model name", "flags"))})
    yield platform.processor()


# Half of a run's time is compiling, so what one run compiles the next ones read. jax's key holds
# the program, the versions and the flags, but not the processor that XLA makes its code for.
_made_for = zlib.crc32("".join(processor()).encode())
COMPILED = platformdirs.user_cache_path("nnx-inspector") / "tests" / f"{_made_for:08x}"
KEPT = 14 * 86_400.0
"""The seconds for which a compiled program is kept."""
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# two workers share it, and jax compiles what it reads while the other has written half of it
HALF_WRITTEN = "Error reading persistent compilation cache entry"
os.environ.setdefault("PYTHONWARNINGS", f"ignore:{HALF_WRITTEN}:UserWarning")  # in the kernels

import jax  # noqa: E402 - it reads the above when imported
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis_examples import LONG  # noqa: E402
from random_arrays import draw_powers_of_two  # noqa: E402

draw_powers_of_two()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a run in a shell's background ignores interrupts, and so would what tests send them to
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "nnx_inspector",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nnx_inspector")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"ignore:{HALF_WRITTEN}:UserWarning")
    if config.option.markexpr.startswith("long"):
        os.environ[LONG] = "1"
    if not hasattr(config, "workerinput"):
        for kept in COMPILED.glob("*"):
            if kept.stat().st_mtime < time.time() - KEPT:
                kept.unlink()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000)  # to look at all objects takes a second: see below


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: a collection looks at what tests made only


FILES = itertools.count(1)
TOGETHER = 20
"""Test files whose compiled programs are kept; those of all files take some eight gigabytes."""


@pytest.fixture(autouse=True, scope="module")
def programs_of_some_files() -> Iterator[None]:
    yield
    if next(FILES) % TOGETHER == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def after_tabulate() -> Iterator[None]:
    """Remove what `nnx.tabulate` leaves on classes for good.

    Without the package it also leaves inherited methods on `nnx.Linear` and others; every later
    `nnx.capture(method_outputs=...)` of the process then recurses without end.
    """
    from leftovers import classes

    before = {cls: dict(vars(cls)) for cls in classes()}
    yield
    for cls, attributes in before.items():
        for name in set(vars(cls)) - set(attributes):
            if callable(getattr(cls, name)) and name != "__abstractmethods__":
                delattr(cls, name)


FEW = 2
"""A matrix of more cases has one of them in the run that everybody waits for, in some tests the
first and in others the last; the others are long."""
WHOLE = {
    "test_interrupts",
    "test_docs",
    "test_rooms",
    "test_flawed_metrics",
    "test_gradient_oracle",
    "test_detection",
    "test_reports",
    "test_sites",
    "test_load",
    "test_networks",
    "test_notebooks",
    "test_protocol",
    "test_protocol_mutated",
    "test_python_text",
    "test_compat",
    "test_training_iterators",
    "test_training_loops",
}
"""Files whose cases are cheap and each test something else."""


FIRST = {"test_notebooks", "test_quickstart", "test_wheel", "test_processes"}
"""Files that take longest; if they began last, one core would wait for them."""


@pytest.hookimpl(tryfirst=True)  # before the marker deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each run has one case of a long matrix; `--long` runs all, by hand."""
    files = dict.fromkeys(item.path for item in items)
    waiting = [path for path in files if path.parent.name == "browser"]
    working = [path for path in files if path.parent.name != "browser"]
    # the files that wait for a browser are spread among those that keep a core busy
    place = {
        path: (path.stem not in FIRST, number / len(some))
        for some in (waiting, working)
        for number, path in enumerate(some)
    }
    items.sort(key=lambda item: place[item.path])
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.stem not in WHOLE and not item.get_closest_marker("long"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in by_test.items():
        kept = cases[-(zlib.crc32(name.encode()) % 2)]
        for case in cases:
            if len(cases) > FEW and case is not kept:
                case.add_marker(pytest.mark.long)
