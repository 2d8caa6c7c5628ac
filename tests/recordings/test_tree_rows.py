"""Layers of stacked modules as separate sites: in the inspector's passes and in a user's loop each
has the figures of a model by hand, and together they give the stack's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.recordings.tree_rows import (
    LAYERS_UNKNOWN,
    MOST_LAYER_ROWS,
    Stack,
    layer_key,
    layer_of,
)
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import merge

N, D = 5, 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, D)), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.drop(self.linear(x)))


class Deep(nnx.Module):
    def __init__(self, rngs, *, reverse=False, remat=False):
        @nnx.split_rngs(splits=N)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks, self.reverse, self.remat = make(rngs), reverse, remat

    def __call__(self, x):
        def body(x, block):
            return block(x)

        body = nnx.remat(body) if self.remat else body
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, reverse=self.reverse)
        return scan(x, self.blocks)


def loss_fn(model, x):
    return (model(x) ** 2).sum()


def by_hand(model):
    """Each layer's output and its gradient, in float64, by the layer's number."""
    kernel = np.asarray(model.blocks.linear.kernel[...], np.float64)
    bias = np.asarray(model.blocks.linear.bias[...], np.float64)
    order = list(range(N))[:: -1 if model.reverse else 1]
    x, outputs, inner = np.asarray(X, np.float64), {}, {}
    for i in order:
        inner[i] = x @ kernel[i] + bias[i]
        x = outputs[i] = np.tanh(inner[i])
    gradient, gradients, of_inner = 2 * x, {}, {}
    for i in reversed(order):
        gradients[i] = gradient
        of_inner[i] = gradient * (1 - outputs[i] ** 2)
        gradient = of_inner[i] @ kernel[i].T
    return {"blocks": (outputs, gradients), "blocks/linear": (inner, of_inner)}


def check_layers(recording, model, *, index=-1, gradients=True):
    for site, (outputs, cotangents) in by_hand(model).items():
        for quantity, expected in (("output", outputs), ("gradient", cotangents)):
            if quantity == "gradient" and not gradients:
                assert recording.summary(site, quantity, index=index) is None
                continue
            found = [recording.summary(layer_key(site, i), quantity, index=index) for i in range(N)]
            for i, summary in enumerate(found):
                x = expected[i]
                figures = [summary.size, summary.mean, summary.std, summary.min, summary.norm]
                by_numpy = [x.size, x.mean(), x.std(), x.min(), np.linalg.norm(x)]
                np.testing.assert_allclose(figures, by_numpy, rtol=2e-5, atol=1e-7)
            check_total(recording.summary(site, quantity, index=index), found)


def check_total(whole, parts):
    together = merge(parts)
    np.testing.assert_array_equal(together.bins, whole.bins)
    np.testing.assert_allclose(
        [together.mean, together.std, together.norm], [whole.mean, whole.std, whole.norm], rtol=1e-6
    )
    assert (together.min, together.max) == (whole.min, whole.max)


@pytest.mark.parametrize(
    ("reverse", "remat"), [pytest.param(False, False, marks=pytest.mark.long), (True, True)]
)
def test_each_layer_has_its_own_figures_in_our_passes_and_in_a_loop(reverse, remat):
    model = Deep(nnx.Rngs(0), reverse=reverse, remat=remat)
    insp = nni.Inspector(model, X, display=False)
    recording = insp.recording
    check_layers(recording, model, gradients=False)
    insp.step(loss_fn, X)
    check_layers(recording, model)
    grad = nnx.jit(nnx.value_and_grad(loss_fn))
    for _ in insp.watch(range(2), every=1):
        grad(model, X)
    for index in (-1, -2):
        check_layers(recording, model, index=index)
    with insp.watch(every=1):
        grad(model, X)
    check_layers(recording, model)
    (_, record), _ = nni.value_and_grad(loss_fn)(model, X)
    insp.push(record, step=9)
    check_layers(recording, model)
    assert not any(site.unseen for site in inside(insp).view.layout.sites)
    insp.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_region_without_an_example_learns_the_layers_from_the_first_pass(reverse):
    model = Deep(nnx.Rngs(0), reverse=reverse)
    grad = nnx.jit(nnx.value_and_grad(loss_fn))
    with nni.watch(model, every=1) as recording:
        for _ in range(3):
            grad(model, X)
    assert len(recording) == 3
    for index in range(3):
        check_layers(recording, model, index=index)


def test_steps_of_time_are_no_layers_of_a_region():
    rnn = nnx.RNN(nnx.SimpleCell(D, D, rngs=nnx.Rngs(0)))
    with nni.watch(rnn, every=1) as recording:
        nnx.jit(lambda model, x: model(x))(rnn, jnp.ones((2, 7, D)))
    assert not any(layer_of(site) for site in recording.sites)


def test_the_tree_has_the_layers_below_the_stack_and_its_parts_below_each():
    insp = nni.Inspector(Deep(nnx.Rngs(0)), X, display=False)
    sites = inside(insp).view.layout.sites
    at = {site.key: site for site in sites}
    assert [s.key for s in sites[:4]] == ["", "blocks", "blocks/linear", "blocks/drop"]
    for i in range(N):
        row = at[f"blocks[{i}]"]
        assert (row.name, sites[row.parent].key, row.depth, row.layer) == (f"[{i}]", "blocks", 2, i)
        assert row.parameters == at["blocks"].parameters // N == D * D + D
        inner = at[f"blocks/linear[{i}]"]
        assert (inner.name, sites[inner.parent].key, inner.depth) == ("linear", row.key, 3)
        assert inner.perturbable
        assert f"blocks/drop[{i}]" in at
    assert all(site.parent < n for n, site in enumerate(sites))
    insp.close()


def test_a_layer_can_be_selected_and_perturbed_by_its_key():
    insp = nni.Inspector(Deep(nnx.Rngs(0)), X, display=False)
    insp.selected = "blocks[3]"
    handle = insp.perturb("blocks[3]", nni.Zero())
    insp.run(X)
    norms = [insp.recording.summary(f"blocks[{i}]").norm for i in range(N)]
    assert norms[3] == 0, "and what follows is the bias of the next layer, which is zero"
    assert [norm == 0 for norm in norms[:3]] == [False] * 3
    (shown,) = inside(insp).state.perturbations
    assert (shown.site, shown.sites) == ("blocks[3]", ("blocks[3]",))
    handle.remove()
    insp.close()


def test_a_frame_of_the_recording_counts_nothing_twice():
    insp = nni.Inspector(Deep(nnx.Rngs(0)), X, display=False)
    frame, whole = insp.recording.to_frame(), insp.recording.to_frame(layers=True)
    frame, whole = (one[one["quantity"] == "output"] for one in (frame, whole))
    assert set(frame["site"]) == {"", "blocks", "blocks/linear", "blocks/drop"}
    layers = whole[~whole["site"].isin(frame["site"])]
    assert len(layers) == 3 * N
    for site in ("blocks", "blocks/linear"):
        parts = layers[layers["site"].str.startswith(f"{site}[")]
        assert parts["size"].sum() == frame.set_index("site").loc[site, "size"]
    insp.close()


def test_layers_that_cannot_be_told_apart_in_a_loop_say_so():
    """The user's step calls the layers itself: each call is a pass, and nothing counts them."""
    model = Deep(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    insp.run()

    @nnx.jit
    def layer_by_layer(model, x):
        return nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, model.blocks
        )

    for _ in insp.watch(range(1), every=1):
        layer_by_layer(model, X)
    size = insp.recording.summary("blocks").size
    assert size == N * X.size, "the whole stack's figures are there"
    assert insp.recording.summary("blocks[0]") is None
    rows = {site.key: site for site in inside(insp).view.layout.sites}
    assert rows["blocks[0]"].unseen == LAYERS_UNKNOWN
    assert rows["blocks"].unseen == ""
    number = inside(insp).view.layouts
    for _ in insp.watch(range(3), every=1):
        layer_by_layer(model, X)
    assert inside(insp).view.layouts == number, "said once, not with every step"
    insp.close()


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.deep = Deep(rngs)

    def __call__(self, x):
        return self.deep(self.deep(x))


