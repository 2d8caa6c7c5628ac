"""What `tests/run.py` makes of its arguments, and what is said while its environment is set up."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from collections.abc import Callable

import pytest

TESTS = pathlib.Path(__file__).parents[1]
RUN = runpy.run_path(str(TESTS / "run.py"))
OPEN = runpy.run_path(str(TESTS.parent / "notebooks" / "open.py"))


def test_the_cpu_is_the_default() -> None:
    platform, arguments = RUN["asked"](["-k", "merge", "tests/stats"])
    assert platform is None
    assert arguments[:2] == ["-n", str((os.cpu_count() or 1) + 1)]
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


PIP = """#!{python}
import sys
print("Collecting jax", flush=True)
print("Requirement already satisfied: numpy in ./somewhere")
print("Installing collected packages: jax")
print("asked for", *sys.argv[1:4])
sys.exit({code})
"""


@pytest.fixture
def with_pip(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], pathlib.Path]:
    """`open.environment` in a checkout whose environment has a pip that ends with a code."""

    def environment(code: int) -> pathlib.Path:
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PIP.format(python=sys.executable, code=code))
        python.chmod(0o755)
        monkeypatch.setitem(OPEN["environment"].__globals__, "ROOT", tmp_path)
        return OPEN["environment"]("notebook")

    return environment


def test_setting_up_says_what_pip_says_but_not_what_was_there(
    with_pip: Callable[[int], pathlib.Path], capfd: pytest.CaptureFixture[str]
) -> None:
    python = with_pip(0)
    assert python.name == "python"
    assert capfd.readouterr().out.splitlines() == [
        "Installing nnx_inspector[notebook]: minutes the first time, then seconds",
        "Collecting jax",
        "Installing collected packages: jax",
        "asked for -m pip install",
    ]


def test_setting_up_ends_where_pip_fails(
    with_pip: Callable[[int], pathlib.Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="Installing failed; pip says why above"):
        with_pip(1)
    assert "Collecting jax" in capfd.readouterr().out
