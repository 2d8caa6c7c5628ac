"""A model whose arrays were donated: one clear error everywhere, and `insp.update`."""

# pyright: reportOptionalSubscript=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers

import nnx_inspector as nni

X = jnp.ones((2, 3))
WAY_OUT = r"cannot be read now.*donates.*insp\.update\(state\).*nnx\.update\(model, state\)"


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@pytest.fixture(scope="module")
def donated():
    """An inspector whose model's arrays were donated, and the state that the step returned."""
    model = TwoLayers(nnx.Rngs(0))
    inspector = nni.Inspector(model, X, display=False)
    inside(inspector).rerun.wait_for_first()
    step = jax.jit(lambda state: jax.tree.map(lambda p: 2 * p, state), donate_argnums=0)
    yield inspector, step(nnx.state(model))
    inspector.close()


READERS = {
    "run": lambda insp: insp.run(X),
    "run the last again": lambda insp: insp.run(),
    "step": lambda insp: insp.step(loss_fn, X),
    "parameters": lambda insp: insp.parameters("a"),
    "units": lambda insp: insp.units("a"),
    "values": lambda insp: insp.values("a"),
    "values of parameters": lambda insp: insp.values("a", part="parameter"),
    "sweep": lambda insp: insp.sweep("a", progress=False),
    "a new inspector": lambda insp: nni.Inspector(insp.model, X, display=False),
}
TELLERS = {
    "findings": lambda insp: insp.findings,
    "to_html": lambda insp: insp.to_html("run.html"),
    "save": lambda insp: insp.save("run.nni"),
    "perturb": lambda insp: insp.perturb("a", nni.Zero()).remove(),
    "watch": lambda insp: insp.watch([]).close(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_a_donated_model_says_what_to_do(donated, read):
    with pytest.raises(nni.InspectorError, match=WAY_OUT):
        read(donated[0])


@pytest.mark.parametrize("tell", TELLERS.values(), ids=TELLERS)
def test_what_needs_no_model_goes_on(donated, tell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tell(donated[0])


def test_a_pass_that_nobody_asked_for_tells_it_on_screen(donated):
    insp, _ = donated
    insp.perturb("a", nni.Zero()).remove()
    assert any("insp.update(state)" in notice for notice in inside(insp).notices)


def twice(x):
    """TwoLayers with all its parameters doubled, in float64."""
    model = TwoLayers(nnx.Rngs(0))
    w1, b1, w2, b2 = (
        2 * np.asarray(v[...], np.float64)
        for v in (model.a.kernel, model.a.bias, model.b.kernel, model.b.bias)
    )
    return np.tanh(np.asarray(x, np.float64) @ w1 + b1) @ w2 + b2


def test_a_state_is_read_from_then_on_and_nothing_of_the_users_changes(donated):
    insp, state = donated
    before = dict(nnx.to_flat_state(nnx.state(insp.model)))
    graphdef = nnx.graphdef(insp.model)
    insp.update(state)
    np.testing.assert_allclose(insp.run(X), twice(X), rtol=1e-5)
    np.testing.assert_allclose(insp.values("b"), twice(X), rtol=1e-5)
    kernel = state["a"]["kernel"][...]
    np.testing.assert_array_equal(insp.values("a", part="parameter")["kernel"], kernel)
    assert np.isclose(insp.parameters("a")["a/kernel"].norm, np.linalg.norm(kernel), rtol=1e-5)
    assert np.isclose(float(insp.step(loss_fn, X)), (twice(X) ** 2).mean(), rtol=1e-5)
    assert len(insp.sweep("a", progress=False)) == 1
    after = dict(nnx.to_flat_state(nnx.state(insp.model)))
    assert all(after[path] is one for path, one in before.items())
    assert all(one.get_raw_value().is_deleted() for one in before.values())
    assert nnx.graphdef(insp.model) == graphdef


def test_a_loop_goes_on_watching_the_model_that_was_given(inspect):
    model = TwoLayers(nnx.Rngs(0))
    insp = inspect(model, X)
    insp.update(nnx.state(nnx.clone(model), nnx.Param))
    for x in insp.watch([X], every=1):
        model(x)
    assert insp.recording.passes[-1].kind == "watch"


def test_another_model_takes_the_place_of_the_one_that_was_given(inspect):
    model, other = TwoLayers(nnx.Rngs(0)), TwoLayers(nnx.Rngs(1))
    insp = inspect(model, X)
    insp.update(other)
    assert insp.model is other
    np.testing.assert_allclose(insp.run(X), other(X), rtol=1e-5)
    for i, x in enumerate(insp.watch([X, X], every=1)):
        other(x)
        if i == 0:
            with pytest.raises(nni.InspectorError, match="already watches a loop"):
                insp.update(model)
    assert [p.kind for p in insp.recording.passes][-2:] == ["watch"] * 2


def test_what_does_not_fit_is_refused_with_where(inspect):
    model = TwoLayers(nnx.Rngs(0))
    insp = inspect(model, X)
    other = TwoLayers(nnx.Rngs(0))
    other.a = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    for wrong in (other, nnx.state(other)):
        with pytest.raises(ValueError, match=r"'a/bias' is float32\[4\].*float32\[5\].*nni\.Insp"):
            insp.update(wrong)
    with pytest.raises(ValueError, match=r"'\(root\)' is TwoLayers .* and Linear in the one"):
        insp.update(other.a)
    both = nnx.state((model, other))
    with pytest.raises(ValueError, match=r"no Variable '0/a/bias'; .*that is state\[0\]"):
        insp.update(both)
    with pytest.raises(TypeError, match="got int"):
        insp.update(3)
    with pytest.raises(TypeError, match=r"insp\.update\(nnx\.state\(model\)\)"):
        insp.update()
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    with pytest.raises(nni.InspectorError, match=r"arrays \('b/bias' and 1 more\), because"):
        insp.update({"a": nnx.to_pure_dict(nnx.state(TwoLayers(nnx.Rngs(0))))["a"]})
    insp.update(*nnx.split(TwoLayers(nnx.Rngs(0))))
    assert insp.run(X).shape == (2, 2)


def test_a_donated_batch_is_told_apart_from_a_donated_model(inspect):
    x = jnp.ones((2, 3))
    insp = inspect(TwoLayers(nnx.Rngs(0)), x)
    x.delete()
    with pytest.raises(nni.InspectorError, match=r"arguments were donated.*insp\.run\(x\)"):
        insp.run()
    assert insp.run(X).shape == (2, 2)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([TwoLayers(rngs) for _ in range(2)])

    def __call__(self, x):
        return sum(block(x) for block in self.blocks)


def texts(tree):
    """A checkpoint whose format knows no keys but texts."""
    if not isinstance(tree, dict):
        return np.asarray(tree)
    return {str(key): texts(value) for key, value in tree.items()}


@pytest.mark.parametrize("as_texts", [True, False])
def test_a_restored_checkpoint_may_have_texts_for_numbers(inspect, as_texts):
    model, trained = Listed(nnx.Rngs(0)), Listed(nnx.Rngs(1))
    saved = nnx.to_pure_dict(nnx.state(trained))
    saved = texts(saved) if as_texts else saved
    insp = inspect(model, X)
    insp.update(saved)
    np.testing.assert_allclose(insp.run(X), trained(X), rtol=1e-6)
    kernel = np.asarray(trained.blocks[1].a.kernel[...])
    np.testing.assert_allclose(
        insp.parameters("blocks/1/a")["blocks/1/a/kernel"].mean, kernel.mean(), rtol=1e-5
    )
    assert (nni.compare_weights(saved, trained).distance == 0).all()
    with pytest.raises(ValueError, match="no Variable 'blocks/2/a"):
        insp.update({"blocks": {"2": saved["blocks"]["1" if as_texts else 1]}})
