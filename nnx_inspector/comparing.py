"""A clean and a perturbed pass in one program: how far each site's output moved, and the logits.

Both run the same traced call on the same inputs, so they differ in what is perturbed and in
nothing else. Invariant: what has no figure (no floating-point output, a zero norm) is NaN, never
0. Chooses nothing to perturb and traces no call.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from nnx_inspector.effects import (
    kl_divergence_in_trace,
    logits_of,
    relative_change_in_trace,
    top1_changed_in_trace,
)
from nnx_inspector.gates import passed
from nnx_inspector.harvest import Plan
from nnx_inspector.keeping import Keep
from nnx_inspector.staging import Staged
from nnx_inspector.taps import OUTPUT

ROOT = ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differences:
    """A perturbed pass against the clean one.

    Attributes:
        sites: for each site whose values can be kept, `|perturbed - clean| / |clean|` over all
            floating-point arrays that its calls return.
        kl: where the model returns one array of logits, the mean divergence of the perturbed from
            the clean distribution, in nats; NaN elsewhere.
        top1_changed: likewise the fraction of predictions that are others.
    """

    sites: dict[str, Any]
    kl: Any
    top1_changed: Any


def differences(stage: Staged, inputs: list[Any], plan: Plan, *, root: str = ROOT) -> Differences:
    """Evaluate a stage clean, and perturbed: with other inputs (parameters) and a plan.

    Args:
        stage: the traced call, its outputs marked.
        inputs: those of the perturbed pass; the clean one has the stage's own.
        plan: whose `perturb` is what is done.
        root: the site that returns what the model returns; `""` where it is not called.
    """
    keep = Keep(values=True, parts=(OUTPUT,))
    nothing = Plan(summarise=False, keep=keep)
    _, seen = stage.evaluate(stage.inputs, plan=nothing)
    clean = _values(stage, seen)
    _, seen = stage.evaluate(inputs, plan=dataclasses.replace(plan, summarise=False, keep=keep))
    moved = _values(stage, seen)
    pairs: dict[str, list[tuple[Any, Any]]] = {}
    for site in clean:
        # an eager call may have taken another way, with other calls
        if [x.shape for x in clean[site]] == [x.shape for x in moved.get(site, [])]:
            pairs[site] = list(zip(clean[site], moved[site], strict=True))
    return _figures(pairs, root if root in pairs else ROOT)


@functools.partial(jax.jit, static_argnums=1)
def _figures(pairs: dict[str, list[tuple[Any, Any]]], root: str) -> Differences:
    sites = {site: relative_change_in_trace(*zip(*of, strict=True)) for site, of in pairs.items()}
    kl = top1 = jnp.float32(jnp.nan)
    if len(output := pairs.get(root, [])) == 1 and logits_of(output[0][0]) is not None:
        kl, top1 = kl_divergence_in_trace(*output[0]), top1_changed_in_trace(*output[0])
    return Differences(sites, kl, top1)


def _values(stage: Staged, seen: list[Any]) -> dict[str, list[Any]]:
    """The arrays that the calls of each site returned; none where a call runs a number of times
    that only the data knows.
    """
    found: dict[str, list[Any]] = {}
    for mark, one in passed(stage.survey, seen):
        if one.kept:
            found.setdefault(mark.site, []).extend(kept.value for kept in one.kept)
    return found
