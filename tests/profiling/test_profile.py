"""`nni.profile` of real steps. Times depend on the machine: of these only sums and signs are
compared; `test_owners` and `test_traces` have constructed ones.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside
from leftovers import hookable_state

import nnx_inspector as nni

D = 64
PARTS = ["forward_ms", "backward_ms", "update_ms"]


class Unequal(nnx.Module):
    """`large` has forty times the arithmetic of `small`."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.small = nnx.Linear(D, D, rngs=rngs)
        self.large = nnx.Linear(D, 40 * D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.large(jnp.sin(self.small(x)))


X = jnp.ones((256, D))


@nnx.jit
def train_step(model: Unequal, optimizer: nnx.Optimizer[Unequal], x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def model_and_optimizer() -> tuple[Unequal, nnx.Optimizer[Unequal]]:
    model = Unequal()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def values(*nodes: Any) -> list[Any]:
    return [np.array(x) for x in jax.tree.leaves(nnx.state(nodes))]


def check(found: Any) -> None:
    """All rows add up to the step, and a module's total is its own time and that of those in it."""
    frame = found.to_frame()
    assert frame[PARTS].to_numpy().sum() == pytest.approx(found.step_ms, rel=1e-6)
    tops = [row.total_ms for row in found.rows if row.site == "" or row.site.startswith("(")]
    assert sum(tops) == pytest.approx(found.step_ms, rel=1e-6)
    for row in found.rows:
        inside = [r.own_ms for r in found.rows if r.site.startswith(f"{row.site}/") or r is row]
        if row.site and not row.site.startswith("("):
            assert row.total_ms == pytest.approx(sum(inside))
    assert all(row.own_ms >= 0 for row in found.rows)


def test_a_step_of_nnx_is_divided_among_its_modules_and_changes_nothing():
    model, optimizer = model_and_optimizer()
    before = values(model, optimizer)
    found = nni.profile(model, train_step, model, optimizer, X)
    check(found)
    assert [row.site for row in found.rows] == ["", "large", "small", "(outside modules)", "(idle)"]
    large, small = found["large"], found["small"]
    for row in (large, small):
        assert min(row.forward_ms, row.backward_ms, row.update_ms) > 0
        assert not row.flops_of_possible > 1
    assert large.flops == 3 * 2 * 256 * D * 40 * D + 2 * 256 * 40 * D
    assert large.type == "Linear"
    assert found.runs == 3
    assert found.argument_bytes == pytest.approx(sum(x.nbytes for x in before) + X.nbytes, rel=0.01)
    assert found.peak_bytes > found.argument_bytes
    held = [row.peak_bytes for row in found.rows if not math.isnan(row.peak_bytes)]
    assert 0.5 < sum(held) / (found.peak_bytes - found.argument_bytes) < 1.3
    assert found[""].kept_bytes == 2 * 256 * D * 4  # the cosine and the sine
    for now, then in zip(values(model, optimizer), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_functional_step_with_donated_state_runs_on_copies():
    model, _ = model_and_optimizer()
    graphdef, params = nnx.split(model, nnx.Param)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: (nnx.merge(graphdef, p)(x) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    found = nni.profile(model, donating, params, optimizer.init(params), X)
    check(found)
    assert found["large"].update_ms > 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    donating(params, optimizer.init(params), X)  # nothing of ours was donated


def test_an_optimizer_outside_jit_is_the_update():
    model, optimizer = model_and_optimizer()
    gradients = nnx.jit(nnx.grad(lambda m, x: (m(x) ** 2).mean()))

    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, gradients(model, x))

    found = nni.profile(model, step, model, optimizer, X)
    check(found)
    assert found["(outside modules)"].update_ms > 0
    assert found["large"].update_ms == 0  # it is not known whose each of those programs is


class Layers(nnx.Module):
    """A scan over rematerialised layers, then one module called twice, in a function of its own."""

    def __init__(self) -> None:
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key: jax.Array) -> nnx.Linear:
            return nnx.Linear(D, D, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), 4))
        self.last = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(nnx.remat(lambda layer, x: layer(x))(layer, x))

        x = through(x, self.layers)
        return nnx.jit(lambda m, x: m(jnp.tanh(m(x))))(self.last, x)


def test_loops_remat_and_inner_functions_keep_their_modules():
    model = Layers()
    step = nnx.jit(nnx.grad(lambda m, x: (m(x) ** 2).mean()))
    found = nni.profile(model, step, model, X)
    check(found)
    for site in ("layers", "last"):
        assert min(found[site].forward_ms, found[site].backward_ms) > 0
    product = 2 * 256 * D * D
    assert found["last"].flops > 6 * product
    assert found["layers"].flops > 4 * 3 * product


def test_two_programs_of_one_name_stand_at_the_modules_of_each():
    model, square = Unequal(), nnx.jit(lambda layer, x: layer(x) ** 2)
    found = nni.profile(model, lambda m: (square(m.small, X), square(m.large, X)), model)
    own = {row.site: row for row in found.rows}
    products = {site: 2 * 256 * D * n for site, n in (("small", D), ("large", 40 * D))}
    for site, flops in products.items():
        assert flops <= own[site].flops <= 1.1 * flops, site
        assert own[site].forward_ms > 0, site
    check(found)


def test_a_step_without_a_gradient_is_forward_alone():
    model, _ = model_and_optimizer()
    found = nni.profile(model, nnx.jit(lambda m, x: m(x)), model, X)
    check(found)
    assert found.to_frame()[["backward_ms", "update_ms"]].to_numpy().sum() == 0
    assert sum(row.kept_bytes for row in found.rows if row.site != "(idle)") == 0


