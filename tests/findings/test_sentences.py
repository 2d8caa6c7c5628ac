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
from attentions import heads_in_numpy
from diagnosis import looped, stepped
from finding_oracle import NUMBER, Oracle, batch_norm_offsets, close, parse_sentence
from flax import nnx
from zoo import ZOO

import nnx_inspector as nni
from nnx_inspector.findings.finding import Finding
from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.summarize import summarize

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


UNITS = "#part#% of the <units> of <site>"
VALUES = "<least>#values# values examined"
EXAMINED = {
    "units": "the length of the last axis, and how many of them are examined (64 at most)",
    "values": "examined values of a unit: indices of the first axis (128 at most) times those of "
    "the axes between (64 at most)",
}
LARGEST = (
    "the largest median over matrices with a gradient of norm(update) / norm(value) in a measured "
    "step; where a step does not show its update, of rms(change) / rms(value), a step, of the "
    "elements that are sampled"
)

EACH = "the newest unperturbed passes, 5 at most"

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
        "underflow",
        "At step #step# #part#% of the nonzero values of the <quantity> of <site> are below "
        "#limit#, next to the smallest number of its dtype, float16, and #zeros#% are 0<others>",
        step="the step of the newest pass",
        part="share of the nonzero values whose size is below 2^-22",
        limit="2^-22, four times the smallest number of float16",
        zeros="share of the values equal to 0",
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
        "step #last# they did not fit the data (in the median over <units>, the mean of the "
        "#values# values examined<calls> was off by #shifted# deviations, their deviation by a "
        "factor of #scaled#)",
        last="the step of the newest pass with gradients",
        **EXAMINED,
        shifted="median over the examined units of abs(mean - bias) / abs(scale), with the mean of "
        "the examined values of the output",
        scaled="median over the examined units of std / abs(scale), with the deviation of the "
        "examined values of the output (of several calls, the mean of each call's)",
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
        "(a median over <of>, that of <path> <when> step #at#); about 1e-3 is usual",
        largest=LARGEST,
        at="the measured step, or the one before that change",
    ),
    of(
        "update-ratio",
        "From step #step# on, a step changed the weights by at most #largest# times their size "
        "(a median over <of>); about 1e-3 is usual",
        largest=LARGEST,
    ),
    of(
        "update-ratio",
        "From step #step# to step #last#, in the median over #count# measured steps, #part#% of "
        "the elements of <path> (<dtype>) to which something was added stayed what they were"
        "<others>",
        last="the newest measured step that shows its update",
        count="the measured steps that show their update",
        part="of the elements whose update, as optax computes it, is not 0, the share that is "
        "equal before and after a step",
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
        "update-ratio",
        "From step #step#<first> on, <what> with a gradient <moved> in each of #passes# measured "
        "steps<known>",
        what="the parameters of float32 whose gradient is not 0",
        moved="the largest norm(update) / norm(value) of all parameters in these steps",
        passes="the measured steps from then on",
        known="the largest rate in the optimizer's state in these steps",
    ),
    of(
        "update-ratio",
        "From step #step# to step #last#, each of #passes# measured steps computed other "
        "parameters than it was given (<path> differs by up to #most# times its size), and all of "
        "them were given the same",
        last="the newest measured step that shows its update",
        passes="the measured steps that show their update",
        most="the largest norm(update) / norm(value) of all parameters in these steps",
    ),
    of(
        "skipped-steps",
        "From step #step# to step #last#, the optimizer skipped #skipped# of #steps# steps, "
        "because their gradients were not finite (<key>)<ending>",
        step="the first measured step",
        last="the step before the newest measured one",
        skipped="how much `total_notfinite` has grown",
        steps="the steps between these",
        ending="`notfinite_count` in the newest pass, or the first pass after the last skip",
    ),
    of(
        "weight-decay",
        "From step #step# to step #last#, weight decay moves <path> <how>, in the median over "
        "#passes# measured steps (norms of the two parts of its update); a step changes it by "
        "#moved# times its size<others>",
        last="the newest measured step that shows it",
        how="norm(decay * parameter) / norm(what that is added to), the parameter's gradient or "
        "what the optimizer made of it, in the median over these steps",
        passes="the measured steps that show it",
        moved="norm(update) / norm(value), in the median over these steps",
        others="the first ratio of other parameters",
    ),
    of(
        "clipping",
        "From step #step# to step #last#, clipping shortened the gradient of <path> (or what the "
        "optimizer had made of it) in #acted# of #passes# measured steps, in the median over all "
        "of them by #taken#% of its norm<others>",
        last="the newest measured step that shows it",
        acted="the steps in which it changed anything",
        passes="the measured steps that show it",
        taken="norm(before - after) / norm(before)",
        others="the same of other parameters",
    ),
    of(
        "padding",
        "At step #step# id #id# filled #part#% of the #positions# positions that <site> received",
        id="the commonest id",
        part="its share of all ids",
        positions="the number of ids",
    ),
    of(
        "attention",
        "From step #step# on, the logits of <site> reach #logit# (head #head#), in each of the "
        "last #passes# passes<others>",
        logit="the greatest logit that no mask excludes, in the newest pass",
        head="the head that has it",
        passes=EACH,
    ),
    of(
        "attention",
        "From step #step# on, #sharp# of the #heads# heads look at one key each: at <site> the "
        "entropy is #evenness#% of the most that it can be, with logits up to #logit#, in each of "
        "the last #passes# passes",
        sharp="the heads with an entropy of at most 5% of the most, and logits of at least 50",
        heads="the heads of all attentions whose queries have at least 8 keys",
        evenness="mean over these heads and over the queries with several allowed keys of the "
        "entropy, divided by the logarithm of the number of these keys, in the newest pass",
        logit="the greatest logit of these heads",
        passes=EACH,
    ),
    of(
        "attention",
        "From step #step# on, #sinks# of the #heads# heads give most of their attention to the "
        "first token: at <site> #first#% of it, in each of the last #passes# passes",
        sinks="the heads that give at least 60% of it, and look at more than one key",
        heads="the heads of all attentions whose queries have at least 8 keys",
        first="mean over these heads and over the queries with several allowed keys of the "
        "probability of the first key, in the newest pass",
        passes=EACH,
    ),
    of(
        "dead-experts",
        "From step #step# on, nothing reaches <dead> of the #experts# of <site>, because the gate "
        "never chooses <them>: none of the #tokens# tokens in each of the last #passes# passes; "
        "expert #most# gets #largest#%",
        experts="the length of the axis along which the gate chooses",
        tokens="the tokens of the newest pass",
        passes=EACH,
        most="the expert that most tokens choose in that pass",
        largest="the share of the tokens that choose it",
    ),
    of(
        "uneven-experts",
        "From step #step# on, the gate of <site> sends tokens unevenly to its #experts# experts: "
        "<uneven>, in each of the last #passes# passes",
        experts="the length of the axis along which the gate chooses",
        uneven="the load of an expert divided by the mean of all: of the expert whose smallest "
        "such ratio in these passes is greatest, that one; of the expert whose largest is "
        "smallest, that one",
        passes=EACH,
    ),
    of(
        "dead-units",
        f"From step #step# on, {UNITS} are off for all {VALUES}<others>",
        part="share of the examined units of which max(output), or that of the function after it, "
        "is at most 0",
        **EXAMINED,
    ),
    of("dead-units", "From step #step# on, <site> <does> only zeros<others>"),
    of(
        "dead-units",
        f"From step #step# on, <site> returns the same for all {VALUES}<others>",
        values=EXAMINED["values"],
    ),
    of(
        "saturated-units",
        f"From step #step# on, {UNITS} lie on the flat parts of <function> for at least two thirds "
        f"of the {VALUES}<others>",
        part="share of the examined units of which at least 2/3 of the values are saturated: "
        "inputs of a tanh beyond 2.65, of a sigmoid beyond 4.6, or outputs within 0.01 of the end",
        **EXAMINED,
    ),
    of(
        "constant",
        "At step #step#, the output of <site> is the same for all #examples# examples that were "
        "examined, although the model's input is not<others>",
        examples="the length of the first axis of output, or of every second, third, ... of it "
        "above 128",
    ),
    of(
        "constant",
        f"At step #step#, {UNITS} hardly vary over the #examples# examples that were examined, "
        "each by a deviation below 2% of the largest one<others>",
        part="share of the examined units of which the deviation over the examples is below 0.02 "
        "times the largest one",
        units=EXAMINED["units"],
        examples="the length of the first axis of output, or of every second, third, ... of it "
        "above 128",
    ),
    of(
        "collapse",
        "At step #step#, the output of <site> varies along one direction only (an effective rank "
        "of #after# among the values examined; that of <source>, <way>, has #before#)<others>",
        after="trace(C)^2 / trace(C^2) of the covariance C of the units' examined outputs",
        before="the same at the other site",
    ),
    of(
        "collapse",
        "At step #step#, among the values examined, the examples differ by a deviation of #after# "
        "in the output of <site>, and of #before# in that of <source>, <way><others>",
        after="root mean square over examined units and positions of the output's deviation over "
        "the examined examples",
        before="the same at the other site",
    ),
    of(
        "nonfinite",
        "At step #step#<during>, the <quantity> of <site> first held <counts> among #size# values"
        "<before>",
        size="the number of elements of all calls",
        counts="how many of them are NaN, +Inf, -Inf",
        before="min and max of the input, or of the output that returned before it, or how many of "
        "its values are infinite",
    ),
    of(
        "nonfinite",
        "<when> of step #step#<during>, the <parameters> not finite<shown>",
        parameters="how many elements of each are NaN, how many infinite, and how many it has",
        shown="how many values of the output are NaN, +Inf, -Inf, of how many",
    ),
    of(
        "nonfinite",
        "At step #step#<during>, the gradient of the <parameters> was not finite, while all that "
        "was measured at sites was",
        parameters="how many elements of each gradient are NaN, how many infinite, and how many it "
        "has",
    ),
    of(
        "nonfinite",
        "After step #step#, the last of its loop, the <parameters> not finite",
        parameters="how many elements of each are NaN, how many infinite, and how many it has",
    ),
]  # fmt: skip


