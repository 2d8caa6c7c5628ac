"""Each number in a finding's sentence is the one that NumPy computes from the model's arrays.

`SENTENCES` lists what the rules say and where each number comes from; the page `findings.md` is
that list. A finding that fits no sentence of its rule fails, so a new sentence needs an oracle.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import strange_miswired  # noqa: F401 - it adds to the tables of faults
from borderline import FAULTY as BORDERLINE
from faulty import FAULTY
from flax import nnx
from judging import looped, stepped
from said import Oracle, close, parsed
from strange_faults import FAULTS as STRANGE
from tiny_faults import FAULTS as TINY

import nnx_inspector as nni
from nnx_inspector.findings.finding import Finding

PAGE = pathlib.Path(__file__).parents[2] / "notebooks/docs/findings.md"


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence of a rule.

    Attributes:
        rule: the rule.
        pattern: what it says: `#name#` stands for a number, `<name>` for a name or a list.
        numbers: of each number, how the oracle computes it.
    """

    rule: str
    pattern: str
    numbers: dict[str, str]

    @property
    def regex(self) -> str:
        escaped = re.escape(self.pattern).replace("\\#", "#").replace("\\ ", " ")
        return re.sub(r"<(\w+)>", r"(?P<\1>.*?)", escaped) + "$"


def of(rule: str, pattern: str, **numbers: str) -> Sentence:
    return Sentence(rule, pattern, {"step": "the step of the pass that shows it first", **numbers})


SENTENCES = [
    of(
        "overflow",
        "At step #step# the output of <site> reached #top#, near the largest number of its dtype, "
        "#limit#<others>",
        top="max abs(output) of the site in that pass",
        limit="`finfo` of the output's dtype",
    ),
    of(
        "overflow",
        "At step #step# #part#% of the values of the output of <site> lie at the end of the range "
        "of <dtype>, #limit#, and #zeros#% are 0",
        part="share of abs(output) equal to `finfo(dtype).max`",
        limit="`finfo` of the output's dtype",
        zeros="share of the output equal to 0",
    ),
    of(
        "unused",
        "From step #step# on, <site> <how><others>; the #elements# parameters of <again> do "
        "nothing here",
        elements="the number of elements of all `nnx.Param`s of the module, and of those in it",
    ),
    of(
        "mode",
        "From step #step# on, <site> (BatchNorm) uses its running statistics<training>, and at "
        "step #last# they did not fit the data (in the median over its units means were off by "
        "#shifted# deviations, deviations by a factor of #scaled#)",
        last="the step of the newest pass with gradients",
        shifted="median over units of abs(mean(output) - bias) / abs(scale)",
        scaled="median over units of std(output) / abs(scale)",
    ),
    of(
        "mode",
        "From step #step# on, <site> (BatchNorm) takes the mean and variance of a single value, so "
        "it returns its bias for every input",
    ),
    of("dtype", "From step #step# on, <site> (<type>) receives <dtype> and returns <other>"),
    of("dtype", "From step #step# on, <site> (<type>) has <dtype> parameters and returns <other>"),
    of(
        "dtype",
        "From step #step# on, <site> (<type>) returns <dtype> while #count# of #layers# layers "
        "return <other>",
        count="the called modules with parameters of their own that return the usual dtype",
        layers="all called modules with parameters of their own",
    ),
    *(
        of(
            f"{which}-gradient",
            f"At step #step# the norm of the gradient {how} from #late# at <last>, one of the last "
            f"of #sites# sites, to #early# at <first>, one of the first, a ratio of #ratio#<since>",
            late="L2 norm of the loss's gradient by the output of the second site",
            sites="the sites with a gradient whose modules have parameters of their own",
            early="L2 norm of the loss's gradient by the output of the first site",
            ratio="the second norm divided by the first",
        )
        for which, how in (("vanishing", "fell"), ("exploding", "grew"))
    ),
    of(
        "no-gradient",
        "From step #step# on, a loss is differentiated with respect to #count# <parameters> of the "
        "model, and no gradient comes back to <them>",
        count="the parameters in `wrt`, whose gradient by `nnx.grad` is 0 everywhere",
    ),
    of(
        "no-gradient",
        "From step #step# on, the parameter <path> has no gradient: <why>",
        more="parameters whose gradient by `nnx.grad` is 0 everywhere",
    ),
    of(
        "no-gradient",
        "From step #step# on, the parameter <path> has a gradient of exactly 0<more>",
        more="parameters whose gradient by `nnx.grad` is 0 everywhere",
    ),
    *(
        of("no-gradient", f"From step #step# on, the parameter <path> {what}<more>")
        for what in ("did not change although others did", "takes no part in this pass")
    ),
    of(
        "update-ratio",
        "From step #step# <until>, a step changed the weights by up to #largest# times their size "
        "(a median over samples of the parameters, that of <path> after step #at#); about "
        "1e-3 is usual",
        largest="the largest median over matrices of rms(change) / rms(value), a step, of the "
        "elements that are sampled",
        at="the measured step before that change",
    ),
    of(
        "update-ratio",
        "From step #step# on, a step changed the weights by at most #largest# times their size "
        "(a median over samples of the parameters); about 1e-3 is usual",
        largest="the largest median over matrices of rms(change) / rms(value), a step, of the "
        "elements that are sampled",
    ),
    of(
        "update-ratio",
        "From step #step# to step #last#, #part#% of the sampled elements of <path> (<dtype>) did "
        "not change<others>",
        last="the newest measured step",
        part="share of equal elements before and after the loop (within the error of the sample)",
    ),
    of(
        "update-ratio",
        "From step #step# on, no parameter changed in #passes# passes with gradients",
        passes="the measured steps",
    ),
    of(
        "padding",
        "At step #step# id #id# filled #part#% of the #positions# positions that <site> received",
        id="the commonest id",
        part="its share of all ids",
        positions="the number of ids",
    ),
]  # fmt: skip