def test_profiling_again_traces_nothing_again():
    model, optimizer = model_and_optimizer()
    traces = 0

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        nonlocal traces
        traces += 1
        return train_step(model, optimizer, x)

    nni.profile(model, step, model, optimizer, X)
    assert traces == 1
    found = nni.profile(model, step, model, optimizer, X)
    assert traces == 1
    check(found)
    assert found["large"].forward_ms > 0


def test_the_step_may_take_its_model_from_around_it():
    model, _ = model_and_optimizer()
    found = nni.profile(model, jax.jit(lambda x: model(x).sum()), X)
    check(found)
    assert found["large"].forward_ms > 0


def test_table_frame_and_figure_say_the_same(tmp_path: pathlib.Path):
    model, optimizer = model_and_optimizer()
    found = nni.profile(model, train_step, model, optimizer, X, runs=1, folder=tmp_path)
    text = repr(found)
    assert "(outside modules)" in text
    assert "(idle)" in text
    assert text.splitlines()[1].startswith("(model)  ")
    assert "<td" in found._repr_html_()
    figure: Any = found.figure()
    (drawn,) = figure.data
    by_id = dict(zip(drawn.ids, drawn.values, strict=True))
    assert by_id["/large"] == found["large"].total_ms
    assert sum(v for i, v in by_id.items() if i in ("/", "/(idle)", "/(outside modules)")) == (
        pytest.approx(found.step_ms)
    )
    parents = dict(zip(drawn.ids, drawn.parents, strict=True))
    assert parents["/large"] == "/"
    assert list(tmp_path.rglob("*.xplane.pb"))  # for XProf


def test_an_inspector_profiles_its_model_between_loops():
    model, optimizer = model_and_optimizer()
    insp = nni.Inspector(model, X, display=False)
    found = insp.profile(train_step, model, optimizer, X, runs=1)
    check(found)
    layout = inside(insp).view.layout
    assert layout is not None
    shown = {row.key: row for row in layout.sites}
    assert {key: row.step_ms for key, row in shown.items()} == {
        key: found[key].total_ms for key in ("", "large", "small")
    }
    # those of a module have those in it, as its FLOPs do
    assert shown[""].kept_bytes == sum(found[site].kept_bytes for site in ("", "large", "small"))
    times = [found[site].forward_ms + found[site].backward_ms for site in ("", "large", "small")]
    flops = sum(found[site].flops for site in ("", "large", "small"))
    assert shown[""].of_possible == pytest.approx(1e3 * flops / sum(times) / found.possible_flops)
    for x in insp.watch([X] * 2, every=1):
        train_step(model, optimizer, x)
        with pytest.raises(nni.InspectorError, match="before or after"):
            insp.profile(train_step, model, optimizer, X)
    insp.close()
    with pytest.raises(nni.InspectorError, match="was closed"):
        insp.profile(train_step, model, optimizer, X)


# ------------------------------------------------------------------- bad input


def test_an_error_of_the_step_is_raised_as_it_is_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, _ = model_and_optimizer()
    before, calls = hookable_state(), 0

    def step(model: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # the first one that is traced
            raise ZeroDivisionError("theirs")
        model(X)

    with pytest.raises(ZeroDivisionError, match="theirs") as caught:
        nni.profile(model, step, model)
    assert "while the step was traced by profile" in caught.value.__notes__[0]
    assert hookable_state() == before
    assert list(tmp_path.iterdir()) == []
    with jax.profiler.trace(str(tmp_path)):  # another trace may begin
        pass


def test_a_step_that_never_calls_the_model_says_so():
    model, other = model_and_optimizer()[0], Unequal()
    with pytest.raises(nni.InspectorError, match="calls no module of the Unequal"):
        nni.profile(model, nnx.jit(lambda m, x: m(x)), other, X)
    with pytest.raises(nni.InspectorError, match="no events of operations"):
        nni.profile(model, lambda: None)


def test_another_trace_goes_on(tmp_path: pathlib.Path):
    model, _ = model_and_optimizer()
    with jax.profiler.trace(str(tmp_path)):
        with pytest.raises(nni.InspectorError, match="End the other trace"):
            nni.profile(model, nnx.jit(lambda m, x: m(x)), model, X)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_arguments_are_checked():
    model, _ = model_and_optimizer()
    with pytest.raises(TypeError, match="function as the step"):
        nni.profile(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module"):
        nni.profile(3, print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        nni.profile(model, print, runs=0)
    found = nni.profile(model, nnx.jit(lambda m, x: m(x)), model, X, runs=1)
    with pytest.raises(KeyError, match="'nothing' has no row"):
        found["nothing"]


class Greedy(nnx.Module):
    """Asks for more memory than any machine has."""

    def __init__(self) -> None:
        self.hungry = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
        self.modest = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = jnp.broadcast_to(self.modest(x), (1 << 43, 1, 2))
        return jax.lax.sort(self.hungry(wide), dimension=0)


def test_exhausted_memory_names_the_modules_that_need_most():
    model = Greedy()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        nni.profile(model, nnx.jit(lambda m, x: m(x)), model, jnp.ones((1, 2)))
    (note,) = caught.value.__notes__
    assert "The largest array is float32[8796093022208,1,4] (141 TB), of 'hungry'" in note
