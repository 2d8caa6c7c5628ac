"""A report has the numbers of the recording, is bounded, and no name breaks its tables."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.findings.finding import Finding, Findings
from nnx_inspector.screen.export.markdown import report
from nnx_inspector.stats.summarize import summarize

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The tables of a page by their titles, each row by its heads."""
    found: dict[str, list[dict[str, str]]] = {}
    title = ""
    for line in page.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("|"):
            cells = [x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.setdefault(title, []).append(dict(enumerate(cells)))  # type: ignore[arg-type]
    out: dict[str, list[dict[str, str]]] = {}
    for name, (heads, rule, *rows) in found.items():
        assert set(rule.values()) == {"---"}
        assert all(row.keys() == heads.keys() for row in rows)
        out[name] = [{heads[i]: row[i] for i in row} for row in rows]  # type: ignore[index]
    return out


@pytest.fixture
def recording() -> nni.Recording:
    recording = nni.Recording()
    for step in range(3):
        figures: Any = {
            "": {"output": summarize(X * step)},
            "a|b\n#`": {"output": summarize(X), "gradient": summarize(X / 3)},
            "a|b\n#`/kernel": {"parameter": summarize(X), "parameter_gradient": summarize(-X)},
        }
        recording.append(step, figures, metrics={"loss": [4.0, np.nan, 2.5][step]})
    return recording


def test_the_numbers_are_those_of_numpy(recording: nni.Recording) -> None:
    found = tables(report(recording, [], title="Run"))
    wide = X.astype(np.float64)
    whole, site = found["Sites in step 2"]
    assert whole["site"] == "(the model)"
    assert float(whole["mean"]) == pytest.approx(2 * wide.mean(), rel=1e-3)
    assert float(site["std"]) == pytest.approx(wide.std(), rel=1e-3)
    assert float(site["min"]) == pytest.approx(wide.min(), rel=1e-3)
    assert float(site["max"]) == pytest.approx(wide.max(), rel=1e-3)
    assert float(site["gradient norm"]) == pytest.approx(np.linalg.norm(wide / 3), rel=1e-3)
    assert (site["zeros %"], site["NaN"], site["Inf"]) == ("0", "0", "0")
    (kernel,) = found["Parameters in step 2"]
    assert kernel["values"] == "128"
    assert float(kernel["norm"]) == pytest.approx(np.linalg.norm(wide), rel=1e-3)
    assert float(kernel["gradient norm"]) == pytest.approx(np.linalg.norm(wide), rel=1e-3)
    assert kernel["update ÷ value"] == ""  # not known is not 0
    (loss,) = found["Metrics"]
    assert [loss[x] for x in ("points", "first", "last", "least", "greatest")] == [
        "3", "4", "2.5", "2.5", "4",
    ]  # fmt: skip
    assert loss["not finite"] == "1, first at step 1"


def test_a_finding_puts_its_site_first_and_shows_its_evidence(recording: nni.Recording) -> None:
    one = Finding(
        rule="constant", site="a|b\n#`", step=1, severity="warning",
        evidence={"values_seen": 128.0}, what="All are the same", advice="look",
    )  # fmt: skip
    page = report(recording, [one], title="Run")
    assert "1. **warning: constant at a\\|b \\#\\`**\n\n   All are the same: look." in page
    assert "Evidence: values seen 128." in page
    assert [row["site"] for row in tables(page)["Sites in step 2"]] == [
        r"a\|b \#\`",
        "(the model)",
    ]
    assert "No rule finds anything wrong." not in page


def test_more_than_a_reader_needs_is_counted_and_the_page_stays_short() -> None:
    recording = nni.Recording()
    names = [f"{i}|{'x' * 10_000}\n" for i in range(300)]
    figures: Any = {name: {"output": summarize(X), "gradient": summarize(X)} for name in names}
    figures |= {f"{name}/p": {"parameter": summarize(X)} for name in names}
    recording.append(0, figures, metrics={name[:200]: 1.0 for name in names})
    every = [
        Finding(
            rule="constant", site=name, step=0, severity="error", what="y" * 5000, advice="z",
            evidence={f"{name[:300]}{i}": 1.0 for i in range(100)},
        )
        for name in names
    ]  # fmt: skip
    page = report(recording, every, title="t" * 100_000, rows=60)
    assert len(page.encode()) < 64 * 1024
    assert "280 more findings." in page
    assert page.count("240 more are left out") == 3
    assert all(len(rows) == 60 for rows in tables(page).values())
    with pytest.raises(ValueError, match="1 to 60 rows for each table, got rows=61"):
        report(recording, [], title="", rows=61)


def test_an_empty_recording_says_that_nothing_was_measured() -> None:
    page = report(nni.Recording(), nni.diagnose(nni.Recording()), title="Run")
    assert "- model: not known" in page
    assert "- measured: nothing" in page
    assert Findings().to_markdown() in page


def test_an_inspector_and_its_file_report_the_same_run(tmp_path: Any) -> None:
    insp = nni.Inspector(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.asarray(X), display=False)
    insp.perturb("", nni.Scale(0.5))
    insp.save(tmp_path / "run.nni")
    insp.run(jnp.asarray(X))
    page = insp.report()
    insp.close()
    with_model = tables(page)
    assert "- model: Linear, 36 parameters, output float32\\[16,4\\]" in page
    assert "- perturbed now: Scale(factor=0.5) at ''" in page
    run = nni.open(tmp_path / "run.nni", display=False)
    from_file = run.report()
    run.close()
    assert from_file.startswith("# Report of run.nni\n")
    newest = f"Sites in step {insp.recording.steps[-1]}"
    assert tables(from_file)[newest] == with_model[newest]
