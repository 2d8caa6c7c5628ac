"""Operations within calls: their names, where they belong, and what stays as it is without them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from inside import inside
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

import nnx_inspector as nni
from nnx_inspector.hooks.sites import Selection, parse_key, site_key
from nnx_inspector.recordings.tree_rows import layer_key, layer_of
from tests.models.explicit import Attention, D, Gated, Stacked

X = jax.random.normal(jax.random.key(0), (3, D))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn, self.mlp = Attention(rngs), Gated(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.attn(x))


def operations(record: Any) -> list[str]:
    return [key for key in record if "@" in key]


@pytest.mark.parametrize(
    ("key", "path", "method"),
    [
        ("blocks/0/attn@softmax", ("blocks", "0", "attn"), "@softmax"),
        ("@dot_general[1]", (), "@dot_general[1]"),
        ("enc:encode@mul", ("enc",), "encode@mul"),
        (r"a\@b", ("a@b",), "__call__"),
        (r"a\@b@mul", ("a@b",), "@mul"),
    ],
)
def test_a_key_names_a_call_and_an_operation(key: str, path: Any, method: str) -> None:
    assert parse_key(key) == (path, method)
    assert site_key(path, method) == key
    assert Selection(key).matches_key(key)


@pytest.mark.parametrize(
    ("glob", "key", "selected"),
    [
        ("**", "attn@softmax", False),
        ("attn", "attn@softmax", False),
        ("attn:*", "attn@softmax", False),
        ("**@*", "attn@softmax", True),
        ("**@*", "enc:encode@softmax", True),
        ("enc@*", "enc:encode@softmax", False),
        (r"a\*@*", "a*:encode@softmax", False),
        ("**:*@*", "enc:encode@softmax", True),
        ("**/attn@soft*", "blocks/0/attn@softmax", True),
        ("**/attn@softmax", "blocks/0/attn", False),
        ("**@mul", "attn@mul[1]", False),
        ("**@mul[1]", "attn@mul[1]", True),
    ],
)
def test_a_glob_stands_on_both_sides(glob: str, key: str, selected: bool) -> None:
    assert Selection(glob).matches_key(key) == selected
    assert not Selection([None, nnx.Module]).matches_key(key)


def test_a_layer_is_chosen_before_the_operation() -> None:
    assert layer_key("blocks@mul[1]", 3) == "blocks[3]@mul[1]"
    assert layer_of("blocks[3]@mul[1]") == ("blocks@mul[1]", 3)
    assert layer_of("blocks@mul[1]") is None
    model = Stacked(nnx.Rngs(0))
    _, record = nni.capture(model, only="layers@softmax", values=True)(X)
    assert record["layers[1]@softmax"].values.shape == X.shape
    zeroed = nni.perturbed(model)({"layers[1]@softmax": nni.Zero()}, X)
    assert float(abs(zeroed).sum()) == 0
    clean = nni.perturbed(model)({"layers[0]@softmax": nni.Zero()}, X)
    assert float(abs(clean).sum()) > 0


def test_nothing_is_seen_inside_unless_it_is_selected() -> None:
    before = jax.nn.softmax.__code__
    model = Net(nnx.Rngs(0))

    def lowered(run: Any) -> list[str]:
        found = nnx.jit(run).lower(model, X)
        return [found.as_text(), str("nnx_inspector_call" in found.as_text(debug_info=True))]

    def step(only: Any = None) -> list[str]:
        return lowered(lambda model, x: nni.capture(model, only=only)(x))

    first, bare = step(), lowered(lambda model, x: model(x))
    assert first[1] == bare[1] == "False"
    assert step(["**", "**/attn@softmax"])[1] == "True"
    assert step() == first
    assert lowered(lambda model, x: model(x)) == bare
    assert jax.nn.softmax.__code__ is before
    _, record = nni.capture(model)(X)
    assert not operations(record)


def lowered_steps(model: Any, insp: nni.Inspector) -> list[str]:
    """The programs of a training step: by `value_and_grad`, and watched. Traced anew each time."""
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    found = [nnx.jit(lambda m, x: nni.value_and_grad(loss)(m, x)).lower(model, X).as_text()]
    for x in insp.watch([X], every=1):
        step = nnx.jit(lambda m, x: nnx.value_and_grad(loss)(m, x))
        found.append(step.lower(model, x).as_text())
    return [re.sub(r"(index|number) = \d+", "", text) for text in found]  # of a callback


def test_a_training_step_that_selects_no_operation_is_the_same_program() -> None:
    """Before anything was seen inside, after it was shown and hidden, and beside a selection."""
    model = Net(nnx.Rngs(0))
    plain, other = (nni.Inspector(Net(nnx.Rngs(0)), X, display=False) for _ in range(2))
    insp = nni.Inspector(model, X, display=False)
    before = lowered_steps(model, insp)
    assert all("softmax" not in text for text in before)
    insp.show_operations("attn")
    shown = lowered_steps(model, insp)
    assert (shown[0] == before[0], shown[1] == before[1]) == (True, False)
    other.show_operations("attn")
    insp.show_operations("attn", shown=False)
    assert lowered_steps(model, insp) == before
    assert lowered_steps(inside(plain).core.watched_model, plain) == before
    for one in (plain, other, insp):
        one.close()


def test_a_softmax_costs_the_operations_that_a_module_costs() -> None:
    model, x = Net(nnx.Rngs(0)), jnp.ones((D, D))
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731

    def count(*sites: str) -> int:
        run = nnx.jit(lambda m, x: nni.value_and_grad(loss, only=["", *sites])(m, x))
        return run.lower(model, x).as_text().count("stablehlo.")

    none, module, softmax = count(), count("attn"), count("attn@softmax")
    both, more = count("attn", "attn@softmax"), count("attn", "attn@softmax", "mlp@silu")
    assert module > none
    assert softmax - none <= module - none + 4
    assert more - both <= both - module + 4


def test_a_trace_lists_what_is_selected_under_its_module() -> None:
    trace = nni.trace(Net(nnx.Rngs(0)), X, only=["**", "attn@*"])
    rows = {call.site: call for call in trace.calls}
    assert not any("@" in call.site for call in nni.trace(Net(nnx.Rngs(0)), X).calls)
    softmax = rows["attn@softmax"]
    assert trace.calls[softmax.parent].site == "attn"  # type: ignore[index]
    assert (softmax.output, softmax.parameters) == ("float32[3,3]", 0)
    file, _, line = softmax.source.rpartition(":")
    assert file.endswith("explicit.py")
    assert int(line) > 0
    assert "\n    @softmax " in str(trace)
    assert not any(site.startswith("mlp@") for site in rows)


class Lines(nnx.Module):
    """An operation a line: of Python's, of jax's, of a jitted function, of a scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.inner(x)
        y = y + x
        y = jnp.sin(y)
        y = jax.nn.silu(y)
        return jax.lax.scan(lambda y, _: (y * 2, None), y, length=2)[0]


