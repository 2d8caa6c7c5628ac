"""How much evidence a rule needs: all rules judge many random healthy networks.

NumPy (float64) computes the figures of a pass, so that hundreds of networks take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import fake_recordings
import numpy as np
import pytest
from call_counts import count_calls
from fake_recordings import chain, of

from nnx_inspector.findings.evidence import BEYOND, binomial_tail, gain_by_chance
from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.facts import Facts, ParameterFacts, PassStats, SiteFacts
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.samples.unit_stats import (
    CONSTANT_BELOW,
    MASKS,
    SATURATED_SHARE,
    SITE_STATS,
    TANH_FLAT,
    UNITS,
)

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
}


class Drawn:
    """A multilayer perceptron under LeCun's initialisation, and a batch, from a seed."""

    def __init__(self, sizes: list[int], n: int, act: str, seed: int):
        rng = np.random.default_rng(seed)
        self.act, self.n = act, n
        self.kernels = [rng.normal(size=(a, b)) / np.sqrt(a) for a, b in itertools.pairwise(sizes)]
        self.biases = [np.zeros(b) for b in sizes[1:]]
        self.x, self.y = rng.normal(size=(n, sizes[0])), rng.normal(size=(n, sizes[-1]))

    def recording(self) -> Recording:
        function, slope = FUNCTIONS[self.act]
        outputs: list[Any] = []
        inputs = [self.x]
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            outputs.append(inputs[-1] @ kernel + bias)
            inputs.append(function(outputs[-1]))
        back = [2 * (outputs[-1] - self.y) / self.n]
        for kernel, z in zip(self.kernels[:0:-1], outputs[-2::-1], strict=True):
            back.insert(0, (back[0] @ kernel.T) * slope(z))
        sites = [f"layers/{i}" for i in range(len(outputs))]
        states: dict[str, list[float]] = {}
        for site, x, dz, kernel, bias in zip(
            sites, inputs[:-1], back, self.kernels, self.biases, strict=True
        ):
            states[f"{site}/kernel"] = _state(kernel, x.T @ dz)
            states[f"{site}/bias"] = _state(bias, dz.sum(0))
        held = [x for pair in zip(self.kernels, self.biases, strict=True) for x in pair]
        sizes = {path: x.size for path, x in zip(states, held, strict=True)}
        known = Facts(
            sites=tuple(
                SiteFacts(site=s, type="Linear", order=i, leaving="float32",
                          activation=self.act if s != sites[-1] else "")
                for i, s in enumerate(sites)
            ),
            parameters=tuple(
                ParameterFacts(path=path, site=path.rpartition("/")[0], type="Param", needed=1,
                               dtype="float32", size=size, axes=2 if "kernel" in path else 1)
                for path, size in sizes.items()
            ),
            flows=(chain(sites),),
        )  # fmt: skip
        rows, masks = zip(*(_row(z) for z in outputs), strict=True)
        figures = PassStats(
            sites=tuple(sites),
            rows=np.array(rows, np.float32),
            masks=np.packbits(np.array(masks), axis=2),
            parameters=tuple(states),
            parameter_rows=np.array(list(states.values()), np.float32),
            varied=int(self.n > 1),
        )
        recording = Recording()
        recording.learn(known)
        norms = [np.linalg.norm(dz) / np.sqrt(64) for dz in back]
        summaries = {
            s: {"output": of(), "gradient": of(norm) if norm > 0 else of(0.0)}
            for s, norm in zip(sites, norms, strict=True)
        }
        recording.append(0, summaries, kind="step", figures=figures)
        return recording


def _state(values: Any, gradient: Any) -> list[float]:
    found = {"norm": np.sqrt(np.mean(values**2)), "gradient": np.linalg.norm(gradient)}
    found |= {"graded": (gradient != 0).mean()}
    return [found.get(name, np.nan) for name in PARAMETER_STATS]


def _row(z: Any) -> tuple[list[float], Any]:
    n, units = z.shape
    spread, size = z.std(0), np.abs(z).max(0)
    covariance = np.cov(z.T, bias=True).reshape(units, units)
    square = np.square(covariance).sum()
    found = {
        "examples": n, "units": units, "looked": units, "positions": 1, "limit": 128,
        "rms": np.sqrt(np.square(z).mean()),
        "rank": np.trace(covariance) ** 2 / square if square > 0 and min(n, units) > 1 else np.nan,
    }  # fmt: skip
    if n > 1:
        found |= {
            "spread": np.sqrt(np.square(spread).mean()),
            "flat": (spread <= CONSTANT_BELOW * size).mean(),
        }
    bits = np.zeros((len(MASKS), UNITS), bool)
    of_masks = {"dead": size == 0, "below": z.max(0) <= 0, "above": z.min(0) > 0}
    of_masks["tanh"] = (np.abs(z) > TANH_FLAT).mean(0) >= SATURATED_SHARE
    for name, values in of_masks.items():
        bits[MASKS.index(name), :units] = values
    return [found.get(name, np.nan) for name in SITE_STATS], bits


def alarms(drawn: Drawn) -> list[str]:
    return [f.rule for f in diagnose(drawn.recording()) if f.severity != "info"]


