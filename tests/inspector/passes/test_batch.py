"""The words of the batch of the last requested pass, on a real model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.passes.batch import arguments_of
from nnx_inspector.inspector.studies.studies import study_request
from nnx_inspector.screen import protocol

IDS = np.arange(6, dtype=np.int32).reshape(2, 3)


class Words(nnx.Module):
    """A model of tokens, with a second embedding for positions."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, 4, rngs=rngs)
        self.places = nnx.Embed(3, 4, rngs=rngs)
        self.head = nnx.Linear(4, 12, rngs=rngs)

    def __call__(self, tokens, mask=None, *, decode=False):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[-1]))
        return self.head(x if mask is None else x * mask[..., None])


def words(insp):
    message = inside(insp).view.last_message("inputs")
    return message.tokens, [list(example.words) for example in message.examples]


def loss(model, batch, weight):
    logits = model(batch["x"])
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)
    return -(rows * weight).mean()


@pytest.fixture
def model():
    return Words(nnx.Rngs(0))


def test_the_words_follow_the_pass_on_screen(inspect, model):
    insp = inspect(model, IDS, IDS % 2, decode=lambda i: f"w{i}")
    assert words(insp) == ("tokens", [["w0", "w1", "w2"], ["w3", "w4", "w5"]])
    insp.step(loss, {"y": IDS, "x": IDS + 6}, jnp.ones(1))
    assert words(insp) == ("batch/x", [["w6", "w7", "w8"], ["w9", "w10", "w11"]])
    insp.run(IDS[:1])
    assert words(insp) == ("tokens", [["w0", "w1", "w2"]])


def test_the_names_of_arguments_are_those_of_the_call(inspect, model):
    insp = inspect(lambda net, a, b: net(b, a), model, IDS % 2, IDS, decode=str)
    paths = [(one.path, one.place, one.embedded) for one in arguments_of(inside(insp).core)]
    assert paths == [("a", 0, False), ("b", 1, True)]


def test_the_words_are_those_that_the_embedding_receives(inspect, model):
    """A loss that predicts the next word calls the model with one word less."""

    def next_word(model, batch):
        logits = jax.nn.log_softmax(model(batch[:, :-1]))
        return -jnp.take_along_axis(logits, batch[:, 1:, None], -1).mean()

    insp = inspect(model, IDS, decode=lambda i: f"w{i}")
    insp.step(next_word, IDS)
    assert words(insp) == ("batch", [["w0", "w1"], ["w3", "w4"]])
    assert insp.words("head", 1).word.tolist() == ["w3", "w4"]
    insp.step(lambda model, batch: next_word(model, batch[:, ::-1]), IDS)
    assert words(insp) == ("batch", [["w2", "w1"], ["w5", "w4"]])


def test_what_several_embeddings_receive_is_not_guessed(inspect, model):
    def both(model, a, b):
        return model(a).mean() + model(b[:, 1:]).mean()

    insp = inspect(model, IDS, decode=str, tokens="b")
    assert "no argument tokens='b'" in inside(insp).view.last_message("inputs").problem
    insp.step(both, IDS, IDS + 1)
    assert words(insp) == ("", [])
    assert "'embed' receives several arrays" in inside(insp).view.last_message("inputs").problem
    insp.step(lambda model, a, b: both(model, b, a), IDS[:, :2], IDS)
    assert words(insp) == ("b", [["0", "1", "2"], ["3", "4", "5"]])


def test_a_decode_that_fails_is_a_notice_and_the_pass_goes_on(inspect, model):
    insp = inspect(model, IDS, decode=lambda i: 1 / 0)
    assert insp.run(IDS).shape == (2, 3, 12)
    assert insp.run(IDS + 1).shape == (2, 3, 12)
    (notice,) = inside(insp).notices
    assert "ZeroDivisionError" in notice
    assert words(insp)[1][0] == ["1", "2", "3"]


def test_a_keyword_of_the_model_stays_one(inspect, model):
    insp = inspect(model, IDS, decode=True)
    assert inside(insp).core.request.kwargs == {"decode": True}
    assert inside(insp).view.last_message("inputs") is None


def test_predictions_are_of_the_shown_pass(inspect):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = jnp.eye(2), jnp.zeros(2)
    x = jnp.array([[0.0, 1], [2, 1]])
    insp = inspect(model, x, labels=["cat", "dog"])
    assert inside(insp).view.last_message("inputs").examples == ()  # before the pass
    insp.run(x)
    examples = inside(insp).view.last_message("inputs").examples
    assert [example.prediction for example in examples] == ["dog", "cat"]


