"""Operations shown at a click: rows, figures, places to perturb, and what refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector import panels
from nnx_inspector.inspector.passes import operations
from nnx_inspector.screen import protocol
from nnx_inspector.screen.python_text import text_of
from tests.helpers.compilations import Compilations


class Gate(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return x * nnx.softmax(self.inner(x))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.gates = nnx.List([Gate(rngs=rngs), Gate(rngs=rngs)])
        self.head = nnx.Sequential(nnx.Linear(3, 2, rngs=rngs))

    def __call__(self, x):
        for gate in self.gates:
            x = gate(x)
        return self.head(x)


X = jnp.linspace(-1, 1, 12).reshape(4, 3)


def rows(insp):
    return [key for key in inside(insp).view.keys if "@" in key]


@pytest.fixture(scope="module")
def made():
    one = nni.Inspector(Model(), X, display=False)
    yield one
    one.close()


@pytest.fixture
def insp(made):
    yield made
    for handle in made.perturbations:
        handle.remove()
    for site in ("gates/0", "gates/1"):
        if any(row.startswith(site) for row in rows(made)):
            made.show_operations(site, shown=False)


def test_operations_are_rows_below_their_call_with_exact_figures(insp):
    insp.run()
    insp.show_operations("gates/1")
    assert rows(insp) == ["gates/1@softmax", "gates/1@mul"]
    layout = inside(insp).view.layout
    parents = {s.key: layout.sites[s.parent].key for s in layout.sites if "@" in s.key}
    assert set(parents.values()) == {"gates/1"}
    model = inside(insp).core.model
    x = model.gates[0](X)
    want = jax.nn.softmax(model.gates[1].inner(x))
    assert insp.recording.summary("gates/1@softmax").mean == pytest.approx(float(want.mean()), 1e-6)
    np.testing.assert_allclose(insp.values("gates/1@softmax"), want, rtol=1e-6)

    with_sites = insp.recording.sites
    insp.show_operations("gates/1", shown=False)
    assert rows(insp) == []
    insp.run()
    assert insp.recording.sites == with_sites  # what was recorded stays


def test_what_has_a_name_is_listed_before_the_primitives_that_run_before_it(inspect):
    class Turned(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            turned = jnp.cos(x) * jax.jit(lambda y: y + 1)(x)
            return self.inner(nnx.softmax(turned @ x.T) @ x)

    insp = inspect(Turned(), X)
    insp.show_operations("")
    assert inside(insp).view.keys[:5] == ("", "@lambda", "@softmax", "@attention", "inner")
    assert rows(insp)[3:5] == ["@cos", "@mul"]


def test_hiding_and_showing_again_compiles_nothing(insp):
    insp.run()
    insp.show_operations("gates/0")
    insp.show_operations("gates/0", shown=False)
    with Compilations() as compiled:
        insp.show_operations("gates/0")
        insp.show_operations("gates/0", shown=False)
    assert "compile" not in compiled.kinds


def test_an_operation_is_perturbed_and_then_not_hidden(insp):
    clean = insp.run()
    insp.show_operations("gates/0")
    insp.show_operations("gates/0")  # twice is once
    handle = insp.perturb("gates/0@softmax", nni.Zero())
    assert not np.allclose(insp.run(), clean)
    with pytest.raises(InspectorError, match=r"'gates/0@softmax' is perturbed\. Remove its"):
        insp.show_operations("gates/0", shown=False)
    handle.remove()
    insp.show_operations("gates/0", shown=False)
    np.testing.assert_array_equal(insp.run(), clean)


def test_an_operation_that_is_not_shown_is_shown_once_it_is_perturbed(insp):
    model, gate = insp.model, insp.model.gates[0]
    handle = insp.perturb("gates/0@softmax", nni.Scale(0.5))
    assert rows(insp) == ["gates/0@softmax"]
    h = X * (0.5 * jax.nn.softmax(gate.inner(X)))
    np.testing.assert_allclose(insp.run(), model.head(model.gates[1](h)), rtol=1e-6)
    handle.remove()
    for wrong in ("gates/0@tanh", "gates/7@softmax", "head@"):
        with pytest.raises(ValueError, match="matches no site"):
            insp.perturb(wrong, nni.Zero())
    assert rows(insp) == ["gates/0@softmax"]
    for _ in insp.watch(range(1)):
        with pytest.raises(InspectorError, match="A loop is being watched"):
            insp.perturb("gates/1@softmax", nni.Zero())


def test_the_next_loop_measures_them(inspect):
    insp = inspect(Model(), X)
    step = nnx.jit(lambda model, x: model(x).sum())
    insp.show_operations("gates/0")
    for x in insp.watch([X, X], every=1):
        step(inside(insp).core.model, x)
        with pytest.raises(InspectorError, match="A loop is being watched"):
            insp.show_operations("gates/1")
    assert insp.recording.summary("gates/0@mul").size == 12


def test_after_a_loop_they_are_measured_without_another_pass_being_asked_for(inspect):
    insp = inspect(Model(), X)
    step = nnx.jit(lambda model, x: model(x).sum())
    for x in insp.watch([X, X], every=1):
        step(inside(insp).core.model, x)
    insp.show_operations("gates/0")
    inside(insp).rerun.wait()
    assert insp.recording.steps == [0, 1, 1]
    assert insp.recording.passes[-1].summary("gates/0@mul").size == 12


def test_the_units_of_a_pattern_are_its_heads_queries_and_keys(inspect):
    model = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    insp = inspect(model, jnp.ones((3, 5, 4)), only=["**", "@attention"])
    asked = protocol.Look(id=1, what="units", site="@attention")
    message, _ = panels.answer_look(inside(insp).core, asked)
    assert message.axes == ("batch (3)", "head (2)", "query (5)", "key (5)")


def test_what_cannot_be_shown_is_refused_and_nothing_changes(inspect, monkeypatch):
    insp = inspect(Model(), X, only=["**", "gates/0@mul"])
    before = rows(insp)
    for site, error, text in (
        ("gate/0", ValueError, "closest sites are 'gates/0'"),
        ("head", ValueError, "No operation is seen within 'head'"),
        ("gates/0@mul", ValueError, "No operation is seen within 'gates/0@mul'"),
    ):
        with pytest.raises(error, match=text):
            insp.show_operations(site)
    with pytest.raises(ValueError, match=r"made with only=\['\*\*', 'gates/0@mul'\]"):
        insp.show_operations("gates/0", shown=False)
    monkeypatch.setattr(operations, "MOST_OPERATIONS", 1)
    with pytest.raises(ValueError, match="has 2 operations, and 1 are shown at most"):
        insp.show_operations("gates/1")
    assert rows(insp) == before


def test_the_layers_of_a_stack_have_their_own(inspect):
    class Stack(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: Gate(rngs=nnx.Rngs(key)), in_axes=0)
            self.layers = make(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    insp = inspect(Stack(), X)
    insp.run()
    insp.show_operations("layers[1]")
    assert {"layers@softmax", "layers[0]@softmax", "layers[2]@mul"} <= set(rows(insp))


def test_a_function_has_operations_too(insp):
    insp.run()
    insp.show_operations("gates/0")
    insp.show_operations("gates/0@softmax")
    layout = inside(insp).view.layout
    above = {s.key: layout.sites[s.parent].key for s in layout.sites if "@" in s.key}
    assert above.pop("gates/0@softmax") == above.pop("gates/0@mul") == "gates/0"
    assert {*above.values()} == {"gates/0@softmax"}
    assert {s.key: s.kind for s in layout.sites}["gates/0@softmax"] == "named value"
    assert {s.key: s.name for s in layout.sites}["gates/0@softmax.exp"] == ".exp"
    assert insp.recording.summary("gates/0@softmax.exp").max == 1
    insp.show_operations("gates/0", shown=False)
    assert rows(insp) == []


def test_a_click_says_what_to_write():
    message = protocol.ShowOperations(id=1, site="gates/1", shown=False)
    assert text_of(message, []) == 'insp.show_operations("gates/1", shown=False)'
