"""A record is a value: it passes wherever a pytree of arrays does, and reads the same afterwards.

Also the inputs of `capture` and `value_and_grad`: modules in any container, arguments in any form.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.errors import InspectorError
from nnx_inspector.records.capture import capture, value_and_grad
from nnx_inspector.records.record import Record, named_summaries

FIGURES = ("size", "mean", "std", "min", "max", "norm", "zeros", "nan")
LOSS = lambda model, x: (model(x) ** 2).mean()  # noqa: E731


def figures(record):
    """The content of a record, by site, quantity and array."""
    said = {}
    for site in record:
        for number, call in enumerate(record[site].calls):
            for quantity in ("output", "input", "gradient"):
                for name, s in named_summaries(getattr(call, quantity)):
                    key = (site, number, quantity, name)
                    said[key] = {figure: getattr(s, figure) for figure in FIGURES}
    return said


def assert_same(a, b, rtol=0.0, atol=0.0):
    said, expected = figures(a), figures(b)
    assert said.keys() == expected.keys()
    assert said
    for key, values in expected.items():
        for figure, value in values.items():
            np.testing.assert_allclose(
                said[key][figure], value, rtol=rtol, atol=atol, err_msg=f"{key} {figure}"
            )


@pytest.fixture(scope="module")
def graded():
    return nnx.jit(value_and_grad(LOSS))


@pytest.fixture(scope="module")
def record(graded):
    return graded(models.Stacked(rngs(), depth=2), batch(4, 3))[0][1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


# ------------------------------------------------------------------ where it goes


@pytest.mark.parametrize(
    "through",
    [
        jax.device_get,
        jax.block_until_ready,
        copy.deepcopy,
        copy.copy,
        lambda r: pickle.loads(pickle.dumps(r)),
        lambda r: jax.tree.map(jnp.asarray, jax.device_get(r)),
        lambda r: jax.jit(lambda r: r, donate_argnums=0)(jax.tree.map(jnp.copy, r)),
        lambda r: nnx.jit(lambda r: {"record": [r]})(r)["record"][0],
        lambda r: jax.tree.unflatten(jax.tree.structure(r), jax.tree.leaves(r)),
    ],
    ids=["device_get", "ready", "deepcopy", "copy", "pickle", "put", "donate", "jit", "leaves"],
)
def test_a_record_goes_through(through, record):
    out = through(record)
    assert isinstance(out, Record)
    assert jax.tree.structure(out) == jax.tree.structure(record)
    assert_same(out, record)


def test_a_donated_record_is_gone_and_what_was_made_of_it_is_not(record):
    given = jax.tree.map(jnp.copy, record)
    doubled = jax.jit(lambda r: jax.tree.map(lambda x: x, r), donate_argnums=0)(given)
    assert jax.tree.leaves(given)[0].is_deleted()
    assert_same(doubled, record)


def test_a_pickle_holds_outputs_that_are_the_users_own_classes():
    class Split(nnx.Module):
        def __call__(self, x):
            return Pair(x, {"twice": 2 * x, "word": "w"})

    x = batch(4, 3)
    _, record = capture(Split())(x)
    again = pickle.loads(pickle.dumps(record))
    assert_same(again, record)
    assert isinstance(again[""].output, Pair)
    assert again[""].output.right["word"] is None
    np.testing.assert_allclose(again[""].output.right["twice"].max, 2 * x.max(), rtol=1e-6)


def test_orbax_saves_and_restores_a_record(record, tmp_path):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), record)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "record", record)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "record", abstract)
        names = checkpointer.restore(tmp_path / "record")
    assert isinstance(restored, Record)
    assert_same(restored, record)
    assert set(names) == {"words"}  # without a target it is a tree of the arrays


def test_the_shapes_of_a_record_are_known_without_running_and_have_no_figures(record):
    model, x = models.Stacked(rngs(), depth=2), batch(4, 3)
    shapes = jax.eval_shape(lambda x: value_and_grad(LOSS)(model, x)[0][1], x)
    assert jax.tree.structure(shapes) == jax.tree.structure(record)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(record), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
    assert shapes["blocks"].rows == 2
    with pytest.raises(InspectorError, match=r"jax.eval_shape has shapes but no values"):
        shapes["blocks"].output  # noqa: B018
    with pytest.raises(InspectorError, match=r"jax.eval_shape has shapes but no values"):
        shapes.to_frame()


def test_a_record_is_one_array_and_the_values_that_it_keeps(record):
    ((path, words),) = jax.tree_util.tree_flatten_with_path(record)[0]
    assert (jax.tree_util.keystr(path), words.dtype) == (".words", jnp.uint32)
    model, x = models.Stacked(rngs(), depth=2), batch(4, 3)
    _, kept = jax.jit(capture(model, values=True))(x)
    words, *values = jax.tree.leaves(kept)
    shapes = {np.shape(v) for key in kept for v in jax.tree.leaves(kept[key].values)}
    assert {value.shape for value in values} == shapes
    assert all(isinstance(v, jax.Array) for key in kept for v in jax.tree.leaves(kept[key].values))


def test_a_function_of_records_is_traced_once_for_all_steps(graded, record):
    traced = []

    @jax.jit
    def norm(record):
        traced.append(1)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(record))

    model = models.Stacked(rngs(1), depth=2)
    for seed in range(3):
        norm(graded(model, batch(4, 3, seed=seed))[0][1])
    assert len(traced) == 1


# ------------------------------------------------------------- records of several passes


def test_a_scan_over_training_steps_gives_one_record_with_a_row_a_step(graded):
    xs = batch(3, 4, 3)

    def parts():
        model = models.Stacked(rngs(), depth=2)
        return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(model, optimizer, x):
        (_, record), grads = value_and_grad(LOSS)(model, x)
        optimizer.update(model, grads)
        return record

    model, optimizer = parts()
    apart = [nnx.jit(step)(model, optimizer, x) for x in xs]

    graphdef, state = nnx.split(parts())

    def body(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        record = step(model, optimizer, x)
        return nnx.state((model, optimizer)), record

    record = jax.jit(functools.partial(jax.lax.scan, body))(state, xs)[1]
    assert record.rows == (3,)
    for i, one in enumerate(apart):
        assert_same(record.row(i), one, rtol=1e-4, atol=1e-6)
    assert_same(record.row(-1), record.row(2))
    # layers are rows too: an index in a key is a layer, over all steps
    assert (record["blocks"].rows, record["blocks[1]"].rows) == (2, 0)
    layer = [one["blocks[1]"].output for one in apart]
    np.testing.assert_allclose(
        record["blocks[1]"].output.mean, np.mean([s.mean for s in layer]), rtol=1e-4
    )
    assert record["blocks[1]"].output.max == pytest.approx(max(s.max for s in layer), rel=1e-5)
    assert record["blocks[1]"].gradient.size == 3 * layer[0].size
    assert record.row(1)["blocks[1]"].output.size == layer[0].size
    frame = record.to_frame()
    sizes = frame[frame.quantity == "output"].set_index("site")["size"]
    assert dict(sizes) == {"": 36, "blocks": 72, "blocks/linear": 72}
    calls = frame[frame.quantity == "output"].set_index("site")["calls"]
    assert dict(calls) == {"": 3, "blocks": 6, "blocks/linear": 6}


def test_a_vmap_over_models_and_batches_gives_a_row_each():
    members, xs = [models.MLP(rngs(i)) for i in range(2)], batch(3, 4, 3)
    graphdef = nnx.graphdef(members[0])
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(m) for m in members))
    one = lambda state, x: value_and_grad(LOSS)(nnx.merge(graphdef, state), x)[0][1]  # noqa: E731
    record = jax.jit(jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None)))(states, xs)
    assert record.rows == (2, 3)
    apart = nnx.jit(value_and_grad(LOSS))
    for i, member in enumerate(members):
        assert record.row(i).rows == (3,)
        for j, x in enumerate(xs):
            assert_same(record.row((i, j)), apart(member, x)[0][1], rtol=1e-4, atol=1e-6)
    whole = np.stack([m(xs) for m in members])
    assert record[""].output.size == whole.size
    np.testing.assert_allclose(record[""].output.mean, whole.mean(), rtol=1e-5)


def test_rows_that_are_not_there_are_an_error(record):
    assert record.rows == ()
    with pytest.raises(IndexError, match=r"no row 0 in a record with rows \(\)"):
        record.row(0)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), record)
    assert stacked.rows == (2,)
    with pytest.raises(IndexError, match=r"no row 2 in a record with rows \(2,\)"):
        stacked.row(2)


def test_layers_are_known_one_by_one_in_a_scan_and_in_a_vmap_over_them():
    class Both(models.Stacked):
        def __call__(self, x):
            y = super().__call__(x)
            first = jax.tree.map(lambda leaf: leaf[0], nnx.state(self.blocks))
            return nnx.vmap(lambda block: block(y))(self.blocks).mean(0) + 0 * len(first)

    model, x = Both(rngs(), depth=2), batch(4, 3)
    _, record = capture(model)(x)
    assert [call.loops for call in record["blocks"].calls] == [1, 1]
    assert record["blocks"].rows == 2
    assert len(record["blocks[0]"].calls) == 2
    assert record["blocks[0]"].output.size == 24
    assert record["blocks"].output.size == 48


@pytest.mark.parametrize("sampled", [True, False])
def test_a_record_of_some_steps_alone_comes_out_of_cond(sampled, graded):
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(sampled, state, x):
        one = lambda state: value_and_grad(LOSS)(nnx.merge(graphdef, state), x)[0]  # noqa: E731
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, state))
        plain = lambda state: (LOSS(nnx.merge(graphdef, state), x), nothing[1])  # noqa: E731
        return jax.lax.cond(sampled, one, plain, state)

    loss, record = step(sampled, state, x)
    np.testing.assert_allclose(loss, LOSS(model, x), rtol=1e-6)
    if sampled:
        assert_same(record, graded(model, x)[0][1], rtol=1e-5, atol=1e-7)
    else:
        assert not record["up"].calls[0].took_place
        assert (record["up"].output, record["up"].gradient) == (None, None)
        assert list(record.to_frame()["site"]) == []


def test_both_branches_of_a_cond_have_records_of_one_structure():
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(which, state, x):
        run = lambda x: capture(nnx.merge(graphdef, state))(x)[1]  # noqa: E731
        return jax.lax.cond(which, lambda x: run(x), lambda x: run(10 * x), x)

    for which, scale in ((True, 1), (False, 10)):
        expected = capture(model)(scale * x)[1]
        assert_same(step(which, state, x), expected, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------- what f takes


def in_dict(model, x):
    return lambda parts, x: parts["m"](x), ({"m": model}, x), {}


def in_tuple_and_list(model, x):
    return lambda parts, x: parts[0][0](x), (([model], None), x), {}


def in_dataclass(model, x):
    return lambda parts: parts.right(parts.left), (Pair(x, model),), {}


def by_keyword(model, x):
    def f(x, *, net, scale):
        return net(x) * scale

    return f, (x,), {"net": model, "scale": 1.0}


def bound_method(model, x):
    return model.__call__, (x,), {}


def itself(model, x):
    return model, (x,), {}


def partial(model, x):
    return functools.partial(lambda scale, m, x: m(x) * scale, 1.0), (model, x), {}


FORMS = [in_dict, in_tuple_and_list, in_dataclass, by_keyword, bound_method, itself, partial]


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_the_same_however_the_module_arrives(form):
    model, x = models.MLP(rngs()), batch(4, 3)
    f, args, kwargs = form(model, x)
    out, record = capture(f)(*args, **kwargs)
    expected, plain = capture(model)(x)
    np.testing.assert_array_equal(out, expected)
    assert_same(record, plain)


def test_several_modules_in_one_container_have_keys_of_their_places():
    a, b, x = models.MLP(rngs(0)), models.MLP(rngs(1)), batch(4, 3)
    f = lambda pair, x: pair.left(x) + pair.right["b"][0](x)  # noqa: E731
    _, record = capture(f)(Pair(a, {"b": (b,)}), x)
    assert {key for key in record if key.endswith("up")} == {"pair/left/up", "pair/right/b/0/up"}
    np.testing.assert_allclose(record["pair/right/b/0/up"].output.mean, b.up(x).mean(), rtol=1e-5)


@pytest.mark.parametrize("argnums", [0, (0, 2), (-1, 0), nnx.DiffState(0, nnx.Param)], ids=str)
def test_gradients_by_modules_in_containers_are_those_of_nnx(argnums):
    parts, x = {"a": models.MLP(rngs(0)), "b": [models.MLP(rngs(1))]}, batch(4, 3)

    def loss(parts, x, scale):
        return (scale * (parts["a"](x) + parts["b"][0](x)) ** 2).mean()

    args = (parts, x, jnp.float32(2.0))
    (value, record), ours = value_and_grad(loss, argnums=argnums)(*args)
    expected, grads = nnx.value_and_grad(loss, argnums=argnums)(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert jax.tree.structure(ours) == jax.tree.structure(grads)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert record["parts/b/0/down"].gradient.size == 8


def test_only_and_inputs_hold_for_gradients_too_and_change_none():
    model, x = models.Nested(rngs()), batch(4, 3)
    (_, few), grads = value_and_grad(LOSS, only="blocks/*", inputs=False)(model, x)
    (_, every), expected = value_and_grad(LOSS)(model, x)
    assert set(few) == {"blocks/0", "blocks/1"}
    for site in few:
        assert few[site].input is None
        assert few[site].gradient.norm == every[site].gradient.norm
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_array_of_a_tree_has_its_own_gradient():
    class Forked(models.Base):
        def __call__(self, x):
            h = self.linear(x)
            return {"a": h, "pair": (2 * h, Pair(3 * h, h.astype(jnp.int32)))}

    def loss(model, x):
        out = model(x)
        return out["a"].sum() + 5 * out["pair"][1].left.sum()

    model, x = Forked(rngs()), batch(4, 3)
    (_, record), _ = value_and_grad(loss)(model, x)
    gradient = record[""].gradient
    assert (gradient["a"].min, gradient["a"].max, gradient["a"].size) == (1.0, 1.0, 12)
    assert gradient["pair"][0] is None
    assert (gradient["pair"][1].left.min, gradient["pair"][1].left.max) == (5.0, 5.0)
    assert gradient["pair"][1].right is None
    assert record["linear"].gradient.mean == pytest.approx(16.0)


def test_calls_of_a_site_are_apart_and_together():
    model, x = models.Shared(rngs()), batch(4, 3)
    (_, record), _ = value_and_grad(LOSS)(model, x)
    first, second = record["first"].calls
    assert first.output.size == second.output.size == 12
    for quantity in ("output", "input", "gradient"):
        one, two = getattr(first, quantity), getattr(second, quantity)
        both = getattr(record["first"], quantity)
        assert both.size == one.size + two.size
        assert (both.min, both.max) == (min(one.min, two.min), max(one.max, two.max))
        assert both.mean == pytest.approx((one.mean + two.mean) / 2, rel=1e-6)
