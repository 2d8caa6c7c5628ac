"""A jaxpr with marks: its survey, and that the edited program computes what the plain one does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import batch

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.instrument import evaluate, instrument
from nnx_inspector.program.marks import mark_tree
from nnx_inspector.program.plan import Observation, Plan
from nnx_inspector.program.survey import survey

X = batch(4, 3)


def mark(x, site="s"):
    return mark_tree(x, owner="us", site=site, part="output")


def scan(x):
    return jax.lax.scan(lambda c, r: (mark(jnp.sin(c + r)), c.sum()), x, jnp.arange(3.0))


def scan_in_reverse(x):
    step = lambda c, r: (mark(c * r), r)  # noqa: E731
    return jax.lax.scan(step, x, jnp.arange(1.0, 4.0), reverse=True)


def scan_of_scan(x):
    outer = lambda c, _: (scan(c)[0], None)  # noqa: E731
    return jax.lax.scan(outer, x, None, length=2)[0]


def loop(x):
    return jax.lax.while_loop(lambda c: c.sum() < 50.0, lambda c: mark(c + 1.0), x)


def branches(x):
    return jax.lax.switch(1, [lambda x: mark(x, "a"), lambda x: mark(2 * x, "b"), jnp.sin], x)


def remat(x):
    return jax.checkpoint(lambda x: mark(jnp.sin(x)))(x)


def inner_jit(x):
    return jax.jit(lambda x: mark(jnp.sin(x)))(x)


def over_devices(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    run = lambda x: mark(jnp.sin(x))  # noqa: E731
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def custom(x):
    @jax.custom_jvp
    def f(x):
        return mark(x)

    f.defjvps(lambda t, out, x: t)
    return f(x)


PROGRAMS = [
    scan,
    scan_in_reverse,
    scan_of_scan,
    loop,
    branches,
    remat,
    inner_jit,
    over_devices,
    custom,
]


@pytest.mark.parametrize("f", PROGRAMS)
def test_the_evaluation_is_the_plain_one(f):
    out, _ = evaluate(survey(jax.make_jaxpr(f)(X), "us"), [X], plan=Plan())
    for ours, plain in zip(out, jax.tree.leaves(f(X)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)  # XLA fuses a loop's body differently


@pytest.mark.parametrize("f", [scan, scan_in_reverse, remat, inner_jit, over_devices, branches])
def test_the_gradient_of_an_evaluation_is_the_plain_one(f):
    found = survey(jax.make_jaxpr(f)(X), "us")
    got = jax.jit(jax.grad(lambda x: evaluate(found, [x], plan=Plan())[0][0].sum()))(X)
    plain = jax.grad(lambda x: jax.tree.leaves(f(x))[0].sum())(X)
    np.testing.assert_allclose(got, plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("f", "sites"),
    [(scan, ["s"]), (loop, ["s"]), (branches, ["a", "b"]), (remat, ["s"]), (scan_of_scan, ["s"])],
)
def test_every_mark_is_found_once(f, sites):
    assert [m.site for m in survey(jax.make_jaxpr(f)(X), "us").marks] == sites


def both_in_scans(x):
    body = lambda c, _: (branches(loop(c)), None)  # noqa: E731
    return jax.lax.scan(body, mark(x, "out"), None, length=3, reverse=True)[0]


def test_a_walk_gives_each_mark_with_what_is_around_it_and_what_was_seen_of_it():
    found = survey(jax.make_jaxpr(both_in_scans)(X), "us")
    _, seen = evaluate(found, [X], plan=Plan())
    walked = [(m.site, m.rows(around), one.ran) for m, around, one in found.walk(seen)]
    assert [(site, lengths, ran.shape) for site, lengths, ran in walked] == [
        ("out", (), ()),
        ("s", (-3,), (3,)),
        ("a", (-3,), (3,)),
        ("b", (-3,), (3,)),
    ]
    assert [int(ran.sum()) for *_, ran in walked[2:]] == [0, 3]
    sites = found.map_marks(lambda m, around: m.site)
    assert [site for *_, site in found.walk(sites)] == ["out", "s", "a", "b"]


def test_of_the_second_pass_of_a_remat_nothing_is_seen():
    f = jax.checkpoint(lambda x: jnp.sin(mark(jnp.sin(x))).sum())
    found = survey(jax.make_jaxpr(jax.grad(f))(X), "us")
    _, seen = evaluate(found, [X], plan=Plan())
    assert [one is None for *_, one in found.walk(seen)] == [False, True]


def test_without_marks_nothing_is_found():
    found = survey(jax.make_jaxpr(jnp.sin)(X), "us")
    assert found.items == {}
    assert found.unseen == {}


def test_a_mark_in_a_custom_rule_is_unseen_with_its_reason():
    found = survey(jax.make_jaxpr(custom)(X), "us")
    assert found.items == {}
    assert list(found.unseen) == ["s"]
    assert "inside a custom_jvp_call equation, which cannot be entered" in found.unseen["s"]


def test_a_mark_in_the_condition_of_a_while_loop_is_unseen_and_the_loop_runs():
    def f(x):
        return jax.lax.while_loop(lambda c: mark(c).sum() < 50.0, lambda c: c + 1.0, x)

    found = survey(jax.make_jaxpr(f)(X), "us")
    assert found.unseen == {"s": "it is called in the condition of a while loop"}
    np.testing.assert_array_equal(evaluate(found, [X], plan=Plan())[0][0], f(X))


def test_marks_in_condition_and_body_do_not_disturb_each_other():
    def f(x):
        body = lambda c: mark(c + 1.0, "body")  # noqa: E731
        return jax.lax.while_loop(lambda c: mark(c, "test").sum() < 50.0, body, x)

    found = survey(jax.make_jaxpr(f)(X), "us")
    (out,), seen = evaluate(found, [X], plan=Plan())
    np.testing.assert_array_equal(out, f(X))
    assert list(found.unseen) == ["test"]
    (ran,) = [s.ran for s in jax.tree.leaves(seen, is_leaf=lambda s: isinstance(s, Observation))]
    assert int(ran) == round(float((f(X) - X).mean()))


def test_nested_scans_give_a_row_for_each_iteration_of_both():
    _, ((seen,),) = evaluate(survey(jax.make_jaxpr(scan_of_scan)(X), "us"), [X], plan=Plan())
    (leaf,) = jax.tree.leaves(seen, is_leaf=lambda s: isinstance(s, Observation))
    assert leaf.ran.shape == (2, 3)
    assert leaf.summaries[0].rows == (2, 3)


def test_a_perturbation_acts_on_outputs_and_is_what_is_measured():
    found = survey(jax.make_jaxpr(lambda x: 2.0 * mark(x))(X), "us")
    plan = Plan(perturb=lambda mark, xs, _: [10.0 * x for x in xs] if mark.site == "s" else xs)
    (out,), (seen,) = evaluate(found, [X], plan=plan)
    np.testing.assert_array_equal(out, 20.0 * X)
    np.testing.assert_allclose(seen.summaries[0].max, 10.0 * float(X.max()), rtol=1e-6)


def test_without_summaries_only_the_counts_come_out():
    found = survey(jax.make_jaxpr(mark)(X), "us")
    _, (seen,) = evaluate(found, [X], plan=Plan(summarise=False))
    assert seen.summaries == []
    assert int(seen.ran) == 1


def test_one_value_marked_twice_is_reduced_once():
    found = survey(jax.make_jaxpr(lambda x: mark(mark(x, "a"), "b"))(X), "us")
    _, seen = evaluate(found, [X], plan=Plan())
    assert seen[0].summaries[0].bins is seen[1].summaries[0].bins


@pytest.mark.parametrize(
    ("f", "names"), [(scan, {"scan"}), (remat, jaxprs.REMAT), (inner_jit, jaxprs.JITS)]
)
def test_equations_with_marks_keep_their_kind(f, names):
    """They are not unrolled or inlined; what measures may be jitted too."""
    edited = instrument(survey(jax.make_jaxpr(f)(X), "us"), Plan()).jaxpr
    own = [e for e in edited.eqns if e.primitive.name in names]
    assert len(own) == 1 or (f is inner_jit and own)
