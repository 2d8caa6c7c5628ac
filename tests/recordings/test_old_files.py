"""Files that earlier versions wrote, kept as they are: they are read as they were then."""

from __future__ import annotations

import hashlib
import pathlib

import numpy as np
import pytest
from summaries import assert_readable, assert_same

from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.samples.parameter_stats import UPDATE_STATS

OLD_FILES = pathlib.Path(__file__).parent / "old_files"


def digest(recording: Recording) -> str:
    """A hash of all that was measured."""
    found = hashlib.sha256()
    for p in recording.passes:
        marks = (p.number, p.step, p.kind, p.perturbed, p.news, p.setting, sorted(p.nonfinite))
        found.update(repr((*marks, p.keys)).encode() + p.packed.data)
        if p.figures is not None:
            names = p.figures.sites, p.figures.parameters, p.figures.varied
            found.update(repr(names).encode() + p.figures.rows.tobytes())
            before, later = np.split(p.figures.parameter_rows, [-len(UPDATE_STATS)], axis=1)
            assert np.isnan(later).all()  # these files lack it
            found.update(p.figures.masks.tobytes() + before.tobytes())
    curves = {name: curve.tolist() for name, curve in recording.curves().items()}
    tables = {title: table.to_numpy().tolist() for title, table in recording.tables.items()}
    found.update(repr((recording.sites, curves, tables)).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        # an Inspector's run, with a perturbation, an Inf, a metric, figures and a table
        ("inspected", [0, 0, 0, 1, 2, 3], "a7647cb58850c4dd"),
        # a run of nni.watch that was killed with two passes held
        ("killed", [0, 1, 2, 3], "64bbc135a266269b"),
    ],
)
def test_a_file_of_an_earlier_version(
    tmp_path: pathlib.Path, name: str, steps: list[int], expected: str
) -> None:
    found = load(OLD_FILES / f"{name}.nni")
    assert found.steps == steps
    assert digest(found) == expected
    assert found.facts is not None
    types = {one.site: one.type for one in found.facts.sites}
    assert (types["up"], types["norm"], types["blocks"]) == ("Linear", "BatchNorm", "Linear")
    sizes = {one.path: (one.dtype, one.size) for one in found.facts.parameters}
    assert sizes["blocks/kernel"] == ("float32", 192)
    assert (found.marks, found.seams) == ((), ())
    assert_readable(found)
    assert (found.parameters, found.where) == ((), "")
    found.save(tmp_path / "again.nni")
    assert_same(load(tmp_path / "again.nni"), found)
