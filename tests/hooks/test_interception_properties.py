"""For any model, called in any way, hooks change nothing, see every call and leave nothing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import generated
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from generated import Spec, spec
from generated_layers import ForwardError
from hypothesis_examples import examples
from interceptors import CallLog, pass_through
from leftovers import TOLERANCE, arrays_of, assert_close, nothing_left, object_changes, objects

from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.activations import Scale
from nnx_inspector.perturbations.perturb import perturb
from nnx_inspector.records.capture import capture, value_and_grad

# -------------------------------------------------------------- ways of looking

Run = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a way of calling it, and a way of observing it."""

    spec: Spec
    transforms: tuple[str, ...]
    hook: str

    @property
    def eager(self) -> bool:
        """Whether nothing is compiled, so that results are equal bit for bit.

        A capture runs each equation of a trace, whereas `jnp.mean` is one program of several.
        """
        compiles = self.transforms or self.spec.kinds & generated.TRACES
        return not compiles and self.hook not in CAPTURES

    @property
    def traced_once(self) -> bool:
        """Whether the model's Python runs exactly once per call."""
        return self.transforms in ((), ("nnx.jit",), ("jax.jit",))

    @property
    def expected(self) -> list[generated.Call]:
        """The calls that interceptors see."""
        return [call for call in generated.expected_calls(self.spec) if not call.sown]

    @property
    def recorded(self) -> set[str]:
        """The sites of a record: outputs of `__call__` with a path, and sown values."""
        calls = generated.expected_calls(self.spec)
        return {c.site for c in calls if c.site is not None and ":" not in c.site}


def check_sites(case: Case, found: list[str | None], expected: list[generated.Call]) -> None:
    """Compare the seen calls with the model's: in order if Python runs once, else as a set."""
    sites = [call.site for call in expected]
    if case.traced_once and not any(call.traced for call in expected):
        assert found == sites
        return
    assert set(found) == set(sites)
    if case.traced_once:
        traced = {call.site for call in expected if call.traced}
        count = collections.Counter(site for site in found if site not in traced)
        assert count == collections.Counter(site for site in sites if site not in traced)


def with_model(case: Case, found: list[str | None], at: str = "") -> None:
    """The same relative to a part of the model: calls outside the model are not seen."""
    below = [
        dataclasses.replace(call, site=call.site.removeprefix(at).removeprefix("/"))
        for call in case.expected
        if call.site is not None and is_within(call.site, at)
    ]
    check_sites(case, found, below)


def is_within(site: str, path: str) -> bool:
    return not path or site.partition(":")[0] == path or site.startswith(f"{path}/")


def by_path(model: Any, path: str) -> Any:
    found = {"/".join(map(str, p)): module for p, module in nnx.iter_modules(model)}
    return found[path]


def passive(case: Case, run: Run, model: Any, x: Any) -> Any:
    log = CallLog()
    with intercept_methods(log):
        y = run(model, x)
    check_sites(case, log.sites, case.expected)
    return y


def passive_model(case: Case, run: Run, model: Any, x: Any) -> Any:
    log = CallLog()
    with intercept_methods(log, model=model):
        y = run(model, x)
    with_model(case, log.sites)
    return y


def passive_part(case: Case, run: Run, model: Any, x: Any) -> Any:
    """Relative to the module that is deepest in the model."""
    path = max(generated.submodule_paths(case.spec), key=lambda p: (p.count("/"), len(p), p))
    log = CallLog()
    with intercept_methods(log, model=by_path(model, path)):
        y = run(model, x)
    with_model(case, log.sites, path)
    return y


def nested(case: Case, run: Run, model: Any, x: Any) -> Any:
    outer, inner = CallLog(), CallLog()
    with intercept_methods(outer, model=model), intercept_methods(inner):
        y = run(model, x)
    with_model(case, outer.sites)
    check_sites(case, inner.sites, case.expected)
    return y


def scaled(case: Case, run: Run, model: Any, x: Any) -> Any:
    with perturb("**", Scale(1.0)):
        return run(model, x)


def scaled_model(case: Case, run: Run, model: Any, x: Any) -> Any:
    with perturb("**", Scale(1.0), model=model):
        return run(model, x)