@pytest.mark.parametrize("act", FUNCTIONS)
@pytest.mark.parametrize("depth", [1, 3, 6, 10])
def test_narrow_networks_and_small_batches_raise_no_alarm(act: str, depth: int) -> None:
    """Layers of 1 to 8 units, 1 to 8 examples: alarms in less than one network in a hundred."""
    found: list[Any] = []
    cases = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 8), range(16)))
    for width, n, seed in cases:
        drawn = Drawn([4, *[width] * depth, 2], n, act, 1000 * width + 20 * n + seed)
        found += [(width, n, seed, rule) for rule in alarms(drawn)]
    assert len({one[:3] for one in found}) <= len(cases) / 100, found


@pytest.mark.parametrize(("width", "n"), [(3, 54), (8, 64), (16, 32), (32, 64)])
def test_larger_ones_raise_none_either(width: int, n: int) -> None:
    found = [a for s in range(40) for a in alarms(Drawn([8, *[width] * 4, 3], n, "relu", s))]
    assert len(found) <= 1, found


@pytest.mark.parametrize(("width", "n"), [(4, 8), (8, 16), (32, 64)])
def test_a_layer_that_its_bias_turns_off_is_named(width: int, n: int) -> None:
    for seed in range(10):
        drawn = Drawn([4, width, width, 2], n, "relu", seed)
        drawn.biases[1][:] = -10.0
        (finding,) = diagnose(drawn.recording())
        assert (finding.rule, finding.site, finding.severity) == ("dead-units", "layers/1", "error")
        assert "the bias is as large as the output" in finding.advice
        # all that is before it has no gradient, and all that is after it is constant: because of it
        assert {one.rule for one in finding.effects} == {"constant", "no-gradient"}


def test_half_of_a_layer_that_its_bias_turns_off_is_named() -> None:
    for seed in range(10):
        drawn = Drawn([8, 32, 3], 64, "relu", seed)
        drawn.biases[0][::2] = -10.0
        assert alarms(drawn) == ["dead-units"]


def test_units_that_large_weights_saturate_are_named() -> None:
    for seed in range(10):
        drawn = Drawn([8, 8, 3], 16, "tanh", seed)
        drawn.kernels[0] *= 30
        assert alarms(drawn) == ["saturated-units"]


def test_a_gradient_that_vanishes_in_narrow_layers_is_named() -> None:
    for seed in range(10):
        drawn = Drawn([8, *[8] * 10, 3], 16, "tanh", seed)
        for kernel in drawn.kernels[1:]:
            kernel *= 0.2
        assert set(alarms(drawn)) & {"vanishing-gradient", "collapse"}


def test_the_chance_of_some_units_is_that_of_all_ways_to_choose_them() -> None:
    ways = list(itertools.product((0, 1), repeat=6))
    assert binomial_tail(4, 6, 0.5) == sum(sum(way) >= 4 for way in ways) / len(ways)
    assert (binomial_tail(0, 6, 0.3), binomial_tail(7, 6, 0.3)) == (pytest.approx(1), 0)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 32])
def test_random_layers_rarely_change_a_signal_by_more_than_luck(width: int) -> None:
    rng, depth, times = np.random.default_rng(width), 6, 4000
    v = rng.normal(size=(times, width, 1))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    for _ in range(depth):
        v = rng.normal(size=(times, width, width)) @ v / np.sqrt(width)
    gains = np.abs(np.log(np.linalg.norm(v, axis=1)))
    beyond = (gains > np.log(gain_by_chance([width] * depth))).mean()
    assert beyond <= 0.002
    assert BEYOND > 3


def in_a_chain(count: int, width: int, **figures: float) -> Recording:
    """A recording of many passes through as many sites; the figures are of each parameter."""
    sites = tuple(f"blocks/{i}" for i in range(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_recordings, "SITES", sites)
        model = fake_recordings.Model(kind="watch")
        for site in sites:
            model.sites[site].update(units=width, looked=width)
            model.facts[site]["activation"] = "relu"
            model.parameter_stats[site] |= {
                "gradient": 0.1,
                "graded": 1.0,
                "update": 1e-3,
                **figures,
            }
        return model.recording(8)


@pytest.mark.parametrize("graded", [0.0, 1.0])
def test_twice_as_many_sites_are_twice_the_work(graded: float) -> None:
    runs = [in_a_chain(count, 32, graded=graded, gradient=graded, same=1) for count in (100, 200)]
    few, many = (count_calls(lambda run=run: diagnose(run)) for run in runs)
    assert 10_000 < few < many < 2.2 * few  # 2.5 or more if a rule looks at all sites for each


def test_passes_with_the_same_names_share_the_numbers_of_their_rows() -> None:
    one, other = (one.figures for one in in_a_chain(3, 32).passes[:2])
    assert one is not None
    assert other is not None
    assert one.row_of is other.row_of
    assert one.row_of_parameter is other.row_of_parameter
    assert dict(one.row_of) == {"blocks/0": 0, "blocks/1": 1, "blocks/2": 2}


def test_luck_has_a_number_for_any_depth() -> None:
    assert 0 < 1 / gain_by_chance([1.0] * 5000) < 1e-200
    assert [str(one) for one in diagnose(in_a_chain(700, 1))] == []
