"""What is known of a softmax that chooses: a row for each head of an attention, or each expert.

A row on the device is the number of queries (of an attention) or tokens (of a router) that were
looked at, then `CHOICE_STATS`. Invariant: what was not measured is NaN, never a zero. Imports no
jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

CHOICE_STATS: Final = (
    "entropy", "evenness", "distance", "first", "logit", "keys", "load", "dropped",
)  # fmt: skip
"""The entropy of the probabilities in nats, and as a share of the logarithm of the number of
allowed keys (or experts), which is the most that it can be; the distance between query and key,
weighted by probability; the probability of the first key; the greatest logit; the number of
allowed keys, or of a router's tokens; the share of the tokens that choose the expert; the share of
these choices that are dropped. All but the last three and the greatest logit are means over queries
or tokens."""
LENGTH: Final = 1 + len(CHOICE_STATS)
LARGEST: Final = ("logit",)
"""The figures of which several calls have the largest; of the others, the mean."""
HEAD_STATS: Final = CHOICE_STATS[:6]
EXPERT_STATS: Final = ("load", "dropped", "entropy", "evenness", "logit")
SHOWN: Final = {
    False: ("evenness", "distance", "first", "logit"),
    True: ("load", "dropped", "evenness"),
}
"""The figures of heads, and of experts (True), that are shown over the steps and go to trackers."""
ROUTER_ENTROPY: Final = "router_entropy"
"""What the "evenness" of experts is called there: all experts of a router have the same."""

MOST_EXAMPLES: Final = 16
"""The most examples, evenly spaced, whose probabilities are looked at."""
MOST_QUERIES: Final = 64
"""The most queries of each, evenly spaced from the last one back."""
MASKED: Final = 5000.0
"""A logit that is this much below the largest of its query belongs to a masked key: masks add -1e4
or less, or put in a large negative number."""


ATTENTION: Final = "attention"
EXPERTS: Final = "experts"
"""What follows the `@` in the key of a site, but for a number."""


def is_expert(site: str) -> bool:
    """Whether the rows of a site are those of experts, and not of heads."""
    return site.rpartition("@")[2].partition("[")[0] == EXPERTS


def merge_rows(found: Sequence[np.ndarray]) -> npt.NDArray[np.float32]:
    """The rows of several calls, each `[..., n, LENGTH]`, as those of one: float32[n,
    CHOICE_FIGURES]. If calls differ in the number of heads, the last one stands for all.
    """
    many = [np.asarray(one, np.float64) for one in found]
    many = [
        one.reshape(-1, *one.shape[-2:]) for one in many if one.shape[-2:] == many[-1].shape[-2:]
    ]
    every = np.concatenate(many)
    count, figures = every[..., :1], every[..., 1:]
    known = (count > 0) & ~np.isnan(figures)
    weight = np.where(known, count, 0.0)
    total = weight.sum(axis=0)
    with np.errstate(invalid="ignore"):
        rows = np.where(known, figures * weight, 0.0).sum(axis=0) / np.where(
            total > 0, total, np.nan
        )
    for name in LARGEST:
        at = CHOICE_STATS.index(name)
        most = np.where(known[..., at], figures[..., at], -np.inf).max(axis=0)
        rows[..., at] = np.where(total[..., at] > 0, most, np.nan)
    return rows.astype(np.float32)


def choice_stat(rows: np.ndarray, name: str) -> np.ndarray:
    """One figure of each row, as a view."""
    return rows[..., CHOICE_STATS.index(name)]
