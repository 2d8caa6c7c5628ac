"""The panels of lenses, attribution and examples: their figures are those of the functions, which
have oracles of their own.
"""

import base64

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from helpers.language_models import LAYERS, LENGTH, TOKENS, VOCABULARY, Language
from inside import inside

import nnx_inspector as nni
from nnx_inspector.inspector import export
from nnx_inspector.inspector.studies.studies import study_request
from nnx_inspector.lenses import example_search
from nnx_inspector.screen import protocol

WORDS = [f"w{i}" for i in range(VOCABULARY)]


@pytest.fixture(scope="module")
def insp():
    insp = nni.Inspector(Language(scan=True), TOKENS, decode=WORDS)
    yield insp
    insp.close()


def ask(insp, what, **wish):
    inside(insp).commands.answer(study_request(what, **wish))
    inside(insp).studies.wait()
    shown = inside(insp).view.last_message(what)
    assert protocol.from_header(protocol.to_header(shown)) == shown, "what the browser refuses"
    return shown


def test_the_lens_on_screen_is_that_of_the_function(insp):
    found, shown = nni.lens(insp.model, TOKENS), ask(insp, "lens", example=1)
    assert (shown.error, shown.unembed, shown.norm) == ("", "head", "final_norm")
    assert [row.site for row in shown.rows] == list(found.sites)
    assert shown.words == tuple(WORDS[i] for i in TOKENS[1])
    assert shown.answers == tuple(WORDS[i] for i in found.answer[1])
    for row, tokens, likely, own, rank in zip(
        shown.rows,
        found.tokens[:, 1],
        found.probabilities[:, 1],
        found.answer_probability[:, 1],
        found.answer_rank[:, 1],
        strict=True,
    ):
        assert [cell.words for cell in row.cells] == [tuple(WORDS[i] for i in t) for t in tokens]
        np.testing.assert_allclose([cell.probabilities for cell in row.cells], likely, rtol=1e-6)
        np.testing.assert_allclose([cell.probability for cell in row.cells], own, rtol=1e-6)
        assert [cell.rank for cell in row.cells] == rank.tolist()
    assert inside(insp).view.python == 'insp.lens().to_frame().query("example == 1")'
    assert insp.lens().tokens.tolist() == found.tokens.tolist()


def test_a_token_and_a_norm_are_chosen_on_screen(insp):
    found = nni.lens(insp.model, TOKENS, answer=3, norm=False)
    shown = ask(insp, "lens", token=3, norm="none")
    assert (shown.norm, shown.tokens) == ("", (3,) * LENGTH)
    assert [cell.rank for cell in shown.rows[2].cells] == found.answer_rank[2, 0].tolist()
    assert inside(insp).view.python == "insp.lens(answer=3, norm=False)"


def test_the_bars_of_a_logit_add_up_to_it(insp):
    found = nni.logit_attribution(insp.model, TOKENS, token=4)
    shown = ask(insp, "logits", example=1, position=2, token=4)
    assert (shown.word, shown.position) == ("w4", 2)
    assert [bar.site for bar in shown.bars] == list(found.sites)
    values = [bar.value for bar in shown.bars]
    np.testing.assert_allclose(values, found.contributions[:, 1, 2], rtol=1e-6)
    np.testing.assert_allclose(sum(values), shown.logit, rtol=1e-5)
    another = ask(insp, "logits", example=0, position=-1, token=4, again=False)
    assert another.position == LENGTH - 1
    np.testing.assert_allclose(another.logit, found.logit[0, -1], rtol=1e-6)
    ask(insp, "lens", example=1, again=False)
    assert inside(insp).view.last_message("logits").bars == (), "those of another example"


