"""Each array that a call returns has statistics of its own: in records, loops and files."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.recordings.tree_rows import layer_key, layer_of, leaf_key, leaf_of
from nnx_inspector.screen.comparison import recording_of

X = jax.random.normal(jax.random.key(0), (8, 4))


class Net(nnx.Module):
    """A module whose output `shape_of` makes of its layer's output."""

    def __init__(self, shape_of):
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.shape_of = nnx.static(shape_of)

    def __call__(self, x):
        return self.shape_of(self.linear(x))


class Scores(NamedTuple):
    loss: jax.Array
    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Strict:
    """A pytree that cannot be made of anything but arrays."""

    logits: jax.Array
    ids: jax.Array

    def __post_init__(self):
        assert hasattr(self.logits, "shape"), self.logits


KINDS = {
    "the case": lambda y: (y, y.argmax(-1), y > 0, jnp.full((), 1e6)),
    "dict": lambda y: {"logits": y, "aux": y.sum(), "deep": {"ids": y.argmax(-1)}},
    "namedtuple": lambda y: Scores((y**2).mean(), y),
    "dataclass": lambda y: Strict(y, y.argmax(-1)),
    "auxiliary loss": lambda y: (y, (y**2).mean()),
}
EXPECTED = {
    "the case": ["(1)", "(2)", "(3)"],
    "dict": ["(aux)", "(deep.ids)"],
    "namedtuple": ["(loss)"],
    "dataclass": ["(ids)"],
    "auxiliary loss": ["(1)"],
}


