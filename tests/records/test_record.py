"""A record: a mapping, a pytree, and its errors for what was not measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.records.capture import capture, value_and_grad
from nnx_inspector.records.record import Record


@pytest.fixture(scope="module")
def model():
    return models.Nested(rngs())


@pytest.fixture(scope="module")
def graded():
    return nnx.jit(value_and_grad(lambda m, x: (m(x) ** 2).mean()))


@pytest.fixture(scope="module")
def record(model, graded):
    return graded(model, batch(4, 3))[0][1]


@pytest.fixture(scope="module")
def stacked(graded):
    return graded(models.Stacked(rngs()), batch(4, 3))[0][1]


def test_a_record_is_a_mapping_of_site_keys(record):
    assert set(record) == {
        "", "blocks/0", "blocks/0/linear", "blocks/1", "blocks/1/linear",
        "heads/a", "heads/b", "tail", "tail/layers/0",
    }  # fmt: skip
    assert len(record) == 9
    assert "blocks/0" in record
    assert "blocks/2" not in record


def test_a_missing_site_names_the_nearest(record):
    with pytest.raises(KeyError) as error:
        record["blocks/0/linaer"]
    assert error.value.args[0] == (
        "'blocks/0/linaer' is not in this record. "
        "The closest sites are 'blocks/0/linear', 'blocks/1/linear', 'blocks/0'."
    )


def test_the_repr_names_the_sites_and_counts_those_beyond_a_dozen(record):
    assert repr(record) == f"Record(9 sites: {', '.join(map(repr, record))})"
    model = nnx.Sequential(*[nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(14)])
    _, many = capture(model)(jnp.ones((1, 2)))
    assert repr(many).startswith("Record(15 sites: 'layers/0', 'layers/1'")
    assert repr(many).endswith("'layers/11', ... 3 more)")


def test_a_record_comes_out_of_jit_with_its_keys(record):
    assert isinstance(record, Record)
    assert record["tail"].output.size == 8


def test_device_get_gives_numpy_and_the_same_figures(record):
    host = jax.device_get(record)
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(host))
    assert host["tail"].output.mean == record["tail"].output.mean


def test_tree_map_keeps_keys_and_structure(record):
    same = jax.tree.map(lambda x: x, record)
    assert list(same) == list(record)
    assert jax.tree.structure(same) == jax.tree.structure(record)
    assert same["heads/a"].gradient.norm == record["heads/a"].gradient.norm


def test_a_record_goes_into_jit_and_out_again(record):
    again = jax.jit(lambda r: r)(record)
    assert again["tail"].output.max == record["tail"].output.max


def test_records_of_equal_passes_have_equal_structure(model, graded, record):
    other = graded(model, batch(4, 3, seed=1))[0][1]
    assert jax.tree.structure(other) == jax.tree.structure(record)


@pytest.mark.parametrize("part", ["output", "input", "gradient"])
def test_reading_inside_jit_raises_the_error_that_teaches(model, part):
    @nnx.jit
    def step(model, x):
        (loss, record), _ = value_and_grad(lambda m, x: m(x).sum())(model, x)
        getattr(record["tail"], part)
        return loss

    with pytest.raises(InspectorError, match=r"inside jit cannot be read.*Return the record"):
        step(model, batch(4, 3))


def test_unseen_sites_survive_jit_and_raise_with_their_reason():
    record = jax.jit(lambda r: r)(Record({}, {"a": "it is hidden"}))
    assert record.unseen == {"a": "it is hidden"}
    assert repr(record).endswith("; unseen: ['a'])")
    with pytest.raises(KeyError, match=r"'a' could not be read: it is hidden."):
        record["a"]


def test_an_empty_record_has_no_closest_sites():
    with pytest.raises(KeyError, match=r"The closest sites are none."):
        Record({}, {})["a"]


def test_rows_are_read_by_index(stacked):
    assert stacked["blocks"].rows == 3
    for i in range(3):
        row = stacked[f"blocks[{i}]"]
        assert row.output.size == 12
        assert row.output.mean == stacked["blocks"].calls[0].output.row(i).mean
        assert row.gradient.mean == stacked["blocks"].calls[0].gradient.row(i).mean
    assert stacked["blocks[-1]"].output.mean == stacked["blocks[2]"].output.mean
    assert stacked["blocks"].output.size == 36


def test_a_row_that_is_not_there_is_an_error(stacked):
    with pytest.raises(IndexError, match=r"'blocks' has 3 rows, but no row 3"):
        stacked["blocks[3]"]


def test_a_site_without_rows_has_none(record):
    assert record["tail"].rows == 0
    with pytest.raises(IndexError, match=r"'tail' has 0 rows"):
        record["tail[0]"]


def test_calls_of_unlike_structure_do_not_add_up_and_can_be_read_apart():
    class Either(nnx.Module):
        def __call__(self, x, both):
            return (x, x) if both else x

    class Twice(nnx.Module):
        def __init__(self):
            self.either = Either()

        def __call__(self, x):
            self.either(x, True)
            return self.either({"x": 2 * x}["x"], both=False)

    _, record = capture(Twice(), inputs=True)(x := batch(4, 3))
    with pytest.raises(InspectorError, match=r"outputs of different structures.*calls\[0\].output"):
        _ = record["either"].output
    assert record["either"].calls[1].output.size == 12
    assert record["either"].calls[0].output[1].size == 12
    rows = record.to_frame().set_index(["site", "quantity", "array"])
    for path, y in (("[0]", x), ("[1]", x), ("", 2 * x)):
        row = rows.loc[("either", "output", path)]
        assert (row["calls"], row["size"]) == (2, 12)
        np.testing.assert_allclose(row["norm"], np.linalg.norm(y), rtol=1e-5)
    row = rows.loc[("either", "input", "")]
    np.testing.assert_allclose(row["norm"], np.linalg.norm([x, 2 * x]), rtol=1e-5)


def test_inputs_of_unlike_structure_are_named_as_such():
    class Either(nnx.Module):
        def __call__(self, x, more=None):
            return x if more is None else x + more

    class Twice(nnx.Module):
        def __init__(self):
            self.either = Either()

        def __call__(self, x):
            return self.either(self.either(x), x)

    _, record = capture(Twice(), inputs=True)(batch(4, 3))
    with pytest.raises(InspectorError, match="inputs of different structures") as error:
        _ = record["either"].input
    assert str(error.value).count("float32[4,3]") == 3


def test_repeated_calls_are_apart_in_loops_scans_and_of_shared_modules():
    class Repeats(nnx.Module):
        def __init__(self):
            self.layer = self.again = nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, x):
            for _ in range(2):
                x = self.layer(x)
            scan = nnx.scan(in_axes=(None, nnx.Carry), out_axes=(nnx.Carry, 0), length=3)
            x, _ = scan(lambda m, x: (m(x), None))(self.again, x)
            return self.layer(x[:1])

    model, x = Repeats(), batch(4, 3)
    _, record = capture(model)(x)
    (site,) = set(record) - {""}
    calls = record[site].calls
    assert [np.asarray(call.ran).tolist() for call in calls] == [1, 1, [1, 1, 1], 1]
    expected = [x]
    for _ in range(5):
        expected.append(model.layer(expected[-1]))
    last = model.layer(expected[-1][:1])
    outputs = [calls[0].output, calls[1].output, *map(calls[2].output.row, range(3))]
    for summary, value in zip([*outputs, calls[3].output], [*expected[1:], last], strict=True):
        np.testing.assert_allclose(summary.mean, np.mean(value), rtol=1e-4, atol=1e-6)
        assert summary.size == value.size
    inputs = [call.input.size for call in calls]
    assert inputs == [12, 12, 36, 3]
    assert record[site].output.size == 5 * 12 + 3


def test_a_call_that_a_remat_repeats_for_its_gradient_is_one_call():
    def step(model, x):
        return nnx.value_and_grad(lambda m: nnx.remat(lambda m, x: m(x))(m, x).sum())(model)[0]

    model, x = models.MLP(rngs()), batch(4, 3)
    loss, record = capture(step)(model, x)
    assert {site: len(record[site].calls) for site in record} == {"": 1, "up": 1, "down": 1}
    np.testing.assert_allclose(record[""].output.mean * 8, loss, rtol=1e-5)


def test_the_input_of_several_arrays_is_the_tree_of_arguments():
    class Adds(nnx.Module):
        def __call__(self, a, b, *, c):
            return a + b + c

    ones = jnp.ones(3)
    _, record = capture(Adds())(ones, 2 * ones, c=3 * ones)
    args, kwargs = record[""].input
    assert [a.mean for a in args] == [1.0, 2.0]
    assert kwargs["c"].mean == 3.0


def test_without_gradients_the_gradient_is_none():
    _, record = capture(models.Frozen())(batch(4, 3))
    assert record[""].gradient is None


def test_a_frame_has_a_row_a_quantity_and_array():
    _, record = capture(models.TreeOutput(rngs()))(batch(4, 3))
    frame = record.to_frame()
    assert list(frame.columns[:4]) == ["site", "quantity", "array", "calls"]
    root = frame[(frame.site == "") & (frame.quantity == "output")]
    assert list(root.array) == ["['parts'][0]", "['parts'][1][0]", "['y']"]
    linear = frame[(frame.site == "linear") & (frame.quantity == "output")].iloc[0]
    assert linear["size"] == 8
    np.testing.assert_allclose(linear["mean"], record["linear"].output.mean)


def test_a_frame_of_nothing_has_its_columns():
    frame = Record({}, {}).to_frame()
    assert len(frame) == 0
    assert {"site", "mean", "nan"} <= set(frame.columns)


class Drawing(nnx.Module):
    """Returns numbers, keys and a token; takes a key."""

    def __call__(self, x, key):
        keys = jax.random.split(key, 3)
        return x * jax.random.normal(keys[0]), {"keys": keys, "token": jax.lax.create_token(x)}


class Split(nnx.Module):
    """Returns only keys, also from inside a loop."""

    def __call__(self, key):
        return jax.random.split(key)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["plainly", "in jit"])
def test_what_has_no_numbers_is_shape_only(wrap):
    f = lambda m, x, key: m(x, key)[0]  # noqa: E731
    record = wrap(capture(f))(Drawing(), jnp.ones((2, 3)), jax.random.key(0))[1]
    numbers, others = record[""].output
    assert numbers.size == 6
    assert repr(others["keys"]) == "Summary(key<fry>[3], no figures)"
    assert others["token"].opaque == "token"
    assert np.isnan([others["keys"].mean, others["keys"].max, others["token"].norm]).all()
    frame = record.to_frame()
    frame = frame[frame["quantity"] == "output"].set_index("array")
    assert frame["size"].to_dict() == {"[0]": 6, "[1]['keys']": 3, "[1]['token']": 0}
    assert frame.loc["[1]['keys']"][["mean", "min", "norm"]].isna().all()
    assert record.merged()[""]["output"].size == 6  # on screen only numbers


def test_the_gradients_of_what_has_no_numbers_are_none():
    (_, record), _ = value_and_grad(lambda m, x: m(x, jax.random.key(0))[0].sum())(
        Drawing(), jnp.ones((2, 3))
    )
    gradient, others = record[""].gradient
    assert gradient.size == 6
    assert others == {"keys": None, "token": None}
    assert record[""].output[1]["keys"].opaque == "key<fry>[3]"


def test_keys_alone_and_in_loops():
    split = Split()
    record = capture(lambda m, key: m(key))(split, jax.random.key(0))[1]
    assert record[""].output.opaque == "key<fry>[2]"
    assert record[""].input.opaque == "key<fry>[]"
    assert record.merged() == {}
    keys = jax.random.split(jax.random.key(0), 4)
    for mapped in (lambda m, keys: jax.vmap(m)(keys), lambda m, keys: jax.lax.map(m, keys)):
        record = capture(mapped)(split, keys)[1]
        assert record[""].output.opaque.startswith("key<fry>[")
        assert record.unseen == {}


class Shared(nnx.Module):
    """Uses one activation after two layers of different widths."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.act = Activation()

    def __call__(self, x):
        return self.act(self.b(self.act(self.a(x))))


class Activation(nnx.Module):
    def __call__(self, x):
        return nnx.relu(x)


def test_units_of_calls_of_different_widths_are_read_call_by_call(tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("f")
    model = Shared()
    _, record = nni.capture(model, units=-1, values=True)(x)  # a NumPy array among the values
    with pytest.raises(nni.InspectorError, match=r"'act' .* \(8 of float32 and 4 of float32\)"):
        _ = record["act"].units
    h = np.maximum(np.asarray(model.a(x), np.float64), 0)
    np.testing.assert_allclose(record["act"].calls[0].units.mean, h.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(record["a"].input_values, x)
    insp = nni.Inspector(model, x, display=False)
    insp.to_html(tmp_path / "page.html")  # all else is on the page
    insp.close()
    assert (tmp_path / "page.html").stat().st_size > 0