def test_each_operation_has_the_line_that_computes_it() -> None:
    model, first = Lines(nnx.Rngs(0)), Lines.__call__.__code__.co_firstlineno
    nni.trace(model, X)  # jax keeps what it has traced of its own functions
    calls = nni.trace(model, X, only=["**", "**@*"]).calls
    assert {call.source.rpartition(":")[0] for call in calls[1:]} == {__file__}
    lines = {call.site: int(call.source.rpartition(":")[2]) - first for call in calls}
    expected = {"inner": 1, "inner@add": 1, "@add": 2, "@sin": 3, "@silu": 4, "@mul": 5}
    assert {site: lines.get(site) for site in expected} == expected


class Helped(nnx.Module):
    """What it computes is in public methods that its call calls."""

    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Linear(D, D, rngs=rngs)

    def pattern_of(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(self.q(x) @ x.T)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.pattern_of(x) @ x

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.encode(x))


def test_what_other_methods_compute_is_found_too() -> None:
    model = nnx.Sequential(Helped(nnx.Rngs(0)))
    pattern, site = model.layers[0].pattern_of(X), "layers/0:encode@attention"
    _, record = nni.capture(model, only=["**@attention", "**@softmax"], values=True)(X)
    assert sorted(record) == [site, "layers/0:pattern_of@softmax"]
    assert jnp.allclose(record[site].values, pattern, atol=1e-6)
    with nni.perturb("**@attention", nni.Zero()):
        assert not model(X).any()
    insp = nni.Inspector(model, X, display=False)
    opened = insp.values("layers/0", part="attention")
    assert jnp.allclose(opened[":encode@attention"][0], pattern, atol=1e-6)
    assert jnp.allclose(insp.values(site), pattern, atol=1e-6)
    insp.show_operations("layers/0")
    shown = {key for key in inside(insp).view.keys if "@" in key}
    assert {site, "layers/0:pattern_of@softmax", "layers/0@sin"} <= shown
    assert not any(".exp" in key for key in shown)
    insp.show_operations("layers/0", shown=False)
    assert not any("@" in key for key in inside(insp).view.keys)
    insp.close()


@jax.jit
def attention(q: jax.Array, k: jax.Array) -> jax.Array:
    return checkpoint_name(jax.nn.softmax(q @ k.T) @ k, "attention")