def sentence_of(one: Finding) -> tuple[Sentence, dict[str, str]]:
    for sentence in SENTENCES:
        if sentence.rule == one.rule:
            try:
                return sentence, parse_sentence(sentence.regex, one.what)
            except AssertionError:
                continue
    raise AssertionError(f"no sentence of {one.rule} is {one.what!r}")


def unquoted(named: str) -> str:
    return "" if named == "the model" else named.strip("'")


# ------------------------------------------------------------------- the oracles


def norm_at(oracle: Oracle, site: str) -> float:
    return oracle.gradient_norms()[site]


def of_units(one: Finding, parts: dict[str, str], oracle: Oracle) -> dict[str, float]:
    """The numbers of what is said of a site's units, and those of the other sites that are named.

    A site of which the oracle does not know what is examined has none.
    """
    calls = oracle.examined(unquoted(parts.get("site", "")))
    if calls is None:
        return {}
    if one.rule == "constant" and "part" not in parts:
        for site in [parts["site"], *quoted(parts["others"])]:
            assert same_for_all(oracle.examined(unquoted(site)) or []), (site, one.what)
        return {"examples": len(calls[0])}
    if one.rule == "collapse":
        figure = effective_rank if "rank" in one.what else deviation
        source = oracle.examined(unquoted(parts["source"]))
        return {"after": figure(calls)} | ({"before": figure(source)} if source else {})
    if one.rule not in ("dead-units", "saturated-units", "constant"):
        return {}
    values = {"values": calls[0].shape[0] * calls[0].shape[1]} if "values" in parts else {}
    values |= {"examples": len(calls[0])} if "examples" in parts else {}
    if "part" not in parts:
        zeros = "returns only" in one.what
        assert same_for_all(calls, positions=True), one.what
        assert not zeros or not any(x.any() for x in calls), one.what
        return values
    share = {"dead-units": share_off, "constant": share_still}.get(one.rule)
    share = share or share_saturated(parts["function"])
    for part, site in re.findall(r"(\d+)% of ('[^']*'|the model)", parts["others"]):
        other = oracle.examined(unquoted(site))
        assert other is None or close(part, share(other), percent=True), one.what
    assert parts["units"] == units_said(oracle, unquoted(parts["site"])), one.what
    return {"part": share(calls), **values}