@pytest.mark.parametrize("method", ["gradient", "gradient_times_input", "integrated_gradients"])
def test_attribution_on_screen_is_that_of_the_function(insp, method):
    found = nni.attribute(insp.model, TOKENS, output=2, method=method, position=1)
    shown = ask(insp, "attribution", example=1, token=2, method=method, position=1)
    assert (shown.of, shown.word, shown.shape) == ("token", "w2", (LENGTH,))
    assert shown.words == tuple(WORDS[i] for i in TOKENS[1])
    np.testing.assert_allclose(shown.scores, found.scores[1], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(shown.output, found.output[1], rtol=1e-6)
    if method == "integrated_gradients":
        change = found.output[1] - found.baseline_output[1]
        np.testing.assert_allclose(shown.difference, change, rtol=1e-5)
    else:
        assert shown.difference is None
    text = f'insp.attribute(output=2, method="{method}", position=1)'
    text += '.to_frame().query("example == 1")'
    assert inside(insp).view.python == text
    np.testing.assert_allclose(eval(text).score, shown.scores, rtol=1e-5, atol=1e-8)


def test_the_examples_of_a_unit_come_with_their_words(insp):
    site = f"blocks/mlp[{LAYERS - 1}]"
    found = nni.top_examples(insp.model, [TOKENS], site)
    shown = ask(insp, "examples", site=site, unit=2)
    assert (shown.units, shown.count, shown.stopped) == (found.units, len(TOKENS), False)
    most = [row for row in shown.rows if row.which == "most"]
    assert [row.example for row in most] == found.most.examples[2][: len(TOKENS)].tolist()
    np.testing.assert_allclose(
        [row.value for row in most], found.most.values[2][: len(TOKENS)], rtol=1e-6
    )
    for row in most:
        assert row.words[row.at] == WORDS[TOKENS[row.example, row.place[0]]]
    another = ask(insp, "examples", site=site, unit=5, again=False)
    assert another.unit == 5
    np.testing.assert_allclose(another.rows[0].value, found.most.values[5][0], rtol=1e-6)


class Picture(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x) - 100).mean((1, 2)))


@pytest.fixture(scope="module")
def picture():
    x = jax.random.uniform(jax.random.key(0), (3, 100, 7, 3))
    insp = nni.Inspector(Picture(nnx.Rngs(0)), x, labels=list("abcde"))
    yield insp
    insp.close()


def test_pixels_are_shown_as_sums_of_their_channels_in_blocks(picture):
    _, args, _ = inside(picture).core.example_call().function()
    scores = nni.attribute(picture.model, *args, output=1, method="gradient").scores[2].sum(-1)
    shown = ask(picture, "attribution", example=2, token=1, method="gradient")
    assert (shown.of, shown.word, shown.shape, shown.blocks) == ("", "b", (50, 4), 2)
    padded = np.pad(scores, ((0, 0), (0, 1))).reshape(50, 2, 4, 2).sum((1, 3))
    np.testing.assert_allclose(np.reshape(shown.scores, (50, 4)), padded, rtol=1e-5, atol=1e-7)


def test_a_unit_that_never_fires_is_said_to_be_constant(inspect, picture):
    shown = ask(picture, "examples", site="conv", unit=1)
    assert not shown.constant
    assert [len(row.place) for row in shown.rows] == [2] * len(shown.rows)
    flat = inspect(nnx.Sequential(lambda x: x * 0), jnp.ones((3, 4)))
    assert ask(flat, "examples", site="", unit=0).constant


@pytest.mark.parametrize(
    ("what", "wish", "why"),
    [
        ("lens", {}, "No block that repeats"),
        ("lens", {"unembed": "hed"}, "The closest are 'head'"),
        ("attribution", {"token": 9}, "out of range"),
        ("attribution", {"example": 7}, "there is no example 7"),
        ("examples", {"site": "conv", "unit": 9}, "there is no unit 9"),
        ("examples", {"site": "conv", "axis": -4}, "no axis -4 of units"),
    ],
)
def test_what_cannot_be_found_is_said_in_the_panel_and_the_rest_goes_on(picture, what, wish, why):
    shown = ask(picture, what, **wish)
    assert why in shown.error
    assert not shown.running
    assert ask(picture, "examples", site="conv").error == ""


def test_a_tied_product_is_read_and_a_model_without_logits_told(inspect):
    insp = inspect(Language(tied=True, last="product"), TOKENS)
    shown = ask(insp, "lens")
    assert (shown.error, shown.unembed, shown.norm) == ("", "(all after blocks/2)", "")
    assert shown.gap < 1e-4
    insp = inspect(Language(scan=True, last="norm"), TOKENS)
    assert "no logits over words" in ask(insp, "lens").error