def test_the_name_attention_is_that_of_a_pattern_alone() -> None:
    class Twice(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return attention(attention(x, x), x)

    patterns = [jax.nn.softmax(X @ X.T)]
    patterns.append(jax.nn.softmax((patterns[0] @ X) @ X.T))
    _, record = nni.capture(Twice(), only="@attention*", values=True)(X)
    insp = nni.Inspector(Twice(), X, display=False)
    opened = insp.values("", part="attention")
    insp.close()
    for name, wanted in zip(["@attention", "@attention[1]"], patterns, strict=True):
        assert jnp.allclose(record[name].values, wanted, atol=1e-6)
        assert jnp.allclose(opened[name][0], wanted, atol=1e-6)
    assert jnp.allclose(record["@attention_"].values, patterns[0] @ X, atol=1e-6)


def test_a_name_that_matches_nothing_names_the_nearest() -> None:
    model = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match="closest sites are 'attn@softmax'"):
        nni.capture(model, only="**/attn@sofmax")(X)
    with pytest.raises(ValueError, match="closest sites are 'attn@softmax'"):
        nni.perturbed(model)({"attn@sofmax": nni.Zero()}, X)
    with pytest.raises(ValueError, match="closest sites are 'attn@softmax'"):
        nni.trace(model, X, only=["**", "attn@sofmax"])
    with pytest.raises(ValueError, match=r"'mlp@attention' matches no site.*'attn@attention'"):
        nni.trace(model, X, only="mlp@attention")
    with pytest.raises(ValueError, match="'atn@softmax' matches no site"):
        nni.Inspector(model, X, only="atn@softmax")


def test_another_model_with_the_same_function_is_not_seen() -> None:
    model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))

    def both(model: nnx.Module, x: jax.Array) -> Any:
        return model(x) + twin(x)  # type: ignore[operator]

    _, record = nni.capture(both, only="**/attn@softmax")(model, X)
    assert len(record["attn@softmax"].calls) == 1


@jax.jit
def shared(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2


class Calls(nnx.Module):
    """Its call is a function that is given."""

    def __init__(self, f: Any, seed: int = 0):
        self.a, self.f = nnx.Linear(D, D, rngs=nnx.Rngs(seed)), nnx.static(f)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.f(self.a(x))


@pytest.mark.parametrize("first", ["model", "twin"])
def test_a_function_that_two_models_share_is_each_ones_own(first: str) -> None:
    """jax has traced it once, and its jaxpr has the marks of whoever called it."""
    model, twin = Calls(shared), Calls(shared, 1)
    shared(model.a(X))

    def both(model: Any, x: jax.Array) -> jax.Array:
        return model(x) + twin(x) if first == "model" else twin(x) + model(x)

    grad = nni.value_and_grad(lambda m, x: both(m, x).sum(), only="**@*.sin", values=True)
    record = nnx.jit(lambda m, x: grad(m, x)[0][1])(model, X)
    entry = record["@shared.sin"]
    assert (list(record), len(entry.calls)) == (["@shared.sin"], 1)
    assert jnp.allclose(entry.values, jnp.sin(model.a(X)), atol=1e-6)
    assert entry.gradient.norm == pytest.approx(2 * X.size**0.5, rel=1e-5)
    with nni.perturb("@shared.sin", nni.Zero(), model=model):
        assert jnp.allclose(nnx.jit(both)(model, X), twin(X), atol=1e-6)


def test_equal_operations_that_xla_makes_one_are_numbered_and_each_its_own() -> None:
    model = Calls(lambda x: jnp.sin(x) + 3 * jnp.sin(x))
    assert nnx.jit(lambda m, x: m(x)).lower(model, X).compile().as_text().count("sine(") == 1
    sites = [c.site for c in nni.trace(model, X, only="@sin*").calls]
    assert sites == ["@sin", "@sin[1]"]
    run = nni.value_and_grad(lambda m, x: m(x).sum(), only=sites, values=True)
    (_, record), _ = run(model, X)
    wanted = jnp.sin(model.a(X))
    for site, slope in zip(sites, (1, 3), strict=True):
        assert jnp.allclose(record[site].values, wanted, atol=1e-6)
        assert record[site].gradient.norm == pytest.approx(slope * X.size**0.5, rel=1e-5)
    assert jnp.allclose(nni.perturbed(model)({"@sin[1]": nni.Zero()}, X), wanted, atol=1e-6)


DEAD = {
    "call": lambda x: (jnp.sin(x), jnp.cos(x))[1],
    "remat": jax.checkpoint(lambda x: (jnp.sin(x), jnp.cos(x))[1]),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.cos(c), jnp.sin(c)), x, length=1)[0],
}


