"""Metrics that are not finite, with the step and count of NumPy; and healthy neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
STEPS = 23
NAN, INF = float("nan"), float("inf")


def planted(at: dict[int, Any], of: Any = float) -> list[Any]:
    """A metric that falls, with other values at some steps."""
    return [at.get(step, of(1 / (step + 1))) for step in range(STEPS)]


@nnx.jit
def forward(model: Any, x: jax.Array) -> Any:
    return model(x)


def watched(values: dict[str, list[Any]], every: int) -> list[Any]:
    insp = nni.Inspector(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), X, display=False)
    for i, x in enumerate(insp.watch([X] * STEPS, every=every)):
        forward(inside(insp).core.model, x)
        insp.metrics(**{name: of[i] for name, of in values.items() if of[i] is not None})
    found = insp.findings
    insp.close()
    return found


def in_a_script(values: dict[str, list[Any]], every: int) -> list[Any]:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    with nni.watch(model, every=every) as recording:
        for i in range(STEPS):
            forward(model, X)
            recording.add_metrics(
                i, {name: of[i] for name, of in values.items() if of[i] is not None}
            )
    return nni.diagnose(recording)


def in_a_file(values: dict[str, list[Any]], every: int, folder: Any) -> list[Any]:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    with nni.watch(model, every=every, save=folder / "run.nni") as recording:
        for i in range(STEPS):
            forward(model, X)
            recording.add_metrics(
                i, {name: of[i] for name, of in values.items() if of[i] is not None}
            )
    return nni.diagnose(nni.load(folder / "run.nni"))


def as_numbers(of: list[Any]) -> np.ndarray[Any, Any]:
    """float64[n, 2]: step and value of what was given."""
    return np.array([(i, float(np.asarray(x))) for i, x in enumerate(of) if x is not None])


bf16, f16, f32 = jnp.bfloat16, np.float16, jnp.float32
FAULTS: dict[str, dict[str, list[Any]]] = {
    "in a measured step": {"loss": planted({10: NAN})},
    "between two": {"loss": planted({13: NAN})},
    "in the last": {"loss": planted({STEPS - 1: NAN})},
    "from the first on": {"loss": [NAN] * STEPS},
    "and back": {"loss": planted({4: NAN, 5: INF, 19: -INF})},
    "an overflow of float16": {"loss": planted({i: f16(INF) for i in range(8, 20)}, f16)},
    "on the device": {"loss": planted({7: f32(0) / f32(0), 9: bf16(1) / bf16(0)}, f32)},
    "one of three": {"a": planted({}), "b": planted({3: INF, 11: INF}), "c": planted({})},
    "all of three": {"a": planted({9: NAN}), "b": planted({8: NAN}), "c": planted({21: -INF})},
    "given now and then": {
        "loss": [None if i % 5 else NAN if i == 15 else 1.0 for i in range(STEPS)]
    },
}


@pytest.mark.parametrize("every", [10, 1])
@pytest.mark.parametrize("way", ["insp.watch", "nni.watch", "a file"])
def test_each_planted_metric_is_found_with_its_step_and_count(
    way: str, every: int, tmp_path: Any
) -> None:
    for what, values in FAULTS.items():
        if way == "a file":
            found = in_a_file(values, every, tmp_path)
        else:
            found = (watched if way == "insp.watch" else in_a_script)(values, every)
        (one,) = [finding for finding in found if finding.rule == "metrics"]
        tables = {name: as_numbers(of) for name, of in values.items()}
        bad = {name: rows[~np.isfinite(rows[:, 1])] for name, rows in tables.items()}
        bad = {name: rows for name, rows in bad.items() if len(rows)}
        assert (one.severity, one.site) == ("warning", ""), what
        assert one.step == min(rows[0, 0] for rows in bad.values()), what
        assert one.evidence == {
            "metrics": len(bad),
            "nan": sum(int(np.isnan(rows[:, 1]).sum()) for rows in bad.values()),
            "infinite": sum(int(np.isinf(rows[:, 1]).sum()) for rows in bad.values()),
        }, what
        for name, rows in tables.items():
            said = f"in {len(bad.get(name, []))} of {len(rows)} values, first at step "
            said += f"{bad[name][0, 0]:.0f}" if name in bad else ""
            assert (f"{name!r} was " in one.message) == (name in bad), what
            assert name not in bad or said in one.message, (what, one.message)


HEALTHY: dict[str, dict[str, list[Any]]] = {
    "falls to 0": {"loss": planted({20: 0.0, 21: -0.0, 22: 5e-324})},
    "as large as floats go": {"loss": planted({9: 1.7e308, 10: -1.7e308, 11: f32(3e38)})},
    "whole numbers and truths": {"count": [10**300] * STEPS, "done": [True, False] * 11 + [True]},
    "given now and then": {"accuracy": [None if i % 7 else 0.5 for i in range(STEPS)]},
    "of float16 and bfloat16": {"a": planted({}, f16), "b": planted({5: bf16(3e38)}, bf16)},
}


@pytest.mark.parametrize("every", [10, 1])
def test_healthy_neighbours_give_no_alarm(every: int, tmp_path: Any) -> None:
    for what, values in HEALTHY.items():
        for found in (
            watched(values, every),
            in_a_script(values, every),
            in_a_file(values, every, tmp_path),
        ):
            assert [one for one in found if one.rule == "metrics"] == [], what


def test_a_perturbation_that_was_on_is_named() -> None:
    insp = nni.Inspector(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), X, display=False)
    insp.perturb("", nni.Zero())
    for x in insp.watch([X] * 3, every=1):
        insp.metrics(loss=jnp.log(jnp.abs(forward(inside(insp).core.model, x)).mean()))
    (one,) = [found for found in insp.findings if found.rule == "metrics"]
    assert "a perturbation was on in step 0, which may have made it" in one.message
    insp.close()