def sentence_of(one: Finding) -> tuple[Sentence, dict[str, str]]:
    for sentence in SENTENCES:
        if sentence.rule == one.rule:
            try:
                return sentence, parsed(sentence.regex, one.what)
            except AssertionError:
                continue
    raise AssertionError(f"no sentence of {one.rule} is {one.what!r}")


def unquoted(named: str) -> str:
    return "" if named == "the model" else named.strip("'")


# ------------------------------------------------------------------- the oracles


def norm_at(oracle: Oracle, site: str) -> float:
    return oracle.gradient_norms()[site]


def check(one: Finding, subject: Any, oracle: Oracle) -> None:
    """Compare each number of a finding of one pass with the oracle's."""
    sentence, parts = sentence_of(one)
    site = unquoted(parts.get("site", ""))
    expected: dict[str, float] = {"step": 0}
    outputs = oracle.outputs.get(site)
    if one.rule == "overflow" and outputs:
        values = np.concatenate([x.ravel() for x in outputs])
        values = values[np.isfinite(values)]
        expected["top"] = np.abs(values).max()
        expected["limit"] = float(jnp.finfo(oracle.dtype(site)).max)
    if one.rule == "unused":
        held = oracle.parameters()
        inside = [x for path, x in held.items() if not site or path.startswith(f"{site}/")]
        expected["elements"] = sum(x.size for x in inside)
    if "shifted" in parts and outputs:
        held, y = oracle.parameters(), np.concatenate([x.reshape(-1, x.shape[-1]) for x in outputs])
        scale, bias = held.get(f"{site}/scale", 1.0), held.get(f"{site}/bias", 0.0)
        expected["shifted"] = float(np.median(np.abs(y.mean(0) - bias) / np.abs(scale)))
        expected["scaled"] = float(np.median(y.std(0) / np.abs(scale)))
        expected["last"] = 0
    if one.rule in ("vanishing-gradient", "exploding-gradient"):
        norms = oracle.gradient_norms()
        first, last = unquoted(parts["first"]), unquoted(parts["last"])
        if {first, last} <= set(norms):
            expected |= {"early": norms[first], "late": norms[last]}
            expected["ratio"] = norms[first] / norms[last]
    if one.rule == "no-gradient" and "path" in parts:
        gradient = oracle.parameter_gradients()[unquoted(parts["path"])]
        assert not gradient.any(), one.what
        zero = sum(not x.any() for x in oracle.parameter_gradients().values())
        more = re.search(r"\(and (\d+) more parameter", one.what)
        assert 1 + int(more[1] if more else 0) == one.evidence["parameters"] <= zero
    if one.rule == "no-gradient" and "count" in parts:
        gradients = oracle.parameter_gradients()
        assert not any(x.any() for x in gradients.values())
        expected["count"] = len(gradients)
    for name, number in expected.items():
        percent = f"#{name}#%" in sentence.pattern
        assert close(parts[name], number, percent=percent), (name, parts[name], number, one.what)


def every(found: list[Finding]) -> list[Finding]:
    return [x for one in found for x in (one, *every(list(one.effects)))]


MODELS: dict[str, Callable[[], Any]] = {
    f"{table}: {name}": build
    for table, faults in {
        "faulty": FAULTY, "borderline": BORDERLINE, "strange": STRANGE, "tiny": TINY,
    }.items()
    for name, (_, build) in faults.items()
}  # fmt: skip
RULES = {sentence.rule for sentence in SENTENCES}