def check_record(case: Case, record: Any) -> None:
    """Every site that is called is in the record, or in its list of what could not be seen."""
    unseen = {site for site in record.unseen if not site.startswith("(")}
    assert set(record) <= case.recorded
    assert set(record) | unseen == case.recorded
    if not case.transforms and not any(call.traced for call in case.expected):
        count = collections.Counter(c.site for c in generated.expected_calls(case.spec))
        assert {site: len(record[site].calls) for site in record} == {
            site: count[site] for site in record
        }
        assert not unseen


def captured(case: Case, run: Run, model: Any, x: Any) -> Any:
    y, record = capture(run)(model, x)
    check_record(case, record)
    return y


def captured_within(case: Case, run: Run, model: Any, x: Any) -> Any:
    """`capture` inside the transforms."""
    found = []

    def within(model: Any, x: Any) -> Any:
        y, record = capture(generated.call)(model, x)
        found.append((set(record), set(record.unseen)))
        return y

    y = generated.transformed(case.transforms, within)(model, x)
    for sites, unseen in found:
        assert sites | {site for site in unseen if not site.startswith("(")} == case.recorded
    return y


def watched(case: Case, run: Run, model: Any, x: Any) -> Any:
    session = Session(model, parameters=False)
    try:
        with session.open():
            y = run(model, x)
        arrived = set(session.take())
        assert session.errors == []
        assert arrived <= case.recorded
        if case.eager:  # not within a loop or a branch
            assert arrived == case.recorded
    finally:
        session.close()
    return y


def loss_of(run: Run) -> Run:
    """A weighted sum: the sum of squares of a normalised output is constant, and the gradient of
    a constant is rounding errors.
    """

    def loss(model: Any, x: Any) -> Any:
        y = run(model, x)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    return loss


def graded(case: Case, run: Run, model: Any, x: Any) -> Any:
    (loss, record), grads = value_and_grad(loss_of(run))(model, x)
    check_record(case, record)
    return loss, grads


HOOKS: dict[str, Callable[[Case, Run, Any, Any], Any]] = {
    hook.__name__: hook
    for hook in (
        passive, passive_model, passive_part, nested, scaled, scaled_model, captured,
        captured_within, graded, watched,
    )
}  # fmt: skip
CAPTURES = {"captured", "captured_within", "graded"}
"""Ways of observing that stage the call and write its changes back."""


# ------------------------------------------------------------------ the property


def rounding(case: Case, without: Run, x: Any) -> float:
    """How far two computations of the same gradients may differ: ten times the difference that
    `nnx.jit` makes without hooks, because a normalisation may enlarge an error without bound.
    """
    results = [
        arrays_of(call(generated.make(case.spec, case.transforms), x))
        for call in (without, nnx.jit(without))
    ]
    apart = [
        float(np.abs(a - b).max(initial=0.0)) / max(1.0, float(np.abs(b).max(initial=0.0)))
        for a, b in zip(*results, strict=True)
        if a.dtype.kind == "f" and np.isfinite(a).all()
    ]
    return max(10 * TOLERANCE, 10 * max(apart, default=0.0))


def check(case: Case) -> None:
    """A hooked call and a plain one after it, beside two plain calls of an equal model."""
    x = models.batch(*generated.SHAPE)
    plain, ours = (generated.make(case.spec, case.transforms) for _ in range(2))
    plain_before, ours_before = objects(plain), objects(ours)
    run = generated.transformed(case.transforms)
    without = nnx.value_and_grad(loss_of(run)) if case.hook == "graded" else run
    expected = without(plain, x)
    state = arrays_of(nnx.state(plain))
    with nothing_left():
        found = HOOKS[case.hook](case, run, ours, x)
    tolerance = rounding(case, without, x) if case.hook == "graded" else TOLERANCE
    assert_close(found, expected, exactly=case.eager, tolerance=tolerance)
    assert_close(arrays_of(nnx.state(ours)), state, exactly=case.eager)
    expected = without(plain, x)
    found = without(ours, x)  # the programs compiled within it were called with the hooks before
    assert_close(found, expected, exactly=case.eager, tolerance=tolerance)
    assert_close(nnx.state(ours), nnx.state(plain), exactly=case.eager)
    left, left_by_plain = (
        object_changes(before, objects(model), exactly=case.eager)
        for before, model in ((ours_before, ours), (plain_before, plain))
    )
    assert left == left_by_plain
    if not case.spec.kinds & generated.CLOSES_OVER:
        assert nnx.graphdef(ours) == nnx.graphdef(plain)
        assert jax.tree.structure(ours) == jax.tree.structure(plain)


