"""The figures of a strip of text, against the values and gradients themselves in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.inspector import export
from nnx_inspector.screen import protocol

IDS = np.array([[1, 4, 2], [3, 3, 0]], np.int32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.up(x))


class Words(nnx.Module):
    """Words, an attention and a stack of two scanned layers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)

        @nnx.vmap
        def layers(rngs):
            return Block(rngs)

        self.layers = layers(rngs.split(2))
        self.head = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, tokens):
        x = self.attn(self.embed(tokens))
        x, _ = nnx.scan(lambda x, layer: (layer(x), None), in_axes=(nnx.Carry, 0))(x, self.layers)
        return self.head(x)


def loss(model, tokens, targets):
    logits = jax.nn.log_softmax(model(tokens))
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


@pytest.fixture(scope="module")
def made():
    only = ["**", "attn@attention"]
    made = nni.Inspector(Words(nnx.Rngs(0)), IDS, decode=list("abcdef"), only=only, display=False)
    yield made
    made.close()


@pytest.fixture
def insp(made):
    made.run(IDS)  # whatever another test has run last
    return made


@pytest.mark.parametrize("site", ["", "embed", "attn", "head"])
def test_the_figures_are_those_of_the_values(insp, site):
    values = np.asarray(insp.values(site), np.float64)
    found = insp.words(site, 1, unit=2)
    assert found.word.tolist() == ["d", "d", "a"]
    assert list(found.columns) == ["position", "word", "norm", "unit"]
    np.testing.assert_allclose(found.norm, np.sqrt((values[1] ** 2).sum(-1)), rtol=1e-5)
    np.testing.assert_allclose(found.unit, values[1, :, 2], rtol=1e-5)


def test_the_gradients_are_those_of_a_step(insp):
    insp.step(loss, IDS, (IDS + 1) % 6)
    found = insp.words("embed", 0)
    values = np.asarray(insp.values("embed"), np.float64)[0]
    slopes = np.asarray(insp.values("embed", part="gradient"), np.float64)[0]
    np.testing.assert_allclose(found.gradient, np.linalg.norm(slopes, axis=-1), rtol=1e-5)
    expected = (slopes * values).sum(-1)
    np.testing.assert_allclose(found.gradient_times_activation, expected, rtol=1e-4, atol=1e-9)


def test_heads_are_units_of_a_position(insp):
    values = np.asarray(insp.values("attn/query"), np.float64)[0]  # position, head, feature
    found = insp.words("attn/query", unit=3)
    np.testing.assert_allclose(found.norm, np.sqrt((values**2).sum((1, 2))), rtol=1e-5)
    np.testing.assert_allclose(found.unit, values[:, 1, 1], rtol=1e-5)


def test_one_layer_of_a_stack(insp):
    values = np.asarray(insp.values("layers/up"), np.float64)  # layer, batch, position, feature
    found = insp.words("layers[1]/up", 1, unit=0)
    np.testing.assert_allclose(found.norm, np.linalg.norm(values[1, 1], axis=-1), rtol=1e-5)
    with pytest.raises(nni.InspectorError, match=r"choose one, 'layers/up\[0\]'"):
        insp.words("layers/up")


