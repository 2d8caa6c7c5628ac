"""Values and their summaries for the tests of recordings."""

from __future__ import annotations

import struct
import zlib
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.facts import Facts, ParameterFacts, PassStats, SiteFacts
from nnx_inspector.recordings.passes import Quantity
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import FINITE_BINS, RANK_OF_BIN, bin_edges
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.samples.unit_stats import MASK_BYTES, MASKS, SITE_STATS
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary, opaque

Values = npt.NDArray[Any]


def summary_of(x: Values) -> Summary:
    return summarize(jnp.asarray(x)).merged()


def normal_values(seed: int, n: int = 1000, scale: float = 1.0) -> Values:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def summary_bytes(s: Summary) -> list[bytes]:
    return [np.asarray(a).tobytes() + str(a.dtype).encode() for a in (s.bins, s.points, s.sums)]


VALUES = {
    "normal": normal_values(0),
    "scaled": normal_values(1, scale=1e-20),
    "zeros": np.zeros(7, np.float32),
    "signed zeros": np.array([0.0, -0.0, 1.0], np.float32),
    "one": np.array([-3.5], np.float32),
    "nothing": np.zeros(0, np.float32),
    "nan": np.full(5, np.nan, np.float32),
    "mixed": np.array([np.nan, 1, np.inf, -np.inf, -2, 0], np.float32),
    "subnormal": np.array([1e-40, -1e-40, 0.0, 1.0], np.float32),
    "extreme": np.array([-3.4e38, 3.4e38, 1e-38], np.float32),
    "integers": np.array([-(2**31), 2**31 - 1, 0], np.int32),
    "unsigned": np.array([2**32 - 1, 3], np.uint32),
    "bool": np.array([True, False, True]),
}


def all_summaries() -> list[Summary]:
    """Summaries of every kind: of all values above, and made by hand."""
    bins = summary_of(normal_values(0)).bins.astype(np.uint32)
    bins[0x3F8] = np.iinfo(np.uint32).max  # a saturated count
    stopped = Summary(bins=bins, points=np.array([-4.0, 4.0, 0.0]), sums=np.ones(3))
    nan = np.full(3, np.nan)
    counted = Summary(bins=summary_of(normal_values(2)).bins, points=nan, sums=nan)
    wide = summary_of(normal_values(3))
    wide = Summary(bins=wide.bins, points=np.array([-(2**63), 2**63 - 1, 5]), sums=np.ones(3))
    return [*map(summary_of, VALUES.values()), stopped, counted, wide, opaque("key<fry>[3]", 3)]


def counts_in(data: bytes) -> dict[int, int]:
    """Bin -> count in the bytes of a summary behind its moments, read number by number."""
    numbers, at = [], 0
    while at < len(data):
        number = shift = 0
        while data[at] > 127:
            number, shift, at = number | (data[at] & 127) << shift, shift + 7, at + 1
        numbers.append(number | data[at] << shift)
        at += 1
    found, number, rest = dict[int, int](), 0, iter(numbers)
    for count in rest:
        if not count:
            number += next(rest)
            continue
        found[number] = count
        number += 1
    return found


def deflate_summary(one: Summary) -> bytes:
    """The bytes of a merged summary as earlier versions wrote them, number by number."""
    used = [i for i, count in enumerate(one.bins.tolist()) if count]
    counts = [int(one.bins[i]) for i in used]
    low = high = np.nan
    if any(FINITE_BINS[i] for i in used):
        low, high = map(float, one.points[:2])
    ordered = [i for i in used if RANK_OF_BIN[i] >= 0]
    if np.isnan(low) and ordered:
        low = min(bin_edges()[i, 0] for i in ordered)
        high = max(bin_edges()[i, 1] for i in ordered)
    kind = one.points.dtype.newbyteorder("<")
    width = next(k for k in range(9) if max(counts, default=0) < 256**k)
    number = ["<f8", "<i4", "<u4", "<i8", "<u8"].index(kind.str)
    header = struct.pack("<BBHdd", number, width, len(used), low, high)
    apart = [b - a for a, b in zip([0, *used], used, strict=False)]
    planes = [x >> 8 * k & 255 for k in range(2) for x in apart]
    planes += [x >> 8 * k & 255 for k in range(width) for x in counts]
    moments = one.points.astype(kind).tobytes() + one.sums.astype("<f8").tobytes()
    return header + moments + zlib.compress(bytes(planes), 1)


