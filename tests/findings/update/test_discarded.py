"""Steps whose new parameters are not kept, beside loops that keep them, against NumPy."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from finding_oracle import close
from flax import nnx
from parameter_oracle import Net, flat, loss_fn, ratio

import nnx_inspector as nni

GRAPHDEF, STATE = nnx.split(Net())
TX = optax.adam(1e-2)
BATCHES = list(jax.random.normal(jax.random.key(1), (8, 16, 4)))


def loss_of(state: Any, x: jax.Array) -> jax.Array:
    return loss_fn(nnx.merge(GRAPHDEF, state), x)


@jax.jit
def step(state: Any, moments: Any, xs: Any) -> Any:
    """One update by the mean of the gradients of some batches."""
    grads = [jax.grad(loss_of)(state, x) for x in xs]
    mean = jax.tree.map(lambda *each: sum(each) / len(each), *grads)
    updates, moments = TX.update(mean, moments, state)
    return optax.apply_updates(state, updates), moments


def run(keep: str, groups: list[list[jax.Array]]) -> tuple[Any, list[Any]]:
    """What was recorded, and the parameters that each step computed."""
    state, moments, made = STATE, TX.init(STATE), list[Any]()
    with nni.watch(nnx.merge(GRAPHDEF, STATE), every=1) as recording:
        for xs in groups:
            new, moved = step(state, moments, xs)
            made.append(new)
            state = new if keep == "all" else state
            moments = moved if keep != "none" else moments
    return recording, made


@pytest.mark.parametrize("keep", ["none", "moments"])
def test_new_parameters_that_are_not_kept_are_found(keep: str) -> None:
    recording, made = run(keep, [[x] for x in BATCHES])
    (one,) = (f for f in nni.diagnose(recording) if f.rule == "update-ratio")
    old = flat(STATE)
    ratios = [
        {path: ratio(old[path], new[path]) for path in old}
        for new in (flat(state) for state in made)
    ]
    most = max((x, path) for of in ratios for path, x in of.items() if np.isfinite(x))
    found = re.search(r"each of 8 measured .* \('(.*)' differs by up to (\S+) times", one.what)
    assert found is not None
    assert found[1] == most[1]
    assert close(found[2], most[0])
    assert one.what.startswith("From step 0 to step 7, ")
    assert (one.site, one.severity, one.evidence["passes"]) == ("", "warning", 8)


@pytest.mark.parametrize("groups", [[[x] for x in BATCHES], [BATCHES]])
def test_parameters_that_are_kept_and_batches_of_one_update_are_healthy(groups: Any) -> None:
    recording, _ = run("all", groups)
    assert len(recording.passes) == 8
    assert [f for f in nni.diagnose(recording) if f.rule == "update-ratio"] == []