class Estimate(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_numbers_that_nothing_indicates_to_be_logits_are_read_if_the_user_says_so(inspect):
    x, model = jnp.ones((2, 4)), Estimate(nnx.Rngs(0))
    insp = inspect(model, x)
    for what in ("lens", "logits"):
        assert "Nothing indicates that this model's output is logits" in ask(insp, what).error
    shown = ask(insp, "lens", unembed="head")
    assert (shown.error, shown.unembed, len(shown.rows)) == ("", "head", 2)
    insp.step(lambda model, x, y: (model(x)[:, 0] * y).sum(), x, jnp.array([0, 2]))
    assert ask(insp, "lens").error == ""  # whole numbers may be classes
    insp = inspect(model, x, labels=["a", "b", "c"])
    assert insp.lens().unembed == "head"


def test_data_of_python_is_searched_shown_and_stopped(insp):
    asked = []

    def stop(done, total):
        asked.append((done, total, inside(insp).view.last_message("examples").running))
        return done == 2

    frame = insp.examples([TOKENS] * 4, "head", 1, k=3, progress=stop)
    shown = inside(insp).view.last_message("examples")
    assert (shown.stopped, shown.count, shown.running) == (True, 2 * len(TOKENS), False)
    assert shown.source.startswith("the data given")
    assert [row.value for row in shown.rows] == pytest.approx(frame.value.tolist())
    assert [running for *_, running in asked] == [True, True]


def test_batches_of_different_lengths_are_searched_and_their_words_found(insp):
    short = TOKENS[:, : LENGTH - 2]
    batches = [(TOKENS,), (short,), (TOKENS[:1],)]
    frame = insp.examples(batches, "head", 1, k=2, progress=False)
    shown = inside(insp).view.last_message("examples")
    rows = np.concatenate([TOKENS, np.pad(short, ((0, 0), (0, 2))), TOKENS[:1]])
    assert [row.example for row in shown.rows] == frame.example.tolist()
    for row in shown.rows:
        assert row.words[row.at] == WORDS[rows[row.example, row.place[0]]]


def test_batches_that_raise_in_the_middle_say_so_and_free_the_panel(insp):
    def data():
        yield TOKENS
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="gone"):
        insp.examples(data(), "head", progress=False)
    assert inside(insp).view.last_message("examples").error == "the file is gone"
    with pytest.raises(IndexError):  # of the model, which wants two axes
        insp.examples(TOKENS, "head", progress=False)
    assert (
        inside(insp)
        .view.last_message("examples")
        .error.endswith("To pass it as one batch, write [data].")
    )
    assert insp.examples([TOKENS, TOKENS[:1]], "head", progress=False).notes


def test_examples_of_other_data_have_their_pictures_and_words(insp, picture):
    data = [TOKENS[::-1], (TOKENS + 1) % len(WORDS)]
    insp.examples(data, "head", 1, k=3, progress=False)
    every = np.concatenate(data)
    for row in inside(insp).view.last_message("examples").rows:
        assert row.words[row.at] == WORDS[every[row.example, row.place[0]]]

    photos = np.random.default_rng(0).integers(0, 256, (5, 2, 9, 9, 1)).astype(np.uint8)
    read = []

    def inputs(batch):
        read.append(batch)
        return np.repeat(batch / 255, 3, -1)

    picture.examples(photos, "conv", 0, k=2, inputs=inputs, progress=False)
    rows = inside(picture).view.last_message("examples").rows
    assert len(read) == len(photos) + 2 * len(rows)  # the search, then words and pictures of rows
    for unit in (0, 3):
        shown = ask(picture, "examples", site="conv", unit=unit, again=False)
        found = np.frombuffer(base64.b64decode(shown.pictures.pixels), np.uint8)
        expected = photos.reshape(10, 9, 9)[[row.example for row in shown.rows]]
        np.testing.assert_array_equal(found.reshape(-1, 9, 9, 3)[..., 0], expected)
    picture.examples(iter(list(photos / 255)), "conv", inputs=lambda x: np.repeat(x, 3, -1))
    assert inside(picture).view.last_message("examples").pictures is None, (
        "a generator is read once"
    )


