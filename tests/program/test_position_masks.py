"""The positions that count, in records: NumPy on the chosen positions, through every transform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_examples import examples
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from summary_oracle import check, check_units

import nnx_inspector as nni

B, L, D, V = 4, 6, 8, 11
WHERE = lambda tokens, *_: tokens != 0  # noqa: E731


def tokens_of(seed: int = 0) -> Any:
    """Rows of different lengths, the rest 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, (B, 1))
    return jnp.asarray(np.where(np.arange(L) < lengths, rng.integers(1, V, (B, L)), 0))


T = tokens_of()
W = np.asarray(T != 0)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """A network of tokens, whose blocks are called by a function, and which pools at the end."""

    def __init__(self, how: str = "plain", rngs: nnx.Rngs | None = None):
        rngs = rngs or nnx.Rngs(0)
        self.how = how
        self.embed = nnx.Embed(V, D, rngs=rngs)
        if how == "scan":
            make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs)))
            self.blocks = make(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.how == "scan":
            x = nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        else:
            for one in self.blocks:
                x = CALLS[self.how](one, x)
        if self.how == "reads" and int(tokens.sum()) < 0:
            return x
        return self.head(x.mean(-2))


@nnx.jit
def jitted(one: Block, x: jax.Array) -> jax.Array:
    return one(x)


def branched(one: Block, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > -1e9, lambda one, x: one(x), lambda one, x: x, one, x)


CALLS: dict[str, Any] = {
    "plain": lambda one, x: one(x),
    "reads": lambda one, x: one(x),
    "remat": nnx.remat(lambda one, x: one(x)),
    "jit": jitted,
    "cond": branched,
    "vmap": lambda one, x: nnx.vmap(lambda one, x: one(x), in_axes=(None, 0))(one, x),
}
HOW = ("plain", "remat", "jit", "cond", "vmap", "scan", "reads")


def kept(model: Net, tokens: Any = T) -> dict[str, np.ndarray]:
    """What each site returns, by the plain model: a row for each layer of a stack."""
    _, record = nni.capture(model, values=True)(tokens)
    return {site: np.asarray(record[site].values) for site in record}


def chosen(x: np.ndarray, w: np.ndarray = W) -> np.ndarray:
    """The values at the positions of a mask; a stack has them in each layer."""
    if x.shape[: w.ndim] == w.shape and x.ndim > w.ndim:
        return x[w]
    return x[:, w] if x.ndim > w.ndim + 1 and x.shape[1 : w.ndim + 1] == w.shape else x


def check_sizes(record: Any, plain: Any) -> None:
    assert set(record) == set(plain)
    for site, x in plain.items():
        check(record[site].output, chosen(x), tolerance=1e-4)
        assert record[site].counted is (x.shape != (B, 3))


@pytest.mark.parametrize("how", HOW)
def test_each_site_is_measured_where_positions_count(how: str) -> None:
    model = Net(how)
    plain = kept(model)
    y, record = nni.capture(model, where=WHERE)(T)
    np.testing.assert_allclose(y, model(T), rtol=1e-6)
    check_sizes(record, plain)


@pytest.mark.parametrize("how", [how for how in HOW if how != "reads"])
def test_within_the_users_own_jit(how: str) -> None:
    model = Net(how)
    plain = kept(model)
    run = nnx.jit(lambda model, tokens: nni.capture(model, where=WHERE)(tokens)[1])
    check_sizes(run(model, T), plain)
    other = tokens_of(1)  # another mask of the same program
    found = run(model, other)["blocks" if how == "scan" else "blocks/1"].output
    expected = kept(model, other)["blocks" if how == "scan" else "blocks/1"]
    check(found, chosen(expected, np.asarray(other != 0)), tolerance=1e-4)


def test_inputs_and_units_count_the_same_positions() -> None:
    model, plain = Net(), kept(Net())
    _, record = nni.capture(model, where=WHERE, units=-1)(T)
    check(record["embed"].input, np.asarray(T)[W])
    check(record["blocks/0"].input, plain["embed"][W])
    for site, x in plain.items():
        check_units(record[site].units, chosen(x).reshape(-1, x.shape[-1]))


def gradients(model: Net, loss: Any, tokens: Any) -> dict[str, np.ndarray]:
    """The gradient of what each site returns: that of a zero which is added to it."""
    zeros = {site: jnp.zeros(x.shape) for site, x in kept(model, tokens).items()}

    def of(zeros: Any) -> Any:
        def add(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            return next_fun(*args, **kwargs) + zeros[context.path]

        with nni.intercept_methods(add):
            return loss(model, tokens)

    return {site: np.asarray(x) for site, x in jax.grad(of)(zeros).items()}


def squares(model: Net, tokens: Any) -> Any:
    return (model(tokens) ** 2).sum()


@pytest.mark.parametrize("how", ["plain", "remat", "jit", "cond", "vmap", "reads"])
@pytest.mark.parametrize("within", ["alone", "jit"])
def test_gradients_count_the_same_positions(how: str, within: str) -> None:
    if (how, within) == ("reads", "jit"):
        return
    model, expected = Net(how), gradients(Net("plain"), squares, T)
    run: Any = nni.value_and_grad(squares, where=WHERE)
    (_, record), grads = (nnx.jit(run) if within == "jit" else run)(model, T)
    _, plain = nnx.value_and_grad(squares)(model, T)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, plain)
    for site, x in expected.items():
        check(record[site].gradient, chosen(x), tolerance=1e-3)


def test_gradients_of_a_stack_are_those_of_its_layers() -> None:
    scanned, listed = Net("scan"), Net()
    for i, one in enumerate(listed.blocks):
        nnx.update(one, jax.tree.map(lambda x, i=i: x[i], nnx.state(scanned.blocks)))
    for name in ("embed", "head"):
        nnx.update(getattr(listed, name), nnx.state(getattr(scanned, name)))
    expected = gradients(listed, squares, T)
    (_, record), _ = nni.value_and_grad(squares, where=WHERE)(scanned, T)
    for i in range(3):
        for part in ("", "/up", "/down"):
            found = record["blocks" + part].row(i).gradient
            check(found, expected[f"blocks/{i}{part}"][W], tolerance=1e-3)


def test_examples_of_a_vmap_have_masks_of_their_own() -> None:
    model, plain = Net(), kept(Net())

    def loss(model: Net, tokens: Any) -> Any:
        return jax.vmap(lambda one: (model(one) ** 2).sum())(tokens).sum()

    (_, record), _ = nnx.jit(nni.value_and_grad(loss, where=WHERE))(model, T)
    expected = gradients(model, squares, T)
    for site, x in plain.items():
        if site not in ("", "head"):
            check(record[site].output, x[W], tolerance=1e-4)
            check(record[site].gradient, expected[site][W], tolerance=1e-3)


def test_members_of_an_ensemble_share_a_mask() -> None:
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Net(rngs=rngs)))
    members = make(nnx.Rngs(0))
    each = nnx.vmap(lambda model, tokens: model(tokens), in_axes=(0, None))
    _, record = nni.capture(each, where=WHERE)(members, T)
    for i in range(2):
        one = Net()
        nnx.update(one, jax.tree.map(lambda x, i=i: x[i], nnx.state(members)))
        plain = kept(one)
        check(record["blocks/1"].row(i).output, plain["blocks/1"][W], tolerance=1e-4)
        check(record["head"].row(i).output, plain["head"], tolerance=1e-4)


