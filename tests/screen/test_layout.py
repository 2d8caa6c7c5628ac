"""The rows of the arrays that a call returns: where they are, what they show, what acts on them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.screen import frames, protocol
from nnx_inspector.screen.flow import flow_of

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        return y, {"ids": y.argmax(-1)}


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(nnx.Rngs(0))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def run(x, block):
            return block(x)

        y = self.head(run(x, self.blocks)[0])
        return jnp.float32(1e6), {"logits": y, "classes": y.argmax(-1)}


@pytest.fixture(scope="module")
def insp():
    one = nni.Inspector(Net(), X, display=False)
    yield one
    one.close()


def test_each_array_but_the_main_one_has_a_row_below_the_module(insp):
    rows = inside(insp).view.layout.sites
    shown = {row.key: (row.parent if row.parent < 0 else rows[row.parent].key) for row in rows}
    assert {key: shown[key] for key in shown if "(" in key} == {
        "(0)": "",
        "(1.classes)": "",
        "blocks(1.ids)": "blocks",
        "blocks[0](1.ids)": "blocks[0]",
        "blocks[1](1.ids)": "blocks[1]",
    }
    by_key = {row.key: row for row in rows}
    assert [(row.array, row.single) for row in (by_key[""], by_key["(0)"])] == [
        ("1.logits", False),
        ("0", True),
    ]
    assert by_key["(1.classes)"].output == "int32[6]"
    assert by_key["blocks[1](1.ids)"].output == "int32[6]"
    assert by_key[""].parameters == 2 * 20 + 10
    assert not any(row.parameters or row.flops or row.perturbable for row in rows if row.single)
    assert (by_key["head"].array, by_key["head"].single) == ("", False)
    assert [row.depth for row in rows if row.single] == [1, 1, 2, 3, 3]


def test_the_frame_has_the_figures_of_each_row_by_itself(insp):
    (one,) = insp.recording.passes
    keys = [row.key for row in inside(insp).view.layout.sites]
    table, _ = frames.table_of(keys, one)
    mean = protocol.STATISTICS.index("mean")
    (large, out), y = inside(insp).core.model(X), np.asarray(X, np.float64)
    kernels = inside(insp).core.model.blocks.linear.kernel[...]
    for layer in range(2):
        y = y @ np.asarray(kernels[layer], np.float64)
        found = table[keys.index(f"blocks[{layer}](1.ids)"), 0, mean]
        assert found == pytest.approx(y.argmax(-1).mean())
    for key, array in {"": out["logits"], "(0)": large, "(1.classes)": out["classes"]}.items():
        expected = np.asarray(array, np.float64).mean()
        assert table[keys.index(key), 0, mean] == pytest.approx(expected, rel=1e-5)


def test_an_array_can_be_selected_and_has_no_more_than_statistics(insp):
    insp.selected = "blocks[1](1.ids)"
    assert insp.selected == "blocks[1](1.ids)"
    with pytest.raises(ValueError, match=r"one array of what 'blocks' returns, and has statistics"):
        insp.values("blocks(1.ids)")
    with pytest.raises(ValueError, match=r"Pass '' for the whole output"):
        insp.units("(1.classes)")
    with pytest.raises(ValueError, match=r"The closest sites are"):
        insp.values("blocks(2)")
    assert insp.values("blocks")[1]["ids"].shape == (2, 6)


def test_the_flow_leaves_arrays_out(insp):
    view = inside(insp).view
    found = flow_of(inside(insp).core.trace, view.layout, "", number=1)
    assert {node.site for node in found.nodes if node.role == "module"} == {"blocks", "head"}
    assert [one.site for one in found.absent] == []


def test_runs_are_compared_array_by_array(insp):
    other = nni.capture(Net())(X * 2)[1]
    frame = nni.compare(insp.recording, other).set_index(["site", "quantity"])
    found = frame.loc[("(0)", "output")]
    assert found["in"] == "both"
    assert found.total_variation == 0
    assert frame.loc[("", "output")].total_variation > 0
