"""The table of constructs equals the result of a run, on this version of flax."""

from __future__ import annotations

import constructs
import pytest
from construct_cases import CONSTRUCTS

COMMITTED = constructs.FILE.read_text()
ROWS = [
    pytest.param(c, id=c.name.replace("`", ""), marks=() if c.quick else pytest.mark.long)
    for c in CONSTRUCTS
]


@pytest.mark.parametrize("construct", ROWS)
def test_the_row_of_a_construct_is_what_a_run_gives(construct):
    """Raises if a figure or a path is wrong, or a call is neither seen nor reported."""
    assert constructs.row(construct) in COMMITTED.splitlines()


def test_the_page_has_every_construct_once_and_nothing_else():
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in COMMITTED.splitlines()}
    assert constructs.page({c.name: rows[c.name] for c in CONSTRUCTS}) == COMMITTED


def test_every_reason_is_of_a_construct_a_moment_and_a_column_that_there_are():
    by_name = {c.name: c for c in CONSTRUCTS}
    for name, moment, column in constructs.KNOWN:
        assert moment in by_name[name].moments
        assert column in constructs.COLUMNS
