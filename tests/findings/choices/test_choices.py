"""Planted faults of attentions and routers, and healthy ones like them.

Figures come from logits by NumPy in float64; two models show the same from end to end.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from attentions import Attention, causal, heads_in_numpy, padded
from flax import nnx
from mixtures import D, E, Mixture

import nnx_inspector as nni
from nnx_inspector.findings.findings import Findings, diagnose
from nnx_inspector.recordings.facts import Facts, PassStats, SiteFacts
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.summarize import summarize

SEEDS = range(10)
T, HEADS = 24, 4


def judged(site: str, passes: list[dict[str, Any]], *, dtype: str = "float32") -> Findings:
    recording = Recording()
    for step, figures in enumerate(passes):
        count = len(next(iter(figures.values())))
        rows = np.full((count, len(CHOICE_STATS)), np.nan, np.float32)
        for name, values in figures.items():
            rows[:, CHOICE_STATS.index(name)] = values
        of = PassStats(choices=(site,) * count, choice_rows=rows)
        recording.append(step, {"block/attn": {"output": summarize(np.ones(3))}}, figures=of)
    recording.learn(Facts(sites=(SiteFacts(site="block/attn", leaving=dtype),)))
    rules = ("attention", "dead-experts", "uneven-experts")
    return Findings(one for one in diagnose(recording) if one.rule in rules)


def attention(make: Any, seed: int, *, passes: int = 5, **how: Any) -> Findings:
    rng = np.random.default_rng(seed)
    each = [heads_in_numpy(*make(rng)) for _ in range(passes)]
    return judged("block/attn@attention", each, **how)


def scores(rng: Any, scale: float = 1.0, length: int = T) -> np.ndarray:
    return scale * rng.normal(size=(2, HEADS, length, length))


@pytest.mark.parametrize("seed", SEEDS)
def test_collapsed_entropy(seed: int):
    make = lambda rng: (scores(rng, 100.0), causal(T))  # noqa: E731
    (one,) = attention(make, seed)
    assert (one.severity, one.site) == ("warning", "block/attn")
    assert "4 of the 4 heads look at one key each" in one.what
    rng = np.random.default_rng(seed)
    last = [heads_in_numpy(*make(rng)) for _ in range(5)][-1]
    assert one.evidence["logit"] == pytest.approx(last["logit"].max(), rel=1e-5)
    assert one.evidence["evenness"] == pytest.approx(last["evenness"].mean(), rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_large_logits(seed: int):
    offset = np.arange(HEADS)[:, None, None] * 400.0
    found = attention(lambda rng: (scores(rng) + offset, True), seed)
    assert [one.severity for one in found] == ["warning"]
    assert "(head 3), in each of the last 5 passes" in found[0].what
    assert found[0].evidence["logit"] > 1190


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_that_bfloat16_cannot_tell_apart(seed: int):
    make = lambda rng: (scores(rng) + 150, True)  # noqa: E731
    (one,) = attention(make, seed, dtype="bfloat16")
    assert one.evidence["logit"] > 150
    assert attention(make, seed) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_sinks(seed: int):
    def make(rng: Any) -> Any:
        logits = scores(rng)
        logits[..., 0] += 6
        return logits, causal(T)

    (one,) = attention(make, seed)
    assert one.severity == "info"
    assert "4 of the 4 heads give most of their attention to the first token" in one.what
    rng = np.random.default_rng(seed)
    last = [heads_in_numpy(*make(rng)) for _ in range(5)][-1]
    assert one.evidence["first"] == pytest.approx(last["first"].mean(), rel=1e-5)


def previous_token(rng: Any) -> Any:
    return scores(rng) + 25 * np.eye(T, k=-1), causal(T)


HEALTHY = {
    "at first": lambda rng: (scores(rng), causal(T)),
    "all alike": lambda rng: (0 * scores(rng), True),
    "the token before": previous_token,
    "one token": lambda rng: (scores(rng, 100.0, 1), True),
    "three tokens": lambda rng: (scores(rng, 100.0, 3), causal(3)),
    "padding": lambda rng: (scores(rng), padded([2, T], T)),
    "one sharp head": lambda rng: (
        scores(rng) * np.array([200, 1, 1, 1])[:, None, None],
        causal(T),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(5))
def test_healthy_heads(name: str, seed: int):
    assert attention(HEALTHY[name], seed) == []


def test_two_passes_are_no_evidence():
    assert attention(lambda rng: (scores(rng, 100.0), True), 0, passes=2) == []


def router(seed: int, tokens: int, logits: Any, passes: int = 5) -> Findings:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(passes):
        chosen = (rng.normal(size=(tokens, len(logits))) + logits).argmax(-1)
        load = np.bincount(chosen, minlength=len(logits)) / tokens
        found.append({"load": load, "keys": np.full(len(logits), tokens)})
    return judged("block/attn@experts", found)


@pytest.mark.parametrize("seed", SEEDS)
def test_dead_experts(seed: int):
    logits = np.zeros(8)
    logits[[seed % 8, 3]] = -20
    (one,) = router(seed, 512, logits)
    dead = sorted({seed % 8, 3})
    assert one.severity == "warning"
    assert one.evidence["dead"] == len(dead)
    assert f"{', '.join(map(str, dead))} of the 8 of 'block/attn'" in one.what
    assert "because the gate never chooses" in one.what


def sent(seed: int, each: Any, *, tokens: int = 512, dropped: float = np.nan) -> Findings:
    """Of a router that sends tokens with these chances, by expert, in each of its passes."""
    rng = np.random.default_rng(seed)
    loads = [rng.multinomial(tokens, np.array(x) / np.sum(x)) / tokens for x in each]
    figures = {"keys": np.full(len(each[0]), tokens), "dropped": np.full(len(each[0]), dropped)}
    return judged("block/attn@experts", [{"load": x, **figures} for x in loads])


UNEVEN = [
    [[7, 1, 1, 1, 1, 1, 1, 1]] * 5,
    [[1, 1, 1, 1, 1, 1, 1, 15]] * 5,
    [[8, 1, 1, 1, 1, 1, 1, 0.5]] * 5,
    [[1, 0.02, 1, 1, 1, 1, 1, 1]] * 5,
    [[1, 1, 0.03, 0.02]] * 5,
    [[30, 1]] * 5,
    [[20, 1, 0.9, 1.1]] * 3 + [[60, 1, 1, 1.2]] * 2,
    [[1] * 8] * 4 + [[1] * 7 + [9]] * 5,
    [[9] + [1] * 15] * 6,
    [[1] * 60 + [12] * 4] * 5,
]


def test_uneven_experts():
    for number, each in enumerate(UNEVEN):
        (one,) = sent(number, each, tokens=1024 * len(each[0]), dropped=0.25)
        shares = np.array(each[-5:]) / np.mean(each[-5:], axis=1, keepdims=True)
        over, under = (shares.min(0) > 3).sum(), (shares.max(0) < 0.1).sum()
        assert (one.rule, one.severity, one.site) == ("uneven-experts", "warning", "block/attn")
        assert one.step == (4 if number == 7 else 0), each
        assert one.evidence.get("over", 0) == over, each
        assert one.evidence.get("under", 0) == under, each
        assert one.evidence.get("dropped") == (0.25 if over else None), each


EVEN = {
    "even": [[1] * 8] * 5,
    "a little uneven": [[2, 1, 1, 1, 1, 1, 1, 0.4]] * 5,
    "another one each time": np.roll(np.eye(8) * 8 + 1, 3, axis=0)[:5].tolist(),
    "two experts": [[9, 2]] * 5,
    "only at first": [[1] * 7 + [15]] * 5 + [[1] * 8] * 3,
    "too few passes": [[1] * 7 + [15]] * 2,
}


def test_routers_without_lasting_imbalance():
    for seed in range(3):
        found = {name: sent(seed, each) for name, each in EVEN.items()}
        assert not any(found.values()), found


def test_of_few_tokens_an_uneven_load_is_no_evidence():
    assert sent(0, UNEVEN[0], tokens=100) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("tokens", "logits", "passes"),
    [
        (512, np.zeros(8), 5),
        (8, np.zeros(8), 5),  # a small batch
        (64, np.zeros(2), 5),
        (1024, np.linspace(0, 1.5, 8), 5),  # uneven
        (512, np.array([0, 0, 0, -20]), 2),  # too few passes
    ],
)
def test_healthy_routers(seed: int, tokens: int, logits: Any, passes: int):
    assert router(seed, tokens, logits, passes) == []


class Net(nnx.Module):
    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


def stepped(model: Any, x: Any) -> Findings:
    with contextlib.closing(nni.Inspector(model, x, display=False)) as insp:
        for _ in range(5):
            insp.step(lambda m, x: ((m(x) - 1) ** 2).mean(), x)
        return insp.findings


@pytest.mark.parametrize("way", ["argmax", "list"])
def test_an_expert_of_a_model(way: str):
    model = Net(Mixture(way, bias=(0.0, 0.0, -1e4, 0.0), rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (256, D))
    found = stepped(model, x)
    (one,) = (f for f in found if f.rule == "dead-experts")
    load = model.inner.expected(x)["load"]
    assert one.site == "inner"
    assert f"nothing reaches expert 2 of the {E} of 'inner', because the gate never" in one.what
    assert one.evidence["largest"] == pytest.approx(load.max())
    assert all("left it out" not in other.advice for other in found)


def test_heads_of_a_model():
    attn = Attention(rngs=nnx.Rngs(0), scale=2000.0)
    x = jax.random.normal(jax.random.key(0), (4, T, 12))
    logit = np.abs(attn.logits(x)).max()
    found = [one for one in stepped(Net(attn), x) if one.rule == "attention"]
    assert logit > 1000
    assert found
    assert all(one.site == "inner" for one in found)
