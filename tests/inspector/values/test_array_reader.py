"""The arrays of one site, against a model by hand, for every part and transform."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.values import array_cache
from nnx_inspector.inspector.values.device_tiles import DEVICE_TILES
from nnx_inspector.inspector.values.requests import readable_pass
from nnx_inspector.screen.values import blocks


def opened(insp, site, part="output", clean=False):
    return inside(insp).array_reader.read(readable_pass(inside(insp).core), site, part, clean=clean)


def axes(insp, site, part="output"):
    return [(held.name, held.axes) for held in opened(insp, site, part).arrays]


def by_hand(model, x, scale=1.0):
    f, s = model.a, model.b
    wide = lambda a: np.asarray(a, np.float64)  # noqa: E731
    hidden = (wide(x) @ wide(f.kernel[...]) + wide(f.bias[...])) * scale
    out = np.tanh(hidden) @ wide(s.kernel[...]) + wide(s.bias[...])
    # d sum(out ** 2) / d hidden
    back = (2 * out) @ wide(s.kernel[...]).T * (1 - np.tanh(hidden) ** 2)
    return hidden, out, back


def loss(model, x):
    return (model(x) ** 2).sum()


@pytest.fixture
def net(inspect):
    return inspect(models.TwoLayers(nnx.Rngs(0)), models.batch(5, 3))


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2e-5, atol=2e-6)


def test_outputs_inputs_and_gradients_are_those_of_a_model_by_hand(net):
    x = models.batch(5, 3)
    net.step(loss, x)
    hidden, out, back = by_hand(net.model, x)
    close(net.values("a"), hidden)
    close(net.values("a", part="input"), x)
    close(net.values("b", part="input"), np.tanh(hidden))
    close(net.values(""), out)
    close(net.values("a", part="gradient"), back)
    close(net.values("", part="gradient"), 2 * out)
    named = net.values("a", part="parameter")
    assert named["kernel"] is net.model.a.kernel.get_raw_value()


def test_what_is_perturbed_is_shown_perturbed_and_clean_beside_it(net):
    x = models.batch(5, 3)
    net.step(loss, x)
    handle = net.perturb("a", nni.Scale(0.5))
    assert net.effect is not None  # waits until its program is compiled
    hidden, out, back = by_hand(net.model, x, 0.5)
    close(net.values("a"), hidden)
    close(net.values(""), out)
    close(net.values("a", part="gradient"), back)
    close(net.values("a", clean=True), by_hand(net.model, x)[0])
    close(net.values("a", part="gradient", clean=True), by_hand(net.model, x)[2])
    programs = len(
        inside(net).array_reader._passes._programs
    )  # that none is made shows in time only
    handle.perturbation = nni.Scale(0.25)
    close(net.values("a"), by_hand(net.model, x, 0.25)[0])
    assert len(inside(net).array_reader._passes._programs) == programs
    net.perturb("a", nni.Shift(jnp.ones(4), 2.0))
    assert net.effect is not None  # waits until its program is compiled
    close(net.values("a"), by_hand(net.model, x, 0.25)[0] + 2)


def test_nothing_of_the_model_changes(inspect):
    model = models.CNN(nnx.Rngs(0))
    insp = inspect(model, models.batch(4, 5, 5, 1))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    for site in ("conv", "norm", "dropout", "head", ""):
        insp.values(site)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_values_are_those_of_the_model_now(net):
    x = models.batch(5, 3)
    again = opened(net, "a")
    assert opened(net, "a") is again  # nothing changed: nothing is computed
    net.model.a.bias[...] = net.model.a.bias[...] + 3
    close(net.values("a"), by_hand(net.model, x)[0])
    net.run(x * 2)
    close(net.values("a"), by_hand(net.model, x * 2)[0])


def test_layers_of_a_scan_are_an_axis(inspect):
    model, x = models.Stacked(nnx.Rngs(0)), models.batch(4, 3)
    insp = inspect(model, x)
    insp.step(loss, x)
    kernel, bias = (
        np.asarray(p[...]) for p in (model.blocks.linear.kernel, model.blocks.linear.bias)
    )
    rows, at = [], np.asarray(x)
    for w, b in zip(kernel, bias, strict=True):
        rows.append(at @ w + b)
        at = at + np.tanh(rows[-1])
    close(insp.values("blocks/linear"), np.stack(rows))
    close(insp.values("blocks/linear[1]"), rows[1])
    close(insp.values("blocks[1]/linear"), rows[1])  # as `nni.sweep` writes it
    with pytest.raises(ValueError, match=r"'blocks/linear' has no layer \[9\]"):
        insp.values("blocks/linear[9]")
    with pytest.raises(InspectorError, match="one array each"):
        insp.values("blocks/linear[1]", part="parameter")
    assert axes(insp, "blocks/linear") == [("", ("layer", "batch", "feature"))]
    back, per_layer = 2 * at, []
    for w, row in zip(kernel[::-1], rows[::-1], strict=True):
        per_layer.insert(0, back * (1 - np.tanh(row) ** 2))
        back = back + per_layer[0] @ w.T
    close(insp.values("blocks/linear", part="gradient"), np.stack(per_layer))
    close(insp.values("blocks[1]/linear", part="gradient"), per_layer[1])
    names = dict(axes(insp, "blocks/linear", "parameter"))
    assert names["kernel"] == ("layer", "in feature", "out feature")


def test_a_vmap_is_an_axis_in_front(inspect):
    class Mapped(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return nnx.vmap(lambda m, x: m(x), in_axes=(None, 1), out_axes=1)(self.linear, x)

    x = models.batch(3, 6)  # the batch is the second axis
    insp = inspect(Mapped(nnx.Rngs(0)), x)
    insp.step(loss, x)
    wanted = np.asarray(x).T @ np.asarray(insp.model.linear.kernel[...])
    close(insp.values("linear"), wanted)
    close(insp.values("linear", part="gradient"), 2 * wanted)
    assert axes(insp, "linear") == [("", ("batch", "feature"))]
    insp = inspect(models.Ensemble(nnx.Rngs(0)), models.batch(4, 3))
    assert axes(insp, "members") == [("", ("member", "batch", "feature"))]


class Odd(nnx.Module):
    """A dict, two calls, and arrays of every kind."""

    def __init__(self, rngs):
        self.part = Part()

    def __call__(self, x, *, flag=None):
        first = self.part(x, scale=jnp.float32(2))
        self.part(x * 3, scale=jnp.float32(4))
        return first["whole"].sum() + x.sum()


class Part(nnx.Module):
    def __call__(self, x, *, scale):
        return {
            "whole": x * scale,
            "half": x.astype(jnp.bfloat16),
            "count": jnp.arange(4),
            "sign": x > 0,
            "wave": x + 1j * x,
            "none": jnp.zeros((0, 3)),
            "text": "hello",
        }


def test_every_array_of_every_call_of_a_pytree(inspect):
    x = models.batch(5, 3)
    insp = inspect(Odd(nnx.Rngs(0)), x)
    with pytest.raises(InspectorError, match=r"called 2 times. Choose one of them: call=0"):
        insp.values("part")
    with pytest.raises(IndexError, match="no call 2"):
        insp.values("part", call=2)
    for call, by in ((0, 1), (1, 3)):
        found = insp.values("part", call=call)
        close(found["whole"], np.asarray(x) * by * (2 + 2 * call))
        np.testing.assert_array_equal(found["half"], (x * by).astype(jnp.bfloat16))
        np.testing.assert_array_equal(found["count"], np.arange(4))
        np.testing.assert_array_equal(found["sign"], np.asarray(x) > 0)
        np.testing.assert_array_equal(found["wave"], np.asarray(x) * np.float32(by) * (1 + 1j))
        assert found["none"].shape == (0, 3)
        assert found["text"] is None
    held = opened(insp, "part").arrays
    assert [h.call for h in held] == [0] * 6 + [1] * 6
    assert {h.name for h in held} == {"whole", "half", "count", "sign", "wave", "none"}
    assert [h.name for h in opened(insp, "part", "input").arrays] == ["x", "scale"] * 2
    insp.step(lambda m, x: m(x), x)
    back = insp.values("part", part="gradient", call=0)
    close(back["whole"], np.ones((5, 3)))
    assert back["count"] is None


def test_attention_weights_are_known_by_their_sums(inspect):
    class Weights(nnx.Module):
        def __call__(self, x):
            return nnx.softmax(jnp.einsum("bqhd,bkhd->bhqk", x, x))

    class Model(nnx.Module):
        def __init__(self):
            self.weights = Weights()

        def __call__(self, x):
            return self.weights(x)

    insp = inspect(Model(), models.batch(2, 5, 3, 4))
    assert axes(insp, "weights") == [("", ("batch", "head", "query", "key"))]
    assert axes(insp, "weights", "input") == [("", ("batch", "axis 1", "axis 2", "axis 3"))]


def test_heads_are_no_pictures_in_a_model_that_convolves(inspect):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.patch = nnx.Conv(1, 6, (2, 2), strides=(2, 2), rngs=rngs)
            self.attn = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.attn(self.patch(x).reshape(len(x), -1, 6))

    insp = inspect(Model(nnx.Rngs(0)), models.batch(2, 4, 4, 1))
    assert axes(insp, "attn/value") == [("", ("batch", "position", "head", "feature"))]


@pytest.mark.filterwarnings(r"ignore:\s*Using 'Module:DeprecationWarning")
def test_attention_of_rank_3_and_weights_that_are_sown(inspect):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            y = self.attn(x, sow_weights=True)
            self.sow(nnx.Intermediate, "one", nnx.softmax(jnp.einsum("bqd,bkd->bqk", x, x)))
            self.sow(nnx.Intermediate, "heads", nnx.softmax(jnp.einsum("qhd,khd->hqk", *[y] * 2)))
            self.sow(nnx.Intermediate, "classes", nnx.softmax(self.head(y)))
            return y

    insp = inspect(Model(nnx.Rngs(0)), models.batch(2, 5, 4))
    assert axes(insp, "attn/attention_weights") == [("", ("batch", "head", "query", "key"))]
    assert axes(insp, "attn", "attention") == [("", ("batch", "head", "query", "key"))]
    shown = insp.values("attn@attention")
    np.testing.assert_array_equal(shown, insp.values("attn", part="attention"))
    np.testing.assert_allclose(shown, insp.values("attn/attention_weights"), rtol=1e-6)
    insp.show_operations("attn")  # the pattern has a row of its own now
    assert readable_pass(inside(insp).core).parts("attn") == (
        "output",
        "input",
        "parameter",
        "attention",
    )
    np.testing.assert_array_equal(shown, insp.values("attn", part="attention"))
    with pytest.raises(InspectorError, match=r"'head' computes no attention.*'attn'"):
        opened(insp, "head", "attention")
    with pytest.raises(InspectorError, match=r"'head@softmax' is not called.*'head@\*'"):
        insp.values("head@softmax")
    assert opened(insp, "head").notes == ()
    assert axes(insp, "one") == [("", ("batch", "query", "key"))]
    assert axes(insp, "heads") == [("", ("head", "query", "key"))]
    assert axes(insp, "classes") == [("", ("batch", "position", "feature"))]


def test_axes_of_a_convolution(inspect):
    insp = inspect(models.CNN(nnx.Rngs(0)), models.batch(4, 5, 5, 1))
    assert axes(insp, "conv") == [("", ("batch", "height", "width", "channel"))]
    assert axes(insp, "norm") == [("", ("batch", "height", "width", "channel"))]
    assert axes(insp, "head") == [("", ("batch", "feature"))]
    kernel = dict(axes(insp, "conv", "parameter"))["kernel"]
    assert kernel == ("kernel height", "kernel width", "in channel", "out channel")
    assert insp.values("dropout", part="parameter")["rngs/key"].dtype == jnp.uint32


# ------------------------------------------------------- what cannot be shown


def test_why_there_is_nothing_is_told(net):
    with pytest.raises(InspectorError, match=r"no gradient of 'a' in a forward pass.*insp.step"):
        net.values("a", part="gradient")
    with pytest.raises(ValueError, match="'frist'"):
        net.values("frist")


def test_a_while_loop_and_an_untaken_branch_are_told(inspect):
    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.other = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.while_loop(
                lambda c: c[2] < 2, lambda c: (c[0], c[0](c[1]), c[2] + 1), (self.inner, x, 0)
            )[1]
            return nnx.cond(x.sum() > 1e9, lambda m, x: m(x), lambda m, x: x, self.other, x)

    insp = inspect(Loop(nnx.Rngs(0)), models.batch(2, 3))
    with pytest.raises(InspectorError, match="cannot leave the loop around it: a while loop"):
        insp.values("inner")
    with pytest.raises(InspectorError, match="in a branch that this pass did not take"):
        insp.values("other")


def test_a_donated_model_is_told_and_kept_values_stay(net):
    x = models.batch(5, 3)
    kept = opened(net, "a")
    number = opened(net, "a", "parameter").arrays[0].number
    optimizer = nnx.Optimizer(net.model, optax.sgd(0.1), wrt=nnx.Param)
    graphdef, state = nnx.split((net.model, optimizer))

    @jax.jit
    def step(state):
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, nnx.grad(loss)(model, x))
        return nnx.state((model, optimizer))

    jax.jit(step, donate_argnums=0)(state)  # the new arrays are never written back
    for leaf in jax.tree.leaves(nnx.state(net.model)):
        leaf.delete() if not leaf.is_deleted() else None
    with pytest.raises(InspectorError, match="cannot be read now: a training step has taken"):
        net.values("b")
    with pytest.raises(InspectorError, match="cannot be read now"):
        net.values("b", part="parameter")
    with pytest.raises(
        InspectorError, match=r"bias was donated .* since it was read. Read it again"
    ):
        inside(net).array_reader.cache.get(number)
    assert inside(net).array_reader.cache.get(kept.arrays[0].number).shape == (5, 4)


def test_a_watched_loop_is_not_disturbed(net):
    x = models.batch(5, 3)
    optimizer = nnx.Optimizer(net.model, optax.sgd(0.01), wrt=nnx.Param)
    traces = []

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        traces.append(1)
        optimizer.update(model, nnx.grad(loss)(model, x))

    for number, _ in enumerate(net.watch(range(6), every=2)):
        step(net.model, optimizer, x)
        close(net.values("a"), by_hand(net.model, x)[0])
        assert "a loop is running" in readable_pass(inside(net).core).source
        if number == 1:
            before = len(traces)
    assert len(traces) == before
    assert len(net.recording) == 3


# ------------------------------------------------------------- what is kept


def test_the_cache_keeps_the_last_sets_within_its_bounds(net, monkeypatch):
    sites = [("a", "output"), ("b", "output"), ("a", "input")]
    numbers = [opened(net, *what).arrays[0].number for what in sites]
    assert [inside(net).array_reader.cache.get(n).ndim for n in numbers] == [2, 2, 2]
    monkeypatch.setattr(array_cache, "MOST_BYTES", 100)
    newest = opened(net, "", "input").arrays[0].number  # 60 bytes: no room for another
    assert inside(net).array_reader.cache.get(newest).shape == (5, 3)
    for number in numbers:
        with pytest.raises(InspectorError, match="no longer kept: others were opened since"):
            inside(net).array_reader.cache.get(number)
    monkeypatch.setattr(array_cache, "MOST_BYTES", 1)
    assert opened(net, "a").arrays[0].value.shape == (5, 4)  # the newest, whatever its size


def test_norms_are_made_once_and_are_numpys(net):
    held = opened(net, "a").arrays[0]
    found = inside(net).array_reader.cache.get(held.number, 1)
    np.testing.assert_allclose(found, np.linalg.norm(held.value, axis=1), rtol=1e-6)
    assert inside(net).array_reader.cache.get(held.number, 1) is found
    with pytest.raises(ValueError, match="no axis 2"):
        inside(net).array_reader.cache.get(held.number, 2)


def test_closing_frees_what_was_opened(inspect):
    insp = inspect(models.TwoLayers(nnx.Rngs(0)), models.batch(5, 3))
    number = opened(insp, "a").arrays[0].number
    insp.close()
    with pytest.raises(InspectorError):
        inside(insp).array_reader.cache.get(number)


@pytest.mark.long
def test_an_array_of_1_gb_opens_without_being_fetched(inspect):
    class Wide(nnx.Module):
        def __call__(self, x):
            return x[:, None] * x

    x = jnp.arange(16384, dtype=jnp.float32)
    insp = inspect(Wide(), x)
    held = opened(insp, "").arrays[0]
    assert held.value.nbytes == 1 << 30
    whole = blocks.Window(axes=(None, 0, 1), spans=((0, 1), *[(0, 16384)] * 2), index=(0, 0))
    found = blocks.reduce_blocks(held.value, whole, (1, 256, 256), tiles=DEVICE_TILES)
    assert found.fetched < 1 << 20
    middle = np.arange(256) * 64 + 31.5
    np.testing.assert_allclose(found.mean[0], np.outer(middle, middle), rtol=1e-5)