def check(summary, array):
    """A summary against NumPy in float64."""
    values = np.asarray(array, np.float64)
    assert summary.size == values.size
    np.testing.assert_allclose(summary.mean, values.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(summary.std, values.std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose([summary.min, summary.max], [values.min(), values.max()], rtol=1e-4)
    assert summary.zeros == (values == 0).sum()


def arrays_of(output):
    """The arrays of an output by their keys, the main one under ""."""
    flat = jax.tree_util.tree_flatten_with_path(output)[0]
    named = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in flat}
    main = next(n for n in ("logits", "0") if n in named)
    return {leaf_key("", "" if name == main else name): x for name, x in named.items()}


def loss_of(output):
    return sum((x**2).mean() for x in jax.tree.leaves(output) if x.dtype == jnp.float32)


def trained(model, insp, x=X, steps=2):
    assert insp.recording.passes  # the pass of the example
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: loss_of(model(x)))(model)
        optimizer.update(model, grads)

    for _ in insp.watch(range(steps)):
        step(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_unlike_kind_have_rows_of_their_own_however_a_pass_is_made(kind, tmp_path):
    model = Net(KINDS[kind])
    insp = nni.Inspector(model, X, display=False)
    expected = arrays_of(model(X))
    insp.save(tmp_path / "run.nni")
    insp.step(lambda model: loss_of(model(X)))
    output = model(X)
    trained(model, insp, steps=1)
    insp.close()
    assert [key for key in expected if key] == EXPECTED[kind]
    loaded = nni.load(tmp_path / "run.nni")
    assert [p.kind for p in loaded.passes] == ["run", "step", "watch"]
    for one in loaded.passes:
        for key, array in expected.items():
            check(one.summary(key), array)
            if one.kind == "run" or array.dtype != jnp.float32:
                assert one.summary(key, "gradient") is None
    # of each array the gradient is its own; a watched loop computes none for a constant
    gradients = jax.grad(lambda output: loss_of(output), allow_int=True)(output)
    of_arrays = arrays_of(jax.tree.map(lambda x: x if x.dtype == jnp.float32 else None, gradients))
    for one in loaded.passes[1:]:
        for key, array in of_arrays.items():
            if (found := one.summary(key, "gradient")) is not None or key != "(3)":
                check(found, array)
    frame = loaded.to_frame()
    rows = frame[(frame["pass"] == 0) & (frame.quantity == "output")]
    assert sorted(rows.site) == sorted(["linear", *expected])
    assert rows.set_index("site")["max"][""] == pytest.approx(float(expected[""].max()))


def test_the_state_of_a_cell_and_its_output_are_not_counted_twice():
    class Recurrent(nnx.Module):
        def __init__(self):
            self.lstm = nnx.LSTMCell(4, 5, rngs=nnx.Rngs(0))
            self.gru = nnx.GRUCell(5, 3, rngs=nnx.Rngs(1))

        def __call__(self, x):
            carry = jnp.zeros((8, 5)), jnp.zeros((8, 5))
            state = jnp.zeros((8, 3))
            for _ in range(2):
                carry, y = self.lstm(carry, x)
                state, z = self.gru(state, y)
            return z

    @nnx.jit
    def by_hand(model):
        lstm, gru, state = [], [], jnp.zeros((8, 3))
        carry = jnp.zeros((8, 5)), jnp.zeros((8, 5))
        for _ in range(2):
            carry, y = model.lstm(carry, X)
            state, z = model.gru(state, y)
            lstm.append(carry)
            gru.append(z)
        return lstm, gru

    model = Recurrent()
    lstm, gru = by_hand(model)
    insp = nni.Inspector(model, X, display=False)
    trained(model, insp, steps=1)
    insp.close()
    for one in insp.recording.passes:
        check(one.summary("lstm"), np.concatenate([h for _, h in lstm]))
        check(one.summary("lstm(0.0)"), np.concatenate([c for c, _ in lstm]))
        check(one.summary("gru"), np.concatenate(gru))
        assert [s for s, q in one.keys if s.startswith(("lstm(", "gru(")) and q == "output"] == [
            "lstm(0.0)"
        ]
    # h goes on in two ways: its gradient is that of both
    _, record = nni.value_and_grad(lambda m: loss_of(m(X)))(model)[0]
    assert record["lstm"].output[0][1].size == record["lstm"].output[1].size == 80

    @jax.jit
    @jax.grad
    def of_rest(h):
        state, _ = model.gru(jnp.zeros((8, 3)), h)
        _, y = model.lstm((lstm[0][0], h), X)
        return loss_of(model.gru(state, y)[1])

    check(record["lstm"].calls[0].gradient[1], of_rest(lstm[0][1]))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        return y, {"ids": y.argmax(-1), "norm": jnp.sqrt((y**2).sum(-1))}


class Stacked(nnx.Module):
    def __init__(self):
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def run(x, block):
            return block(x)

        return run(x, self.blocks)[0]


def test_a_scan_whose_body_returns_a_carry_and_an_output_and_its_layers():
    model = Stacked()
    insp = nni.Inspector(model, X, display=False)
    trained(model, insp, steps=1)
    weights, biases = model.blocks.linear.kernel[...], model.blocks.linear.bias[...]
    insp.close()
    own = nni.capture(model)(X)[1]
    y = np.asarray(X, np.float64)
    for layer in range(3):
        y = y @ np.asarray(weights[layer], np.float64) + np.asarray(biases[layer], np.float64)
        check(own["blocks"].row(layer).output[1]["ids"], y.argmax(-1))
    *_, run, watch = insp.recording.passes
    for one in (run, watch):
        keys = {key for key, quantity in one.keys if quantity == "output"}
        assert {"blocks", "blocks(1.ids)", "blocks(1.norm)", "blocks[2](1.norm)"} <= keys
        parts = [one.summary(f"blocks[{i}](1.norm)") for i in range(3)]
        whole = one.summary("blocks(1.norm)")
        assert sum(p.size for p in parts) == whole.size == 24
        np.testing.assert_allclose(np.mean([p.mean for p in parts]), whole.mean, rtol=1e-5)
    assert layer_of("blocks[2](1.norm)") == ("blocks(1.norm)", 2)


def test_layers_that_a_loop_cannot_tell_apart_say_so_array_by_array():
    model = Stacked()
    insp = nni.Inspector(model, X, display=False)
    run = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    step = nnx.jit(lambda model: run(X, model.blocks))
    for _ in insp.watch(range(1), every=1):
        ids = step(model)[1]["ids"]
    one = insp.recording.passes[-1]
    check(one.summary("blocks(1.ids)"), ids)
    assert one.summary("blocks[0](1.ids)") is one.summary("blocks[0]") is None
    rows = {row.key: row for row in inside(insp).view.layout.sites}
    assert rows["blocks[0](1.ids)"].unseen == rows["blocks[0]"].unseen != ""
    assert rows["blocks(1.ids)"].unseen == rows["blocks"].unseen == ""
    insp.close()


def test_the_members_of_an_ensemble_have_each_array_of_theirs():
    def every(members, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(members, x)

    members = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))
    insp = nni.Inspector(every, members, X, display=False)
    assert insp.recording.passes
    step = nnx.jit(every)
    for _ in insp.watch(range(1), every=1):
        y, others = step(members, X)
    for one in insp.recording.passes:
        for i in range(3):
            check(one.summary(f"[{i}]"), y[i])
            check(one.summary(f"[{i}](1.ids)"), others["ids"][i])
        check(one.summary("(1.norm)"), others["norm"])
    insp.close()