def units_said(oracle: Oracle, site: str) -> str:
    whole = oracle.outputs[site][-1].shape[-1]
    units = (oracle.examined(site) or [])[-1].shape[-1]
    return f"{units} units" if units == whole else f"{units} examined units (of {whole})"


def quoted(others: str) -> list[str]:
    """The sites that are named in `" (also 'a', 'b' and the model)"`."""
    return re.findall(r"'[^']*'|the model", others)


def same_for_all(calls: list[np.ndarray], *, positions: bool = False) -> bool:
    """Whether each unit is the same for all examples, but for the rounding of float32."""
    axes = (0, 1) if positions else 0
    return all((np.ptp(x, axis=axes) <= 3e-6 * np.abs(x).max(axis=axes)).all() for x in calls)


def share_off(calls: list[np.ndarray]) -> float:
    return float(np.logical_and.reduce([x.max(axis=(0, 1)) <= 0 for x in calls]).mean())


def share_still(calls: list[np.ndarray]) -> float:
    deviations = [np.sqrt(x.var(axis=0).mean(axis=0)) for x in calls]
    return float(np.logical_and.reduce([x < 0.02 * x.max() for x in deviations]).mean())


def share_saturated(function: str) -> Callable[[list[np.ndarray]], float]:
    def flat(x: np.ndarray) -> np.ndarray:
        size = np.abs(x)
        if function == "tanh":
            return np.abs(size - 1) <= 0.01 if size.max() <= 1 else size > 2.65
        near = np.minimum(size, np.abs(size - 1)) <= 0.01
        return near if x.min() >= 0 and x.max() <= 1 else size > 4.6

    def share(calls: list[np.ndarray]) -> float:
        each = [flat(x).mean(axis=(0, 1)) >= 2 / 3 for x in calls]
        return float(np.logical_and.reduce(each).mean())

    return share