def test_a_stack_that_is_called_twice_has_both_calls_in_each_layer():
    model = Twice(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    found = [insp.recording.summary(f"deep/blocks[{i}]") for i in range(N)]
    assert [s.size for s in found] == [2 * X.size] * N
    check_total(insp.recording.summary("deep/blocks"), found)
    insp.close()


class Ensemble(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=N)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(D, D, rngs=rngs)

        self.members = make(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x)


def test_members_of_an_ensemble_have_rows_of_their_own():
    insp = nni.Inspector(Ensemble(nnx.Rngs(0)), X, display=False)
    rows = {site.key: site for site in inside(insp).view.layout.sites}
    assert rows["members"].stacked == N
    assert [key for key in rows if "[" in key] == [f"members[{i}]" for i in range(N)]
    insp.close()


def test_a_step_of_a_recurrent_cell_is_no_layer():
    rnn = nnx.RNN(nnx.SimpleCell(D, D, rngs=nnx.Rngs(0)))
    assert stacks_of(nni.trace(rnn, jnp.ones((2, 7, D)))) == {}


def test_rows_are_bounded_and_what_is_left_out_is_said():
    assert layers_with_rows({"a": 300, "a/b": 300}) == {"a": 256, "a/b": 256}
    many = {f"a/{i}": 96 for i in range(100)}
    assert 0 < sum(layers_with_rows(many).values()) <= MOST_LAYER_ROWS
    assert set(layers_with_rows(many).values()) == {16}
    assert layers_with_rows({str(i): 2 for i in range(MOST_LAYER_ROWS + 1)}) == {}


def test_rows_are_layers_only_where_there_is_one_for_each():
    stack = Stack(2, 3)
    assert stack.has_rows_in((3,))
    assert stack.has_rows_in((3, 7)), "a scan within the layers, or examples"
    for rows in ((), (2,), (7, 3)):
        assert not stack.has_rows_in(rows)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("blocks[3]", ("blocks", 3)),
        ("a/b[12]", ("a/b", 12)),
        ("encoder:encode[0]", ("encoder:encode", 0)),
        ("blocks", None),
        ("a\\[3]", None),
        ("a\\[3][4]", ("a\\[3]", 4)),
        ("a\\\\[3]", ("a\\\\", 3)),
        ("[3]", ("", 3)),
    ],
)
def test_the_key_of_a_layer_is_read_back(key, expected):
    assert layer_of(key) == expected


def test_a_recording_of_a_deep_stack_stays_within_its_bounds():
    recording = nni.Recording(max_bytes=2**20)
    values = jax.random.normal(jax.random.key(0), (96, 400))
    layers = {layer_key("blocks", i): {"output": summarize(values[i])} for i in range(len(values))}
    whole = {"blocks": {"output": summarize(values)}}
    for step in range(60):
        recording.append(step, {**whole, **layers})
    assert recording.nbytes <= recording.max_bytes
    assert recording.thinned > 0
    assert recording.steps[0] == 0
    assert recording.steps[-1] == 59