def test_calls_of_unlike_structure_are_merged_by_name():
    class Sometimes(nnx.Module):
        def __call__(self, x, more):
            return (x, x[:, 0].astype(jnp.int32)) if more else x

    class Twice(nnx.Module):
        def __init__(self):
            self.sometimes = Sometimes()

        def __call__(self, x):
            return self.sometimes(self.sometimes(x, False) + 1, True)[0]

    record = nni.capture(Twice())(X)[1]
    merged = record.merged()
    check(merged["sometimes"]["output"], np.concatenate([X, X + 1]))
    check(merged["sometimes(1)"]["output"], (X[:, 0] + 1).astype(jnp.int32))
    check(merged["sometimes"]["input"], np.concatenate([X, X + 1]))


def test_inputs_are_named_by_parameter():
    class Attends(nnx.Module):
        def __call__(self, query, mask=None, *, scale):
            return jnp.where(mask, query, 0.0) * scale

    record = nni.capture(Attends())(X, X > 0, scale=jnp.float32(3.0))[1]
    merged = record.merged()
    assert list(merged) == ["", "(mask)", "(scale)"]
    check(merged[""]["input"], X)
    check(merged["(mask)"]["input"], X > 0)
    check(merged["(scale)"]["input"], 3.0)


def test_a_module_that_returns_one_array_has_the_keys_that_it_had():
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.relu)
    insp = nni.Inspector(model, X, display=False)
    (one,) = insp.recording.passes
    insp.close()
    assert set(one.of_sites.keys) == {("layers/0", "output"), ("", "output")}
    assert all(not row.array and not row.single for row in inside(insp).view.layout.sites)


def test_the_keys_of_arrays_cannot_be_those_of_modules():
    for site in ("", "blocks/0", "a\\(b\\)", "attn@softmax", "x:encode"):
        for leaf in ("0.1", "a(b)", "c/d[3]@e\\", ")("):
            assert leaf_of(leaf_key(site, leaf)) == (site, leaf)
            key = layer_key(leaf_key(site, leaf), 3)
            assert leaf_of(key) == (layer_key(site, 3), leaf)
            assert layer_of(key) == (leaf_key(site, leaf), 3)
    model = nnx.Dict({"a(b)": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    keys = list(nni.capture(lambda m: m["a(b)"](jnp.ones((1, 2))))(model)[1])
    assert keys == ["a\\(b\\)"]
    assert leaf_of(keys[0]) == (keys[0], "")


def test_a_finding_names_the_array_and_counts_its_values():
    def with_nan(y):
        return y, {"ids": y.argmax(-1), "scale": jnp.log(y * 0 - 1)[0]}

    model = Net(with_nan)
    insp = nni.Inspector(model, X, display=False)
    found = [one for one in nni.diagnose(insp.recording) if one.rule == "nonfinite"]
    insp.close()
    assert [one.site for one in found] == ["(1.scale)"]
    assert "the output '1.scale' of the model first held 3 NaN among 3 values" in found[0].what


def test_a_nan_in_one_of_several_inputs_is_not_blamed_on_the_call():
    class Scaled(nnx.Module):
        def __call__(self, x, scale):
            return x * scale, x

    _, record = nni.capture(Scaled())(X, jnp.array([1, jnp.nan, 1, 1]))
    recording = recording_of(record.merged())
    (found,) = [one for one in nni.diagnose(recording) if one.rule == "nonfinite"]
    assert found.site == "(scale)"
    assert "the input 'scale' of the model first held 1 NaN among 4 values" in found.what


def test_large_classes_and_a_large_scalar_are_no_fault_of_the_logits():
    model = Net(KINDS["the case"])
    insp = nni.Inspector(model, X, display=False)
    trained(model, insp, steps=3)
    insp.close()
    assert [one for one in nni.diagnose(insp.recording) if one.severity != "info"] == []