def test_microbatches_have_masks_of_their_own() -> None:
    model, batches = Net(), jnp.stack([tokens_of(i) for i in range(3)])

    @nnx.jit
    def accumulated(model: Net, batches: Any) -> Any:
        def one(total: Any, tokens: Any) -> Any:
            (loss, record), _ = nni.value_and_grad(squares, where=WHERE)(model, tokens)
            return total + loss, record

        return jax.lax.scan(one, 0.0, batches)

    _, records = accumulated(model, batches)
    for i, tokens in enumerate(batches):
        w = np.asarray(tokens != 0)
        found = records.row(i)["blocks/2"]
        check(found.output, kept(model, tokens)["blocks/2"][w], tolerance=1e-4)
        check(found.gradient, gradients(model, squares, tokens)["blocks/2"][w], tolerance=1e-3)


def test_a_scan_that_is_differentiated_as_a_whole() -> None:
    model, batches = Net(), jnp.stack([tokens_of(i) for i in range(3)])

    def loss(model: Net, batches: Any) -> Any:
        step = lambda total, tokens: (total + squares(model, tokens), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, batches)[0]

    (_, record), _ = nnx.jit(nni.value_and_grad(loss, where=WHERE))(model, batches)
    for i, tokens in enumerate(batches):
        w, found = np.asarray(tokens != 0), record["blocks/2"].row(i)
        check(found.output, kept(model, tokens)["blocks/2"][w], tolerance=1e-4)
        check(found.gradient, gradients(model, squares, tokens)["blocks/2"][w], tolerance=1e-3)


def test_an_attention_counts_its_queries() -> None:
    attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, L, D)), jnp.float32)
    how: Any = {"only": "@attention"}
    _, plain = nni.capture(attention, values=True, **how)(x)
    _, record = nni.capture(attention, where=W, **how)(x)
    (site,) = record
    pattern = np.asarray(plain[site].values)
    assert pattern.shape == (B, 2, L, L)
    check(record[site].output, np.moveaxis(pattern, 2, 1)[W], tolerance=1e-4)