def some_statistics(seed: int) -> PassStats:
    """The figures of a pass, including NaN and Inf."""
    random = np.random.default_rng(seed)
    sites, parameters = ("a", "blocks[3]/attn")[: seed % 3], ("a/kernel", "größe")[: seed % 2 + 1]
    rows = random.exponential(size=(len(sites), len(SITE_STATS))).astype(np.float32)
    rows[:, 5::3] = np.nan
    for name in ("examples", "units", "looked", "positions"):
        rows[:, SITE_STATS.index(name)] = 64 if name == "units" else random.integers(1, 64)
    states = random.exponential(size=(len(parameters), len(PARAMETER_STATS))).astype(np.float32)
    states[:, 1] = np.inf
    return PassStats(
        sites=sites,
        rows=rows,
        masks=random.integers(0, 256, (len(sites), len(MASKS), MASK_BYTES), np.uint8),
        parameters=parameters,
        parameter_rows=states,
        varied=seed % 3 - 1,
    )


def some_facts(seed: int) -> Facts:
    """The facts about a model of two modules."""
    one = SiteFacts(site="a", type="Linear", order=seed, activation="relu", rate=0.5)
    two = SiteFacts(site="blocks[3]/attn", type="\ud800", examples=2**40)
    kernel = ParameterFacts(path="a/kernel", site="a", type="Param", dtype="float32", size=seed)
    return Facts(sites=(one, two), parameters=(kernel,))


def contents(recording: Recording) -> dict[str, Any]:
    """The whole content of a recording in a form that compares bit for bit."""
    passes = [
        (p.number, p.step, p.kind, p.perturbed, p.nonfinite, p.news, p.keys, p.packed, p.setting)
        for p in recording.passes
    ]
    state = recording.state()
    return {
        "bounds": (recording.max_steps, recording.max_bytes),
        "passes": passes,
        "curves": {name: (c.shape, c.tobytes()) for name, c in recording.curves().items()},
        "order": list(recording.curves()),
        "sites": recording.sites,
        "thinned": (recording.thinned, recording.thinned_points),
        "bytes": recording.nbytes,
        "firsts": state.firsts,
        "next": state.appended,
        "facts": repr(state.facts),  # a NaN does not equal itself
        "figures": [None if p.figures is None else _bits(p.figures) for p in recording.passes],
    }


def _bits(figures: PassStats) -> tuple[object, ...]:
    arrays = figures.rows, figures.masks, figures.parameter_rows
    names = figures.sites, figures.parameters, figures.varied
    return (*names, *((str(a.dtype), a.shape, a.tobytes()) for a in arrays))


def assert_same(found: Recording, expected: Recording) -> None:
    """Check that two recordings are equal, and so are their frames and histories."""
    assert contents(found) == contents(expected)
    assert found.to_frame(layers=True).equals(expected.to_frame(layers=True))
    assert found.metrics_frame().equals(expected.metrics_frame())
    for site in expected.sites:
        for quantity in get_args(Quantity):
            pair = found.history(site, quantity), expected.history(site, quantity)
            assert [a.tobytes() for a in pair[0]] == [a.tobytes() for a in pair[1]]


def assert_readable(recording: Recording) -> None:
    """Call every reading method of a recording; none may raise."""
    frame = recording.to_frame(layers=True)
    assert len(frame) == sum(len(p.keys) for p in recording.passes)
    assert repr(recording)
    assert recording.metrics_frame().shape[1] == 3
    assert isinstance(diagnose(recording), list)
    for site in recording.sites[:4]:
        for quantity in get_args(Quantity):
            recording.history(site, quantity, columns=10)
    for item in recording.passes[:4]:
        for _, _, summary in item.items():
            repr(summary)
            if not summary.saturated:
                assert summary.histogram(8, scale="symlog").counts.sum() == summary.finite
