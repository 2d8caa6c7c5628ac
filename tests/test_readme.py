"""The README's code blocks run as they stand, and what it names exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.splitlines()[0])
def test_a_code_block_runs(block):
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_a_code_block():
    assert BLOCKS


def test_files_it_names_exist():
    for path in [*re.findall(r"\]\(([^)]+)\)", TEXT), *re.findall(r"python3 (\S+\.py)", TEXT)]:
        assert (ROOT / path).exists(), path
