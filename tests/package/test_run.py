"""What `tests/run.py` makes of its arguments."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys

import pytest

RUN = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "run.py"))


def test_the_cpu_is_the_default() -> None:
    platform, arguments = RUN["asked"](["-k", "merge", "tests/stats"])
    assert platform is None
    assert arguments[:2] == ["-n", "auto"]
    assert arguments[-3:] == ["-k", "merge", "tests/stats"]
    assert "--ignore" not in " ".join(arguments)
    assert RUN["settings"](None) == {"JAX_PLATFORMS": "cpu"}


def test_a_platform_gets_the_tests_of_numbers() -> None:
    platform, arguments = RUN["asked"](["--platform", "cuda", "--long", "-x", "-n", "4"])
    assert platform == "cuda"
    assert arguments[:2] == ["-n", "0"]
    assert arguments[-5:] == ["-m", "long or not long", "-x", "-n", "4"]  # the last -n counts
    tests = pathlib.Path(__file__).parents[1]
    ignored = [a.removeprefix("--ignore=tests/") for a in arguments if a.startswith("--ignore")]
    assert ignored == ["browser", "package", "screen"]
    assert all((tests / folder).is_dir() for folder in ignored)


def test_a_platform_comes_before_the_cpu_at_full_precision() -> None:
    assert RUN["settings"]("tpu") == {
        "JAX_PLATFORMS": "tpu,cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    assert RUN["settings"]("cpu")["JAX_PLATFORMS"] == "cpu"


def test_a_platform_that_jax_does_not_find_is_an_error_that_says_what_to_install() -> None:
    env = {**os.environ, **RUN["settings"]("unheard_of")}
    with pytest.raises(SystemExit, match=r"no unheard_of device: .*\n.*plugin") as error:
        RUN["check_platform"]("unheard_of", sys.executable, env)
    assert "pip install" in str(error.value)


def test_a_platform_that_jax_finds_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    RUN["check_platform"]("cpu", sys.executable, {**os.environ, **RUN["settings"]("cpu")})
    assert capfd.readouterr().out.endswith(" on cpu\n")