def test_a_sweep_and_a_study_do_not_run_at_once(insp):
    refused = []

    def data():
        yield TOKENS
        for other in (lambda: insp.sweep(progress=False), insp.start_sweep, insp.lens):
            with pytest.raises(nni.InspectorError, match="Another study of the model is running"):
                other()
            refused.append(other)

    insp.examples(data(), "head", progress=False)
    assert len(refused) == 3
    assert not insp.sweep("head", progress=False).empty, "the place is free again"


def test_what_is_asked_on_screen_meanwhile_waits_its_turn_or_is_stopped(insp):
    def data():
        yield TOKENS
        inside(insp).commands.answer(study_request("attribution"))
        sweep = protocol.StartSweep(id=2, sites="head", kind="", strength=None, at="output")
        inside(insp).commands.answer(sweep)
        assert inside(insp).view.last_message("attribution").running
        assert inside(insp).view.last_message("sweep").running
        inside(insp).commands.answer(protocol.StopSweep(id=3))

    insp.examples(data(), "head", progress=False)
    inside(insp).studies.wait()
    inside(insp).sweeps.wait()
    found = inside(insp).view.last_message("attribution")
    assert (found.running, found.error) == (False, "")
    assert found.scores
    assert inside(insp).view.last_message("sweep").error == "Stopped before it began."


def test_an_attribution_says_whose_logit_it_is(insp):
    found = insp.attribute()
    best = np.asarray(insp.model(TOKENS))[:, -1].argmax(-1)
    assert found.classes.tolist() == best.tolist()
    assert inside(insp).view.last_message("attribution").word != ""
    how = {"method": "gradient"}
    assert insp.attribute(output=3, **how).classes.tolist() == [3] * len(TOKENS)
    assert insp.attribute(output=lambda out: out[:, -1].sum(-1), **how).classes is None


def test_a_page_keeps_what_was_computed(insp, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "units_messages", lambda core, sites: {})  # these take long
    insp.lens()
    ask(insp, "attribution")
    assert set(export.KEPT_MESSAGES) >= {"lens", "logits", "attribution", "examples"}
    assert insp.to_html(tmp_path / "page.html") > 0
    for what in ("lens", "attribution"):
        assert protocol.from_header(protocol.to_header(inside(insp).view.last_message(what)))


def test_the_recording_keeps_the_examples(insp, tmp_path):
    insp.save(tmp_path / "run.nni")  # and from then on what comes
    found = insp.examples([TOKENS], "head", k=2, progress=False)
    for read in (insp.recording, nni.load(tmp_path / "run.nni")):
        table = read.tables["examples of head"]
        assert table.to_dict("list") == found.to_frame().to_dict("list")
        assert table.which.unique().tolist() == ["most", "least", "random"]
    nni.load(tmp_path / "run.nni").save(tmp_path / "again.nni")
    assert nni.load(tmp_path / "again.nni").tables["examples of head"].equals(table)


def test_a_second_search_compiles_nothing_and_sees_the_new_weights(inspect):
    model = Language(scan=True)
    insp = inspect(model, TOKENS)
    search = lambda: insp.examples([TOKENS] * 3, "head", k=2, progress=False)  # noqa: E731
    first = search()
    model.head.kernel[...] = -3 * model.head.kernel[...]
    with Compilations() as compiled:
        second = search()
    assert not compiled.kinds
    example_search._program_cache.clear()  # as in another process
    expected = nni.top_examples(model, [TOKENS] * 3, "head", k=2, progress=False)
    np.testing.assert_allclose(second.most.values, expected.most.values, rtol=1e-5)
    assert not np.allclose(second.most.values, first.most.values)
    with Compilations() as compiled:
        insp.examples([TOKENS] * 3, "head", k=2, progress=False)
    assert not compiled.kinds, "it has the program of the function"
    with Compilations() as compiled:
        insp.examples([TOKENS] * 3, "head", k=3, progress=False)
    assert compiled.kinds