def effective_rank(calls: list[np.ndarray]) -> float:
    covariances = [np.cov(x.reshape(-1, x.shape[-1]).T) for x in calls]
    return max(float(np.trace(c) ** 2 / (c**2).sum()) for c in covariances)


def deviation(calls: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean([x.var(axis=0).mean() for x in calls])))


def check_nonfinite(parts: dict[str, str], oracle: Oracle) -> None:
    """Check what is counted of values and of parameters, and the range of what was finite."""
    check_elements(parts.get("parameters", ""), oracle.variables())
    shown, before = parts.get("shown", ""), parts.get("before", "")
    if shown:
        quantity, site = re.findall(r"the (\w+) of ('[^']*'|the model)", shown)[0]
        counts, size = re.findall(r"held (.*) among (\d+) values", shown)[0]
    else:
        quantity, site = parts.get("quantity"), parts.get("site", "")
        counts, size = parts.get("counts"), parts.get("size")
    values = {"input": oracle.inputs, "output": oracle.outputs}.get(quantity or "", {})
    if flat := values.get(site_in(site)):
        whole = np.concatenate([x.ravel() for x in flat])
        kinds = {"NaN": np.isnan(whole), "+Inf": whole == np.inf, "-Inf": whole == -np.inf}
        assert counts == " and ".join(f"{x.sum()} {kind}" for kind, x in kinds.items() if x.any())
        assert int(size or 0) == whole.size
    ends = re.search(rf"from {NUMBER} to {NUMBER}\)", before)
    own = "its input" in before
    finite = (oracle.inputs if own else oracle.outputs).get(site_in(site if own else before))
    if ends is not None and finite:
        assert close(ends[1], min(x.min() for x in finite)), parts
        assert close(ends[2], max(x.max() for x in finite)), parts
    infinite = re.search(r"held (.*) among (\d+) values\)", before)
    if infinite is not None and finite:
        whole = np.concatenate([x.ravel() for x in finite])
        kinds = {"+Inf": whole == np.inf, "-Inf": whole == -np.inf}
        each = " and ".join(f"{x.sum()} {kind}" for kind, x in kinds.items() if x.any())
        assert (infinite[1], int(infinite[2])) == (each, whole.size), parts


