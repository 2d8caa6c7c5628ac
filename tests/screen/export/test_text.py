"""What stands in place of the screen where no widget is shown."""

from __future__ import annotations

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest
from flax import nnx
from inside import inside
from IPython.core.formatters import DisplayFormatter

import nnx_inspector as nni
from nnx_inspector.screen.export.text import LONGEST, ROWS, tree_text


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def insp():
    inspector = nni.Inspector(Net(nnx.Rngs(0)), jnp.ones((4, 3)), display=False)
    inspector.run(jnp.ones((4, 3)))
    yield inspector
    inspector.close()


def printed(value: object) -> list[str]:
    """What a terminal of IPython prints for a value."""
    data, _ = DisplayFormatter().format(value)
    return data["text/plain"].splitlines()


def test_a_terminal_prints_the_tree(insp):
    title, *tree = printed(insp)
    assert title == repr(insp)
    assert title.startswith("Inspector(Net, ")
    cells = [line.split() for line in tree]
    assert cells == [
        ["site", "type", "inputs", "output", "params"],
        ["Net", "Net", "float32[4,3]", "float32[4,8]", str(4 * 8 + 2 * 9 * 8)],
        ["first", "Linear", "float32[4,3]", "float32[4,8]", str(4 * 8)],
        ["blocks", "List", str(2 * 9 * 8)],
        ["0", "Linear", "float32[4,8]", "float32[4,8]", str(9 * 8)],
        ["1", "Linear", "float32[4,8]", "float32[4,8]", str(9 * 8)],
    ]
    assert [len(line) - len(line.lstrip()) for line in tree] == [0, 0, 2, 2, 4, 4]


def test_a_run_from_a_file_prints_its_tree(insp, tmp_path: pathlib.Path):
    insp.recording.save(tmp_path / "run.nni")
    run = nni.open(tmp_path / "run.nni", display=False)
    title, head, *rows = printed(run)
    assert title.startswith("Run(Recording(1 passes, ")
    assert head.split() == ["site", "type"]  # a recording alone has neither shapes nor parameters
    assert [row.split() for row in rows][1:] == [
        ["first", "Linear"],
        ["blocks/0", "Linear"],
        ["blocks/1", "Linear"],
    ]
    run.close()


def test_a_closed_inspector_prints_one_line(insp):
    insp.close()
    assert printed(insp) == [repr(insp)]
    assert "closed" in repr(insp)


@pytest.mark.parametrize("many", [ROWS, ROWS + 1, 5000])
def test_it_stays_short(insp, many: int):
    _, row, *_ = inside(insp).view.layout.sites
    long = dataclasses.replace(row, name="n" * 500, inputs="float32[1], " * 500, depth=300)
    lines = tree_text("title\x1b[31m", [row, long] * (many // 2) + [row] * (many % 2)).splitlines()
    more = many - ROWS
    assert len(lines) == 2 + ROWS + (more > 0)
    assert lines[0] == "title [31m"
    assert max(map(len, lines)) <= 5 * (LONGEST + 2)
    assert lines[-1].startswith("...") == (more > 0)
    if more:
        assert lines[-1] == f"... and {more} more rows"


def test_no_name_moves_the_terminal(insp):
    row = dataclasses.replace(inside(insp).view.layout.sites[1], name="a\x1b[2J\nb\r")
    text = tree_text("title", [row])
    assert len(text.splitlines()) == 3
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


def test_nothing_is_known_yet():
    assert tree_text("Inspector(Net)", ()) == "Inspector(Net)"