def test_there_are_fifty_models():
    assert len(MODELS) >= 50


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_one_pass_are_those_of_the_arrays(name):
    subject = MODELS[name]()
    found = [one for one in every(stepped(subject)) if one.rule in RULES]
    if found:
        oracle = Oracle(subject.model, subject.loss, subject.batch)
        for one in found:
            check(one, subject, oracle)


# ------------------------------------------------------------------------ loops


class Mlp(nnx.Module):
    """Three layers whose kernels are sampled in four rows each."""

    def __init__(self, *, seed=0):
        rngs = nnx.Rngs(seed)
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.c = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.c(nnx.tanh(self.b(nnx.tanh(self.a(x)))))


def loss(model, x):
    return ((model(x) - 1) ** 2).mean()


def trained(tx, *, seed=0, steps=12, watch):
    """What a loop says, or the parameters before each of its steps if it is not watched."""
    model, x = Mlp(seed=seed), jax.random.normal(jax.random.key(0), (32, 8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model, x))

    if watch:
        with nni.watch(model, every=2) as recording:
            for _ in range(steps):
                step(model, optimizer)
        return nni.diagnose(recording)
    held = []
    for _ in range(steps):
        kernels = {n: getattr(model, n).kernel for n in "abc"}
        sample = lambda k: np.array(k[...], np.float64)[:: len(k) // 4]  # noqa: E731
        held.append({f"{n}/kernel": sample(k) for n, k in kernels.items()})
        step(model, optimizer)
    return held


def changes(held) -> list[dict[str, float]]:
    """Of each interval between measured steps (of two), the change of each kernel by one step."""
    size = lambda x: float(np.sqrt((x**2).mean()))  # noqa: E731
    return [
        {path: size(now[path] - before[path]) / size(before[path]) / 2 for path in before}
        for before, now in zip(held[::2], held[2::2], strict=False)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(optax.piecewise_constant_schedule(3e-3, {4: 1000.0})),
        optax.adam(0.3),
        optax.sgd(optax.piecewise_constant_schedule(4.0, {4: 1e-3})),
    ],
    ids=["later", "adam", "at first"],
)
def test_large_updates_are_those_of_the_named_parameter_and_step(tx, seed):
    (one,) = (f for f in every(trained(tx, seed=seed, watch=True)) if f.rule == "update-ratio")
    _, parts = sentence_of(one)
    each = changes(trained(tx, seed=seed, watch=False))
    medians = [statistics.median_low(interval.values()) for interval in each]
    worst = int(np.argmax(medians))
    assert close(parts["largest"], medians[worst])
    assert int(parts["at"]) == 2 * worst
    assert close(parts["largest"], each[worst][unquoted(parts["path"])])
    over = [2 * i for i, x in enumerate(medians) if x >= 0.3]
    assert int(parts["step"]) == over[0] == one.step
    ends = f"to step {over[-1] + 2}" if medians[-1] < 0.3 else "on"
    assert parts["until"] == ends


def test_small_updates_are_bounded_by_the_largest():
    (one,) = (f for f in every(trained(optax.sgd(1e-6), watch=True)) if f.rule == "update-ratio")
    _, parts = sentence_of(one)
    medians = [
        statistics.median_low(i.values()) for i in changes(trained(optax.sgd(1e-6), watch=False))
    ]
    assert close(parts["largest"], max(medians))


def test_what_never_changes_is_counted_by_measured_steps():
    (one,) = (f for f in every(trained(optax.sgd(0.0), watch=True)) if f.rule == "update-ratio")
    assert sentence_of(one)[1]["passes"] == "6"


LOOPS = [name for name in MODELS if name.startswith(("faulty", "strange"))]


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_each_finding_of_a_loop_names_a_step(name):
    for one in every(looped(MODELS[name]())):
        assert re.search(r"\bstep \d", one.what), one
        if one.rule in RULES:
            sentence_of(one)


# --------------------------------------------------------------------- the page


def page() -> str:
    """The page of all sentences, with where each number comes from."""
    rows = [
        f"| `{one.rule}` | {_shown(one.pattern)} | "
        + "; ".join(f"*{name}*: {how}" for name, how in one.numbers.items() if name in one.pattern)
        + " |"
        for one in SENTENCES
    ]
    return HEAD + "\n".join(rows) + "\n"


def _shown(pattern: str) -> str:
    return re.sub(r"[#<](\w+)[#>]", r"*\1*", pattern)


HEAD = """# What findings say

Each rule of `nni.diagnose` and `insp.findings` has a few sentences. This is the list of those with
numbers, and of where each number comes from: a test computes it again with NumPy, in float64, from
the arrays of more than fifty models (`tests/findings/test_sentences.py`, which
also makes this page). A finding says more after its colon: what that usually means, and what to do.

| rule | sentence | numbers |
|---|---|---|
"""


def test_the_page_lists_the_sentences():
    assert PAGE.read_text() == page()