def test_a_single_sequence_has_no_batch(inspect):
    """Without an axis of examples, the first axis is that of the positions."""

    class Alone(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(6, 4, rngs=rngs)
            self.heads = nnx.LinearGeneral(4, (2, 3), rngs=rngs)

        def __call__(self, tokens):
            return jnp.tanh(self.heads(self.embed(tokens)))

    insp = inspect(Alone(nnx.Rngs(0)), IDS[0], decode=list("abcdef"))
    for site, axes in {"embed": (1,), "heads": (1, 2)}.items():
        values = np.asarray(insp.values(site), np.float64)
        found = insp.words(site)
        assert found.word.tolist() == ["b", "e", "c"]
        np.testing.assert_allclose(found.norm, np.sqrt((values**2).sum(axes)), rtol=1e-5)


def test_of_several_axes_the_chosen_one_is_that_of_the_words(insp):
    values = np.asarray(insp.values("attn@attention"), np.float64)[1]  # head, query, key
    for axis, rows in ((None, 1), (2, 1), (3, 2), (-1, 2)):
        found = insp.words("attn@attention", 1, unit=2, axis=axis)
        by_word = np.moveaxis(values, rows, 0).reshape(3, -1)
        np.testing.assert_allclose(found.norm, np.linalg.norm(by_word, axis=-1), rtol=1e-5)
        np.testing.assert_allclose(found.unit, by_word[:, 2], rtol=1e-5)
    for axis in (0, 1, 4, -5):
        with pytest.raises(nni.InspectorError, match=f"no array with an axis {axis} of the 3"):
            insp.words("attn@attention", axis=axis)


class TimeFirst(nnx.Module):
    """Its arrays have the positions first, and names of axes are only known of the embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.turn = Turn()

    def __call__(self, tokens):
        return self.turn(self.embed(tokens))


class Turn(nnx.Module):
    def __call__(self, x):
        return (x[..., None] * jnp.arange(1.0, 6)).swapaxes(0, 1)  # position, batch, feature, 5


@pytest.mark.parametrize("ids", [IDS, np.array([[1, 4, 2], [3, 3, 0], [5, 1, 1]], np.int32)])
def test_an_axis_that_is_not_found_or_wrongly_can_be_chosen(inspect, ids):
    insp = inspect(TimeFirst(nnx.Rngs(0)), ids, decode=list("abcdef"))
    values = np.asarray(insp.values("turn"), np.float64)
    found = insp.words("turn", 1, unit=5, axis=0)
    np.testing.assert_allclose(found.norm, np.linalg.norm(values[:, 1], axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found.unit, values[:, 1].reshape(3, -1)[:, 5], rtol=1e-5)
    with pytest.raises(nni.InspectorError, match=r"not known which axis .* 0 \("):
        insp.words("turn")


def test_what_has_no_positions_says_so(inspect, insp):
    insp.run(IDS[:, :2])
    assert insp.words("head").word.tolist() == ["b", "e"]
    with pytest.raises(IndexError, match="2 examples: there is no example 2"):
        insp.words("head", 2)
    with pytest.raises(IndexError, match="6 units at each position: there is no unit 6"):
        insp.words("head", unit=6)
    other = inspect(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    with pytest.raises(nni.InspectorError, match="decode="):
        other.words("")


def test_another_length_has_no_words(inspect):
    class Pooled(Words):
        def __call__(self, tokens):
            return self.head(self.embed(tokens)[:, 1:])

    insp = inspect(Pooled(nnx.Rngs(0)), IDS, decode=str)
    with pytest.raises(nni.InspectorError, match="no array with an axis of the 3 positions"):
        insp.words("head")


def test_the_browser_gets_the_same_figures(insp, monkeypatch):
    sent = []
    send = lambda message, buffer=None: sent.append((message, buffer))  # noqa: E731
    monkeypatch.setattr(inside(insp).view.screen, "send", send)
    inside(insp).commands.answer(
        protocol.ShowPositions(id=1, site="embed", example=1, unit=3, axis=None)
    )
    inside(insp).commands.wait()
    ((message, buffer),) = [one for one in sent if isinstance(one[0], protocol.Positions)]
    assert (message.figures, message.units, message.positions) == (("norm", "unit"), 4, 3)
    rows = np.frombuffer(buffer, "<f8").reshape(2, 3)
    np.testing.assert_array_equal(rows, insp.words("embed", 1, unit=3)[["norm", "unit"]].T)
    assert (message.along, message.axes) == (1, ("", "position", ""))
    inside(insp).commands.answer(
        protocol.ShowPositions(id=2, site="attn@attention", example=0, unit=0, axis=3)
    )
    inside(insp).commands.wait()
    message, buffer = [one for one in sent if isinstance(one[0], protocol.Positions)][-1]
    assert (message.axis, message.along, message.axes) == (3, 3, ("", "", "query", "key"))
    expected = insp.words("attn@attention", axis=3).norm
    np.testing.assert_array_equal(np.frombuffer(buffer, "<f8")[:3], expected)


def test_a_page_keeps_the_figures_that_were_shown(insp, monkeypatch):
    monkeypatch.setattr(export, "units_messages", lambda core, sites: {})  # these take long
    asked = protocol.ShowPositions(id=1, site="embed", example=1, unit=0, axis=None)
    inside(insp).commands.answer(asked)
    inside(insp).commands.wait()
    told = export.content_of(inside(insp).core, [inside(insp).view.last_message("inputs")])
    assert told.kept[0].examples[1].words == ("d", "d", "a")
    message, buffer = told.answers["positions"]["embed"]
    assert (message.example, len(buffer)) == (1, 2 * 3 * 8)
    assert "no figures" in told.answers["positions"]["head"]
    insp.run(IDS[:1])  # another batch: those figures are of other words
    assert "no figures" in export.content_of(inside(insp).core, []).answers["positions"]["embed"]