@pytest.mark.parametrize("where", DEAD)
def test_an_operation_that_nothing_uses_has_its_value_and_no_gradient(where: str) -> None:
    model = Calls(DEAD[where])
    run = nni.value_and_grad(lambda m, x: m(x).sum(), only=["**", "@sin", "@cos"], values=True)
    record = nnx.jit(lambda m, x: run(m, x)[0][1])(model, X)
    assert jnp.allclose(record["@sin"].values.reshape(X.shape), jnp.sin(model.a(X)), atol=1e-6)
    assert record["@sin"].gradient is None
    assert record["@cos"].gradient is not None
    trace = nni.trace(model, X, only=["**", "@sin", "@cos"])
    assert "@sin" not in {edge.producer for edge in trace.edges}
    assert ("a", "@sin") in {(edge.producer, edge.consumer) for edge in trace.edges}
    moved = nni.perturbed(model)({"@sin": nni.Scale(2.0)}, X)
    assert jnp.array_equal(moved, nni.perturbed(model)({"@sin": nni.Scale(1.0)}, X))
    insp = nni.Inspector(model, X, only=["**", "@sin", "@cos"], display=False)
    insp.perturb("@sin", nni.Zero())
    insp.run()
    assert "the output changes by 0 of its norm" in str(insp.effect)
    insp.close()


def test_a_primitive_of_another_version_is_an_operation_like_any_other() -> None:
    later = Primitive("of_a_later_jax")
    later.def_impl(lambda x: 2 * x)
    later.def_abstract_eval(lambda x: x)
    mlir.register_lowering(later, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    model = Calls(lambda x: jnp.sin(later.bind(x)))
    _, record = nni.capture(model, only=["**", "@*"], values=True)(X)
    assert list(record) == ["a", "@of_a_later_jax", "@sin", ""]
    assert jnp.array_equal(record["@of_a_later_jax"].values, 2 * record["a"].values)
    assert jnp.allclose(record["@sin"].values, jnp.sin(2 * model.a(X)), atol=1e-6)


def test_without_an_operation_that_is_selected_an_inspector_goes_on() -> None:
    """As where another version of jax names it otherwise: the modules' own sites are shown."""
    model = Calls(jnp.sin)
    with pytest.warns(nni.InspectorWarning, match=r"'@sine' matches no site.*sites are '@sin'"):
        insp = nni.Inspector(model, X, only=["**", "@sine", "@sin"], display=False)
    with pytest.raises(ValueError, match=r"'@sine' matches no site.*closest sites are '@sin'"):
        insp.perturb("@sine", nni.Zero())
    for batch in insp.watch([X], every=1):
        nnx.jit(lambda m, x: m(x))(model, batch)
    _, found = insp.recording.series("@sin", "output")
    assert found[-1].mean == pytest.approx(float(jnp.sin(model.a(X)).mean()), abs=1e-6)
    assert insp.recording.summary("a", "output").size == X.size
    insp.close()


def test_an_operation_is_intercepted() -> None:
    def identity(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        assert (context.kind, context.path, context.site) == ("operation", "mlp", "mlp@silu")
        return args[0]

    model = Net(nnx.Rngs(0))
    with nni.intercept_methods(identity, only="mlp@silu", model=model):
        found = model(X)
    h = model.attn(X)
    assert jnp.allclose(found, X + model.mlp.gate(h) * model.mlp.up(h), atol=1e-6)


def test_an_inspector_runs_and_watches_operations() -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    insp = nni.Inspector(model, X, only=["**/attn@softmax", "mlp@silu"])
    insp.run()
    for batch in insp.watch([X, X], every=1):
        step(model, optimizer, batch)
    for site in ("attn@softmax", "mlp@silu"):
        for quantity in ("output", "gradient"):
            _, found = insp.recording.series(site, quantity)
            assert [s.size for s in found][-2:] == [found[-1].size] * 2, (site, quantity)
    layout = inside(insp).view.layout
    assert layout is not None
    rows = {row.key: row for row in layout.sites}
    insp.close()
    assert rows["attn@softmax"].name == "@softmax"
    assert rows["attn@softmax"].parent == list(rows).index("attn")
    steps = [s for s in insp.recording.passes if s.kind == "watch"]
    assert len(steps) == 2


def test_an_operation_with_its_own_derivative_may_be_replaced() -> None:
    def doubled(x: jax.Array) -> jax.Array:
        with nni.intercept_methods(lambda _, args, *rest: 2 * args[0], only="@relu", model=model):
            return model(x)

    class Positive(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.nn.relu(x)

    model = Positive()
    assert jnp.array_equal(doubled(-X), -2 * X)
    assert jnp.array_equal(jax.grad(lambda x: doubled(x).sum())(-X), jnp.full_like(X, 2))