def check_failure(case: Case) -> None:
    """The exception of the forward pass is the user's own, and the hooks leave nothing behind."""
    x = models.batch(*generated.SHAPE)
    failing = dataclasses.replace(case, spec=spec("chain", case.spec, spec("fails", case.spec)))
    plain, ours = (generated.make(failing.spec, case.transforms) for _ in range(2))
    plain_before, ours_before = objects(plain), objects(ours)
    run = generated.transformed(case.transforms)
    with pytest.raises(ForwardError):
        run(plain, x)
    with nothing_left(), pytest.raises(ForwardError, match=r"^the user's own"):
        HOOKS[case.hook](failing, run, ours, x)
    if case.hook not in CAPTURES:  # these change nothing then
        assert_close(nnx.state(ours), nnx.state(plain), exactly=case.eager)
        assert object_changes(ours_before, objects(ours), exactly=False) == object_changes(
            plain_before, objects(plain), exactly=False
        )


@dataclasses.dataclass
class Counted:
    """Calls the model and counts how often its Python runs."""

    times: int = 0

    def __call__(self, model: Any, x: Any) -> Any:
        self.times += 1
        return model(x)


def check_retraces(one: Spec, transforms: tuple[str, ...], of_model: bool) -> None:
    """Equal hooks share one program, however often they are opened and closed."""
    x, counted = models.batch(*generated.SHAPE), Counted()
    model = generated.make(one, transforms)
    run = generated.transformed(transforms, counted)
    regions: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        lambda: intercept_methods(pass_through, model=model if of_model else None),
        lambda: perturb("**", Scale(2.0), model=model if of_model else None),
        lambda: perturb("**", Scale(3.0), model=model if of_model else None),
    ]
    times = []
    for _ in range(2):
        for region in regions:
            with region():
                run(model, x)
            times.append(counted.times)
    once = times[0]
    assert times == [once, 2 * once, 3 * once, 3 * once, *[3 * once] * 4]


def possible(case: Case) -> bool:
    if case.hook == "graded" and not generated.fits(case.spec, (*case.transforms, "nnx.grad")):
        return False
    # a capture traces, as nnx.jit does
    return not (case.hook in CAPTURES and case.spec.kinds & generated.CLOSES_OVER)


CASES = st.builds(
    lambda call, hook: Case(*call, hook), generated.cases(), st.sampled_from(sorted(HOOKS))
).filter(possible)
sow_outside_of_capture = pytest.mark.filterwarnings(r"ignore:\s*Using 'Module.(sow|perturb)")


@sow_outside_of_capture
@examples(6, of=1000)
@hypothesis.given(CASES)
def test_hooks_change_nothing_see_every_call_and_leave_nothing(case):
    check(case)


@sow_outside_of_capture
@examples(3, of=100)
@hypothesis.given(CASES)
def test_an_exception_of_the_forward_pass_is_the_users_and_leaves_nothing(case):
    check_failure(case)


JITTED = st.tuples(
    generated.SPECS.filter(lambda one: not one.kinds & (generated.GROWS | generated.CLOSES_OVER)),
    st.sampled_from([("nnx.jit",), ("jax.jit",), ("nnx.jit", "nnx.remat")]),
    st.booleans(),
)


@examples(3, of=100)
@hypothesis.given(JITTED)
def test_equal_hooks_that_come_and_go_trace_nothing_anew(case):
    check_retraces(*case)


def of_kind(name: str) -> Spec:
    """A model of one kind with plain layers inside."""
    inner = (spec("linear"), spec("dropout"), spec("batch_norm"))
    return spec(name, *inner[: generated.KINDS[name].arity[1]])


@sow_outside_of_capture
@pytest.mark.parametrize("name", sorted(set(generated.KINDS) - {"fails"}))
def test_every_kind_of_layer_is_seen_as_it_is_called(name):
    check(Case(of_kind(name), (), "nested"))


@pytest.mark.parametrize("name", sorted(generated.TRANSFORMS))
def test_every_transform_is_seen_through(name):
    methods = spec("methods", spec("dropout"), spec("layer_norm"))
    model = spec("chain", spec("residual", spec("linear")), spec("batch_norm"), methods)
    check(Case(model, (name,), "nested"))
