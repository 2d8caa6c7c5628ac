"""`top_examples`: the oracle is a full, stable sort in NumPy of every unit's values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from language_models import VOCABULARY, language

import nnx_inspector as nni
from nnx_inspector.inspector.inspector import Inspector
from nnx_inspector.lenses.examples import TopExamples

RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 5, 4)).astype(np.float32)


class Identity(nnx.Module):
    """Returns what it receives, so that the test decides on every value."""

    def __call__(self, x: Any) -> Any:
        return x


class Model(nnx.Module):
    def __init__(self):
        self.same, self.head = Identity(), nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.head(self.dropout(self.same(x)).astype(jnp.float32))


def batches(x: np.ndarray, size: int = 6) -> list[np.ndarray]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def sorted_by_hand(x: np.ndarray, unit: int, k: int, sign: int) -> list[tuple[Any, ...]]:
    """Example, place and value of the k best, by a full sort; NaN left out."""
    rows: list[tuple[Any, ...]] = []
    for number, one in enumerate(x[..., unit]):
        if not np.isnan(one).all():
            best = np.nanmax(one) if sign > 0 else np.nanmin(one)
            place = np.unravel_index(np.flatnonzero(one.ravel() == best)[0], one.shape)
            rows.append((number, tuple(map(int, place)), float(best)))
    return sorted(rows, key=lambda row: -sign * row[2])[:k]


def check(found: TopExamples, x: np.ndarray, k: int) -> None:
    assert (found.count, found.units) == (len(x), x.shape[-1])
    for unit in range(x.shape[-1]):
        for of, sign in ((found.most, 1), (found.least, -1)):
            rows = [
                (example, tuple(map(int, place)), float(value))
                for example, place, value in of.rows(unit)
                if example >= 0
            ]
            assert rows == sorted_by_hand(x, unit, k, sign)


@pytest.mark.parametrize("size", [23, 6, 1])  # 23 batches of one are more than go together
def test_they_are_the_first_of_a_full_sort(size: int):
    found = nni.top_examples(Model(), batches(X, size), "same", k=5)
    check(found, X, 5)
    assert not found.constant.any()
    assert not found.nan.any()
    padded = "1 batch was smaller than the first, and filled up to 6 examples"
    assert found.notes == ((padded,) if size == 6 else ())


def test_batches_without_an_example_are_passed_over():
    """A filter may leave nothing of a batch."""
    data = [X[:0], X[:6], X[6:6], X[6:], X[:0]]
    check(nni.top_examples(Model(), data, "same", k=5), X, 5)
    with pytest.raises(ValueError, match="no batch with an example"):
        nni.top_examples(Model(), [X[:0]], "same")


def test_a_batch_may_come_in_the_memory_of_the_one_before():
    memory = np.empty_like(X[:6])

    def loaded() -> Any:
        for one in batches(X):
            memory[: len(one)] = one
            yield memory[: len(one)]

    check(nni.top_examples(Model(), loaded(), "same", k=5), X, 5)


def test_batches_together_are_one_program_which_is_kept():
    insp = Inspector(Model(), X[:6], display=False)
    insp.examples(batches(X, 1), "same", k=5)
    with Compilations() as compiled:
        insp.examples(batches(X, 1), "same", k=5)
    assert not compiled.kinds
    insp.close()


class Own(nnx.Module):
    """Its structure does not say how long its array is."""

    def __init__(self, units: int):
        self.w, self.same = nnx.Param(jnp.arange(1.0, units + 1)), Identity()

    def __call__(self, x: Any) -> Any:
        return self.same(x[..., :1] * self.w)


def test_a_second_call_with_an_equal_model_compiles_nothing_and_sees_its_weights():
    def compiles(model: Own, x: np.ndarray, **how: Any) -> bool:
        with Compilations() as compiled:
            found = nni.top_examples(model, batches(x), "same", k=3, **how)
        if not how:
            check(found, x[..., :1] * np.asarray(model.w[...]), 3)
        return bool(compiled.kinds)

    one, two = Own(2), Own(2)
    compiles(one, X)
    two.w[...] = jnp.array([-5.0, 0.25])
    assert not compiles(one, X[::-1])
    assert not compiles(two, X)
    assert compiles(Own(3), X), "an array of another shape"
    assert compiles(one, X[:, :4])
    assert compiles(one, X, axis=1)
    assert not compiles(one, X)


def test_of_equal_values_the_first_comes_first():
    x = RNG.integers(-2, 3, X.shape).astype(np.float32)
    x[x == 0] *= np.where(np.arange((x == 0).sum()) % 2, 1, -1)  # zeros of both signs are equal
    check(nni.top_examples(Model(), batches(x), "same", k=9), x, 9)


def test_nan_is_left_out_and_counted_and_infinite_values_are_not():
    x = X.copy()
    x[3, 2, 0] = x[4, :, 1] = np.nan
    x[5, 1, 2], x[6, 1, 2], x[7, :, 3] = np.inf, -np.inf, -np.inf
    found = nni.top_examples(Model(), batches(x), "same", k=30)
    check(found, x, 30)
    assert found.nan.tolist() == [1, 1, 0, 0]
    assert (found.most.examples[1] == -1).sum() == 30 - 22


def test_units_that_never_fire_are_named():
    x = np.maximum(X, 0)
    x[..., 2], x[..., 3] = 0, np.nan
    found = nni.top_examples(Model(), batches(x), "same", k=2)
    assert found.constant.tolist() == [False, False, True, True]
    assert "2 of them constant" in repr(found)
    assert found.most.examples[2].tolist() == [0, 1]


def test_the_random_ones_are_any_of_the_data_and_the_same_for_all_units():
    every = set[int]()
    for seed in range(5):
        found = nni.top_examples(Model(), batches(X), "same", k=4, seed=seed)
        assert len({tuple(row) for row in found.random.examples.tolist()}) == 1
        chosen = found.random.examples[0].tolist()
        assert len(set(chosen)) == 4
        for unit in range(4):
            values = X[chosen, :, unit].max(1)
            np.testing.assert_array_equal(found.random.values[unit], values)
        every |= set(chosen)
    again = nni.top_examples(Model(), batches(X, 5), "same", k=4, seed=4)
    assert again.random.examples[0].tolist() == chosen  # however the data is divided
    assert len(every) > 8


def test_an_axis_may_be_that_of_heads():
    x = RNG.normal(size=(12, 5, 3, 2)).astype(np.float32)

    class Heads(nnx.Module):
        def __init__(self):
            self.same = Identity()

        def __call__(self, x: Any) -> Any:
            return self.same(x).sum()

    for axis in (-2, 2):
        found = nni.top_examples(Heads(), batches(x), "same", axis=axis, k=3)
        check(found, np.moveaxis(x, 2, -1), 3)
    frame: Any = found.to_frame(unit=1)
    assert list(frame.columns) == ["unit", "which", "rank", "example", "row", "column", "value"]
    assert len(frame) == 9


@functools.partial(nnx.jit, static_argnums=0)
def captured(only: str, model: Any, tokens: Any) -> nni.Record:
    return nni.capture(model, only=only, values=True)(tokens)[1]


def test_a_layer_of_a_stack_and_longer_batches():
    model = language(scan=True)
    data = [RNG.integers(0, VOCABULARY, (3, n)) for n in (5, 3, 5)]
    found = nni.top_examples(model, data, "blocks/mlp[1]", k=8)
    values = []
    for tokens in data:
        record = captured("blocks/mlp", model, tokens)
        values.append(np.asarray(record["blocks/mlp"].values)[1].max(1))
    expected = np.sort(np.concatenate(values), axis=0)[::-1][:8].T
    np.testing.assert_allclose(found.most.values, expected, rtol=1e-4, atol=1e-5)
    assert found.notes == ("2 programs ran, one for each form of batch",)
    assert found.starts == (0, 3, 6)
    with pytest.raises(ValueError, match=r"stack of 3 layers. Choose one: 'blocks/mlp\[0\]'"):
        nni.top_examples(model, data, "blocks/mlp")
    with pytest.raises(ValueError, match="there is no layer 3"):
        nni.top_examples(model, data, "blocks/mlp[3]")


def test_it_reports_stops_and_keeps_what_was_found():
    reports: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> bool:
        reports.append((done, total))
        return done == 2

    found = nni.top_examples(Model(), batches(X), "same", k=3, progress=stop)
    assert reports == [(1, 4), (2, 4)]
    assert found.stopped
    check(found, X[:12], 3)

    def interrupted() -> Any:
        yield X[:6]
        raise KeyboardInterrupt

    found = nni.top_examples(Model(), interrupted(), "same", k=3)
    assert found.stopped
    check(found, X[:6], 3)


def test_a_batch_may_hold_more_than_the_model_receives():
    data = [(x, np.zeros(len(x))) for x in batches(X)]
    found = nni.top_examples(Model(), data, "same", inputs=lambda batch: batch[0], k=3)
    check(found, X, 3)
    with pytest.raises(TypeError, match=r"A batch of 2 arguments does not fit.*Pass inputs="):
        nni.top_examples(Model(), data, "same")


def test_the_model_does_not_change():
    model = Model()  # its dropout is on
    before = jax.tree.leaves(nnx.state(model))
    nni.top_examples(model, batches(X), "same")
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


class Twice(nnx.Module):
    def __init__(self):
        self.same, self.wave, self.mean = Identity(), Identity(), Identity()

    def __call__(self, x: Any) -> Any:
        self.mean(x.mean(0))
        return self.same(self.same(x)) + self.wave(x + 1j).real


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "site": (lambda: nni.top_examples(Model(), [X], "smae"), ValueError, "sites are 'same'"),
    "twice": (lambda: nni.top_examples(Twice(), [X], "same"), nni.InspectorError, "called 2 times"),
    "complex": (lambda: nni.top_examples(Twice(), [X], "wave"), TypeError, "Only real numbers"),
    "no batch axis": (lambda: nni.top_examples(Twice(), [X], "mean"), ValueError, "first axis"),
    "axis": (lambda: nni.top_examples(Model(), [X], "same", axis=3), ValueError, "no axis 3 of"),
    "batch": (lambda: nni.top_examples(Model(), [X], "same", axis=0), ValueError, "no axis 0 of"),
    "empty": (lambda: nni.top_examples(Model(), [], "same"), ValueError, "data has no batch"),
    "k": (lambda: nni.top_examples(Model(), [X], "same", k=0), ValueError, "k must be"),
    "array": (
        lambda: nni.top_examples(Model(), X[..., 0], "same"), TypeError, r"write \[data\]"
    ),
    "text": (lambda: nni.top_examples(Model(), ["x"], "same"), TypeError, "Pass inputs="),
    "rank": (
        lambda: nni.top_examples(Model(), [X, X[:, 0]], "same"), ValueError, "other units than"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named(name: str):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_an_inspector_uses_its_modes_and_its_function():
    model = Model()
    insp = Inspector(model, X[:6], display=False)
    frame: Any = insp.examples(batches(X), "same", 1, k=3)
    most = frame[frame["which"] == "most"]
    assert most["example"].tolist() == [row[0] for row in sorted_by_hand(X, 1, 3, 1)]
    assert insp.examples(batches(X), "same", k=3).to_frame(1).equals(frame)
    insp.close()
    with pytest.raises(nni.InspectorError, match="was closed"):
        insp.examples(batches(X), "same", 1)

    def forward(model: Model, x: Any) -> Any:
        return model(2 * x)

    insp = Inspector(forward, model, X[:6], display=False)
    frame = insp.examples(batches(X), "same", 1, k=1)
    np.testing.assert_allclose(frame["value"][0], 2 * sorted_by_hand(X, 1, 1, 1)[0][2])
    insp.close()


def test_an_operation_within_a_call_has_examples_too():
    model = language()
    tokens = RNG.integers(0, VOCABULARY, (6, 5))
    found = nni.top_examples(model, [tokens], "blocks/1/attention@softmax", axis=1, k=2)
    record = captured("blocks/1/attention@softmax", model, tokens)
    pattern = np.asarray(record["blocks/1/attention@softmax"].values).reshape(6, 2, 5, 5)
    best = np.sort(pattern.max((2, 3)), 0)[::-1][:2].T
    np.testing.assert_allclose(found.most.values, best, rtol=1e-5)


def test_only_positions_that_count_are_found():
    """Padding would be the most for some units, and an example of padding alone is left out."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (13, 5)) * (np.arange(5) < rng.integers(0, 6, (13, 1)))
    tokens[3] = 0
    model = nnx.Sequential(nnx.Embed(9, 6, rngs=nnx.Rngs(0)), jnp.sin)
    batches = [jnp.asarray(tokens[i : i + 4]) for i in range(0, 13, 4)]
    how = {"k": 4, "where": lambda tokens: tokens != 0, "progress": False}
    found = nni.top_examples(model, batches, "layers/0", **how)
    table = np.asarray(model.layers[0].embedding[...], np.float64)
    values = np.where((tokens != 0)[..., None], table[tokens], -np.inf)
    largest, place = values.max(1), values.argmax(1)
    order = np.argsort(-largest, axis=0, kind="stable")[:4].T
    units = np.arange(6)[:, None]
    np.testing.assert_array_equal(found.most.examples, order)
    np.testing.assert_allclose(found.most.values, largest[order, units], rtol=1e-6)
    np.testing.assert_array_equal(found.most.places[..., 0], place[order, units])
    smallest = np.where(np.isinf(values), np.inf, values).min(1)
    order = np.argsort(smallest, axis=0, kind="stable")[:4].T
    np.testing.assert_array_equal(found.least.examples, order)
    assert tokens[found.random.examples, found.random.places[..., 0]].all()
    nothing = nni.top_examples(model, [jnp.zeros((4, 5), int)], "layers/0", **how)
    assert (nothing.count, set(nothing.most.examples.flat)) == (4, {-1})
    insp = nni.Inspector(model, batches[0], where=how["where"], display=False)
    shown = insp.examples(batches, "layers/0", k=4)
    np.testing.assert_array_equal(shown.most.examples, found.most.examples)
    insp.close()


def test_positions_that_do_not_fit_are_named():
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 5, 3))
    with pytest.warns(nni.InspectorWarning, match=r"bool\[4,6\], which does not fit what '' ret"):
        found = nni.top_examples(model, [x], "", where=np.ones((4, 6), bool), progress=False)
    assert "so all its places count" in found.notes[0]
    with pytest.raises(nni.InspectorError, match="where= was given the arguments of Linear"):
        nni.top_examples(model, [x], "", where=lambda x: x.missing, progress=False)