@examples(5, of=50)
@given(st.integers(0, 2**32), st.sampled_from(["both", "batch", "row"]))
def test_any_mask_of_the_batch(seed: int, form: str) -> None:
    shape = {"both": (B, L), "batch": (B,), "row": (1, L)}[form]
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask.flat[0] = True
    whole = np.broadcast_to(mask if mask.ndim > 1 else mask[:, None], (B, L))
    _, record = nni.capture(MODEL, where=mask)(T)
    for site, x in PLAIN.items():
        expected = x[whole] if x.ndim > 2 else x[mask] if form == "batch" else x
        check(record[site].output, expected, tolerance=1e-4)


MODEL, PLAIN = Net(), kept(Net())


def test_only_some_sites_are_selected() -> None:
    """The mask is that of the model's call, not of the first selected one."""
    _, record = nni.capture(MODEL, only="blocks/1", where=WHERE)(T)
    check(record["blocks/1"].output, PLAIN["blocks/1"][W], tolerance=1e-4)


def test_without_it_nothing_is_counted_apart() -> None:
    _, record = nni.capture(MODEL)(T)
    assert record["embed"].counted is None
    assert record["embed"].output.size == B * L * D


class Two(nnx.Module):
    def __init__(self) -> None:
        self.net = Net()

    def encode(self, tokens: Any, scale: Any = 1.0) -> Any:
        return scale * self.net.embed(tokens)

    def __call__(self, tokens: Any) -> Any:
        return self.net(tokens)


def test_the_arguments_are_those_of_the_call() -> None:
    """Positions and keywords as they are written; another method has its own."""
    model, seen = Two(), list[Any]()

    def where(*args: Any, **kwargs: Any) -> Any:
        seen.append((len(args), sorted(kwargs)))
        return (args[0] if args else kwargs["tokens"]) != 0

    _, record = nni.capture(model.encode, where=where)(tokens=T, scale=2.0)
    assert seen[-1] == (0, ["scale", "tokens"])
    assert record["net/embed"].output.size == W.sum() * D
    _, record = nni.capture(lambda model, tokens: model(tokens), where=where)(model, T)
    assert seen[-1] == (1, [])


def test_a_call_for_which_it_returns_none_is_measured_whole() -> None:
    _, record = nni.capture(MODEL, where=lambda *_: None)(T)
    assert (record["embed"].counted, record["embed"].output.size) == (None, B * L * D)


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        (lambda tokens: tokens, nni.InspectorError, "int32[4,6]"),
        (lambda tokens: (tokens != 0).astype(float), nni.InspectorError, "float32[4,6]"),
        (lambda tokens: tokens.missing, nni.InspectorError, "Net.__call__ and raised Attribute"),
        (lambda: True, nni.InspectorError, "lambda tokens, *_: tokens != 0"),
        (np.ones((B, L)), TypeError, "float64[4,6]"),
        (np.zeros((B, L), bool), ValueError, "all False"),
        ("tokens", TypeError, "str"),
    ],
)
def test_what_is_no_mask_is_an_error(where: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind) as found:
        nni.capture(MODEL, where=where)(T)
    assert words in str(found.value)


def test_a_traced_mask_is_an_error() -> None:
    with pytest.raises(TypeError, match="traced array"):
        jax.jit(lambda mask: nni.capture(MODEL, where=mask))(W)


def test_a_mask_of_another_shape_warns_and_measures_all() -> None:
    with pytest.warns(nni.InspectorWarning, match=r"bool\[4,7\], which fits none"):
        _, record = nni.capture(MODEL, where=np.ones((B, L + 1), bool))(T)
    assert record["embed"].counted is False
    assert record["embed"].output.size == B * L * D


def test_a_mask_that_selects_nothing_has_empty_figures() -> None:
    _, record = nni.capture(MODEL, where=WHERE)(jnp.zeros((B, L), int))
    assert record["embed"].output.size == 0
    assert record["head"].output.size == B * 3


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
@pytest.mark.parametrize("part", ["batch", "length"])
def test_devices_hold_parts(part: str) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, V, (8, 8)) * (np.arange(8) < rng.integers(1, 9, (8, 1)))
    spec = P("x") if part == "batch" else P(None, "x")
    laid = jax.device_put(jnp.asarray(tokens), NamedSharding(mesh, spec))
    plain, w = kept(MODEL, jnp.asarray(tokens)), tokens != 0
    run = nnx.jit(nni.value_and_grad(squares, where=WHERE))
    (_, record), _ = run(MODEL, laid)
    expected = gradients(MODEL, squares, jnp.asarray(tokens))
    for site, x in plain.items():
        pairs = [(record[site].output, x), (record[site].gradient, expected[site])]
        for found, of in pairs:  # devices add up in another order
            values = chosen(of, w).astype(np.float64)
            assert (found.size, found.zeros) == (values.size, (values == 0).sum())
            figures = values.mean(), values.std(), values.min(), values.max()
            close = pytest.approx(figures, rel=1e-4, abs=1e-5)
            assert (found.mean, found.std, found.min, found.max) == close