def site_in(text: str) -> str:
    """The first site that a text names; "" for the model and for none."""
    return unquoted(next(iter(quoted(text)), ""))


def check_elements(said: str, held: dict[str, np.ndarray]) -> None:
    """Compare `"parameters 'a' (2 NaN among 12 elements) and 3 more were"` with the parameters."""
    one = re.compile(r"'([^']+)' \(((?:\d+ (?:NaN|Inf)(?: and )?)+) among (\d+) elements\)")
    named = one.findall(said)
    for path, counts, size in named:
        x = held[path]
        kinds = {"NaN": np.isnan(x).sum(), "Inf": np.isinf(x).sum()}
        assert counts == " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n), said
        assert int(size) == x.size, said
    if said:
        more = re.search(r" and (\d+) more", said)
        broken = sum(not np.isfinite(x).all() for x in held.values())
        assert named
        assert len(named) + int(more[1] if more else 0) <= broken, said


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
    if "shifted" in parts and (calls := oracle.examined(site)):
        expected |= {"last": 0, "values": calls[0].shape[0] * calls[0].shape[1]}
        assert parts["units"] == units_said(oracle, site), one.what
        expected |= batch_norm_offsets(calls, oracle.parameters(), site)
    if one.rule in ("vanishing-gradient", "exploding-gradient"):
        norms = oracle.gradient_norms()
        first, last = unquoted(parts["first"]), unquoted(parts["last"])
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
    expected |= of_units(one, parts, oracle)
    if one.rule == "nonfinite":
        check_nonfinite(parts, oracle)
    for name, number in expected.items():
        percent = f"#{name}#%" in sentence.pattern
        assert close(parts[name], number, percent=percent), (name, parts[name], number, one.what)


def every(found: list[Finding]) -> list[Finding]:
    return [x for one in found for x in (one, *every(list(one.effects)))]


MODELS: dict[str, Callable[[], Any]] = {
    name: entry.build for name, entry in ZOO.items() if entry.rules and "stepped" in entry.ways
}
RULES = {sentence.rule for sentence in SENTENCES}


FOLDED = "a softplus written by hand"
"""XLA makes x of log(exp(x)), so its compiled output has other numbers than line by line."""


def test_there_are_fifty_models():
    assert len(MODELS) >= 50


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_one_pass_are_those_of_the_arrays(name):
    subject = MODELS[name]()
    found = [one for one in every(stepped(subject)) if one.rule in RULES]
    if found:
        oracle = Oracle(subject.model, subject.loss, subject.batch)
        if name == FOLDED:
            y = nnx.jit(lambda model, x: model(x))(subject.model, subject.x)
            oracle.outputs["b"] = [np.asarray(y, np.float64)]
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
    kernels = lambda: {f"{n}/kernel": np.array(getattr(model, n).kernel[...]) for n in "abc"}  # noqa: E731
    held = [kernels()]
    for _ in range(steps):
        step(model, optimizer)
        held.append(kernels())
    return held