def test_studies_look_at_the_batch_of_the_last_pass(inspect, model):
    insp = inspect(model, IDS, decode=lambda i: f"w{i}")
    kept = inside(insp).view.last_message
    insp.attribute()
    assert kept("attribution").batch == kept("inputs").number
    assert (kept("inputs").kind, kept("inputs").other) == ("run", "")
    more = jnp.concatenate([IDS + 6, IDS + 6])
    insp.step(loss, {"y": more, "x": more}, jnp.ones(1))
    assert (kept("inputs").kind, kept("inputs").other) == ("step", "run")
    found = insp.attribute()
    assert found.scores.shape == (len(more), IDS.shape[1])
    assert np.allclose(found.scores, nni.attribute(model, more).scores, rtol=1e-5, atol=1e-7)
    assert kept("attribution").batch == kept("inputs").number
    assert list(kept("attribution").words) == [f"w{i}" for i in more[0]]
    # the other batch, by a click: all panels follow
    inside(insp).commands.answer(protocol.ChooseExample(id=1, example=1))
    inside(insp).commands.answer(protocol.ChooseBatch(id=2, which="run"))
    inside(insp).commands.wait()
    assert (kept("inputs").kind, kept("inputs").other) == ("run", "step")
    assert (kept("inputs").batch, kept("inputs").example) == (len(IDS), 1)
    assert insp.attribute().scores.shape == IDS.shape
    inside(insp).commands.answer(protocol.ChooseBatch(id=3, which="step"))
    inside(insp).commands.wait()
    assert kept("inputs").batch == len(more)


def test_a_step_that_calls_the_model_twice_is_studied_with_the_example(inspect, model):
    insp = inspect(model, IDS, decode=lambda i: f"w{i}")
    insp.step(lambda model, x: (model(x) - model(x + 1)).sum(), IDS + 6)
    found = insp.attribute()
    assert np.allclose(found.scores, nni.attribute(model, IDS).scores, rtol=1e-5, atol=1e-7)
    shown = inside(insp).view.last_message("attribution")
    assert "not one call" in shown.source
    assert shown.batch == -1
    assert list(shown.words) == [f"w{i}" for i in IDS[0]]


def test_another_batch_cannot_be_chosen_before_a_step(inspect, model):
    insp = inspect(model, IDS, decode=lambda i: f"w{i}")
    with pytest.raises(InspectorError, match="There was no step yet"):
        inside(insp).rerun.rerun_last("step")


class Translator(nnx.Module):
    """A model of two texts, whose attention reads one of them for the other."""

    def __init__(self, rngs):
        self.embed, self.embed_2 = nnx.Embed(20, 4, rngs=rngs), nnx.Embed(20, 4, rngs=rngs)
        how = dict(num_heads=2, in_features=4, decode=False, rngs=rngs)
        self.encode, self.cross = nnx.MultiHeadAttention(**how), nnx.MultiHeadAttention(**how)
        self.norm, self.head = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 20, rngs=rngs)

    def __call__(self, src, tgt, mask=None):
        seen = self.encode(self.embed(src), mask=mask)
        return self.head(self.norm(self.cross(self.embed_2(tgt), seen)))


class Segments(Words):
    """A model whose second ids belong to the first ones."""

    def __call__(self, tokens, segments):
        return self.head(self.embed(tokens) + self.places(segments))


@pytest.mark.parametrize("tokens", [pytest.param("src", marks=pytest.mark.long), "tgt"])
def test_words_stand_only_where_they_are_those_of_the_chosen_text(inspect, tokens):
    mask = jnp.ones((2, 1, 1, 3), bool)
    insp = inspect(Translator(nnx.Rngs(0)), IDS, IDS + 6, mask, decode=str, tokens=tokens)
    apart = set(inside(insp).view.last_message("inputs").apart)
    of_src, of_tgt = {"embed", "encode"}, {"embed_2", "head", "norm"}
    with_words, without = (of_src, of_tgt) if tokens == "src" else (of_tgt, of_src)
    assert not with_words & apart
    assert {*without, "cross", " input"} <= apart
    own = IDS[1] + 6 * (tokens == "tgt")
    for site in with_words:
        assert insp.words(site, 1).word.tolist() == [str(i) for i in own]
    with pytest.raises(nni.InspectorError, match="may be those of another argument than"):
        insp.words("cross", 1)
    insp.lens(unembed="head", norm="norm", sites=["encode", "cross"])
    assert inside(insp).view.last_message("lens").words == ()
    for site in ("encode", "head"):
        inside(insp).studies.start(study_request("examples", site=site))
        inside(insp).studies.wait()
        rows = inside(insp).view.last_message("examples").rows
        assert all((row.at >= 0) == (site in with_words) for row in rows)
        assert {len(row.words) for row in rows} == {3}


def test_ids_that_belong_together_leave_the_words(inspect):
    insp = inspect(Segments(nnx.Rngs(0)), IDS, IDS % 2, decode=str, tokens="tokens")
    assert inside(insp).view.last_message("inputs").apart == ()
    assert insp.words("head", 1).word.tolist() == ["3", "4", "5"]


def test_words_of_another_length_mark_no_place(inspect):
    insp = inspect(Translator(nnx.Rngs(0)), IDS, IDS[:, :2] + 6, decode=str, tokens="src")
    insp.examples([(IDS, IDS[:, :2])], "head", k=1, progress=False)
    assert {row.at for row in inside(insp).view.last_message("examples").rows} == {-1}
    insp.attribute(site="embed_2", method="gradient")
    assert inside(insp).view.last_message("attribution").words == ()