def changes(held) -> list[dict[str, float]]:
    """Of each measured step (every second one), its change of each kernel."""
    size = lambda x: float(np.linalg.norm(x.astype(np.float64)))  # noqa: E731
    return [
        {path: size(now[path] - before[path]) / size(before[path]) for path in before}
        for before, now in zip(held[:-1:2], held[1::2], strict=True)
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
    assert (parts["of"], parts["when"]) == ("the parameters", "in")
    ends = f"to step {over[-1]}" if medians[-1] < 0.3 else "on"
    assert parts["until"] == ends


def test_small_updates_are_bounded_by_the_largest():
    (one,) = (f for f in every(trained(optax.sgd(1e-6), watch=True)) if f.rule == "update-ratio")
    _, parts = sentence_of(one)
    medians = [
        statistics.median_low(i.values()) for i in changes(trained(optax.sgd(1e-6), watch=False))
    ]
    assert close(parts["largest"], max(medians))


def test_decay_and_clipping_are_those_of_the_step():
    """The gradient is cut to next to nothing, so the decay alone moves the weights."""
    tx = [optax.clip_by_global_norm(1e-6), optax.add_decayed_weights(0.5), optax.sgd(0.1)]
    found = {f.rule: f for f in every(trained(optax.chain(*tx), watch=True))}
    _, parts = sentence_of(found["weight-decay"])
    held = trained(optax.chain(*tx), watch=False)
    each = [change[unquoted(parts["path"])] for change in changes(held)]
    assert close(parts["moved"], statistics.median(each))
    assert (parts["step"], parts["last"], parts["passes"]) == ("0", "10", "6")
    _, parts = sentence_of(found["clipping"])
    assert (parts["acted"], parts["passes"], parts["taken"]) == ("6", "6", "100")


def test_what_never_changes_is_counted_by_measured_steps():
    (one,) = (f for f in every(trained(optax.sgd(0.0), watch=True)) if f.rule == "update-ratio")
    assert sentence_of(one)[1]["passes"] == "6"


@pytest.mark.parametrize("steps", [6, 4])
def test_parameters_that_an_update_spoils_are_counted(steps):
    """The rate of step 3 is NaN; every second step is measured."""
    tx = optax.sgd(lambda count: jnp.where(count == 3, jnp.nan, 0.01))
    (one,) = (f for f in trained(tx, steps=steps, watch=True) if f.rule == "nonfinite")
    _, parts = sentence_of(one)
    assert parts["step"] == ("4" if steps > 4 else "3")
    model, x = Mlp(), jax.random.normal(jax.random.key(0), (32, 8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(4):
        optimizer.update(model, nnx.grad(loss)(model, x))
    oracle = Oracle(model, loss, x)
    check_nonfinite(parts, oracle)
    assert one.evidence["parameters"] == len(oracle.variables())


class Rectified(Mlp):
    def __call__(self, x):
        return self.c(nnx.relu(self.b(nnx.relu(self.a(x)))))


@pytest.mark.parametrize(("at", "units"), [(6, 12), (7, 16), (0, 9)])
def test_units_that_die_in_a_loop_are_those_of_the_named_step(at, units):
    """Their biases are moved far below 0 before one of 20 steps; each second is measured."""
    model: Any = Rectified()
    x = jax.random.normal(jax.random.key(0), (32, 8))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    step = nnx.jit(lambda m, o: o.update(m, nnx.grad(loss)(m, x)))
    shares: list[float] = []
    with nni.watch(model, every=2) as recording:
        for number in range(20):
            if number == at:
                model.b.bias[:units] -= 100.0
            h = np.asarray(nnx.relu(x @ model.a.kernel[...] + model.a.bias[...]), np.float64)
            b = h @ np.asarray(model.b.kernel[...], np.float64) + np.asarray(model.b.bias[...])
            shares.append(float((b.max(0) <= 0).mean()))
            step(model, optimizer)
    (one,) = (f for f in nni.diagnose(recording) if f.rule == "dead-units")
    _, parts = sentence_of(one)
    measured = shares[::2]
    assert close(parts["part"], min(measured[-5:]), percent=True)
    first = next(i for i in range(10) if min(measured[i:]) >= min(measured[-5:]))
    assert int(parts["step"]) == one.step == 2 * first
    assert parts["others"] == ", in each of the last 5 passes"
    assert (parts["units"], parts["values"]) == ("16 units", "32")


LOOPS = [name for name in MODELS if "looped" in ZOO[name].ways]


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_each_finding_of_a_loop_names_a_step(name):
    for one in every(looped(MODELS[name]())):
        assert re.search(r"\bstep \d", one.what), one
        if one.rule in RULES:
            sentence_of(one)


# ------------------------------------------------------------- heads and experts


def said_of(kind: str, of_passes: list[dict[str, Any]]) -> dict[str, str]:
    """The parts of the one sentence about the heads or experts of 'moe', of which passes 1 to 5
    show what is wrong.
    """
    recording = Recording()
    for step, figures in enumerate(of_passes):
        rows = np.full((len(figures["keys"]), len(CHOICE_STATS)), np.nan, np.float32)
        for name, values in figures.items():
            rows[:, CHOICE_STATS.index(name)] = values
        each = PassStats(choices=(f"moe@{kind}",) * len(rows), choice_rows=rows)
        recording.append(step, {"moe": {"output": summarize(np.ones(3))}}, figures=each)
    (one,) = nni.diagnose(recording)
    assert one.site == "moe"
    _, parts = sentence_of(one)
    assert (parts.pop("step"), parts.pop("passes"), parts.pop("site")) == ("1", "5", "'moe'")
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_of_heads(seed):
    """Heads 0, 1 and 3 have large logits, or give their attention to the first key."""
    length, rng, few = 24, np.random.default_rng(seed), [0, 1, 3]
    below = np.tri(length, dtype=bool)

    def passes(change: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        """The logits of the newest of six passes, and the figures of all."""
        every = rng.normal(size=(6, 2, 4, length, length))
        every[1:, :, few] = change(every[1:, :, few])
        return every[-1], [heads_in_numpy(x, below[None, None]) for x in every]

    def shares(logits: Any) -> Any:
        """The probabilities of these heads, for queries with several keys."""
        exact = np.where(below, logits, -np.inf)[:, few, 1:]
        exact = np.exp(exact - exact.max(-1, keepdims=True))
        return exact / exact.sum(-1, keepdims=True)

    logits, figures = passes(lambda x: 100 * x)
    parts, p = said_of("attention", figures), shares(logits)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1) / np.log(np.arange(2, length + 1))
    assert (parts["sharp"], parts["heads"]) == ("3", "4")
    assert close(parts["evenness"], entropy.mean(), percent=True)
    assert close(parts["logit"], logits[..., below].max())

    logits, figures = passes(lambda x: x + 6 * (np.arange(length) == 0))
    parts = said_of("attention", figures)
    assert (parts["sinks"], parts["heads"]) == ("3", "4")
    assert close(parts["first"], shares(logits)[..., 0].mean(), percent=True)

    logits, figures = passes(lambda x: x + 1500)
    parts, largest = said_of("attention", figures), logits[..., below].max(axis=(0, 2))
    assert close(parts["logit"], largest.max())
    assert int(parts["head"]) == largest.argmax()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_of_experts(seed):
    """Of eight experts two are never chosen, or one is chosen often and one hardly ever."""
    rng, tokens = np.random.default_rng(seed), 4096

    def passes(chances: Any) -> tuple[Any, list[Any]]:
        """The loads in the last five of six passes, and the figures of all."""
        chances = np.array(chances) / np.sum(chances)
        every = [rng.choice(8, tokens), *(rng.choice(8, tokens, p=chances) for _ in range(5))]
        loads = np.array([[(x == e).mean() for e in range(8)] for x in every])
        return loads[1:], [{"load": x, "keys": np.full(8, tokens)} for x in loads]

    loads, figures = passes([1, 0, 1, 1, 2, 0, 1, 1])
    parts = said_of("experts", figures)
    assert (parts["dead"], parts["them"]) == ("experts 1, 5", "them")
    assert (parts["experts"], parts["tokens"]) == ("8", str(tokens))
    assert int(parts["most"]) == loads[-1].argmax()
    assert close(parts["largest"], loads[-1].max(), percent=True)

    loads, figures = passes([1, 1, 9, 1, 1, 1, 1, 0.08])
    parts, ratios = said_of("experts", figures), loads / loads.mean(axis=1, keepdims=True)
    said = re.fullmatch(
        rf"expert 2 gets at least {NUMBER} times an even share "
        rf"and expert 7 gets at most {NUMBER} of an even share",
        parts["uneven"],
    )
    assert said is not None, parts
    assert parts["experts"] == "8"
    assert close(said[1], ratios[:, 2].min())
    assert close(said[2], ratios[:, 7].max())


# --------------------------------------------------------------------- the page


def page() -> str:
    """The page of all sentences, with where each number comes from."""
    rows = [
        f"| `{one.rule}` | {_shown(one.pattern)} | "
        + "; ".join(
            f"*{name}*: {how}"
            for name, how in one.numbers.items()
            if re.search(rf"[#<]{name}[#>]", one.pattern)
        )
        + " |"
        for one in SENTENCES
    ]
    return HEAD + "\n".join(rows) + "\n"


def _has(pattern: str, name: str) -> bool:
    return re.search(rf"[#<]{name}[#>]", pattern) is not None


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
