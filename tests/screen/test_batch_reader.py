"""The batch as people read it: texts of ids, names of classes, and what is wrong with either."""

import numpy as np
import pytest

from nnx_inspector.screen.batch_reader import (
    MOST_WORDS,
    Argument,
    BatchReader,
    noting_passed_on,
    reader_of,
)

IDS = np.arange(6, dtype=np.int32).reshape(2, 3)
WORDS = ["<b>", " the", "\n", "é", "שלום", "👩‍👩‍👧"]


def argument(value, path="tokens", embedded=None, place=0):
    return Argument(path, place, np.asarray(value), embedded)


def lists_only(ids):
    return "".join(WORDS[i] for i in ids)


def arrays_only(ids):
    return lists_only(ids.tolist())


@pytest.mark.parametrize(
    "decode",
    [
        WORDS,
        tuple(WORDS),
        dict(enumerate(WORDS)),
        WORDS.__getitem__,
        lists_only,
        arrays_only,
        lambda ids: [WORDS[i] for i in ids],
        np.array(WORDS).__getitem__,
    ],
)
def test_every_form_of_decode_gives_the_same_words(decode):
    message = BatchReader(decode).message([argument(IDS)])
    assert [list(example.words) for example in message.examples] == [WORDS[:3], WORDS[3:]]
    assert (message.tokens, message.positions, message.batch) == ("tokens", 3, 2)
    assert message.problem == ""


def test_a_function_of_one_id_is_not_given_a_list():
    assert BatchReader(lambda i: f"w{i}").text([3, 4]) == ["w3", "w4"]


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (lambda i: 1 / 0, "raised ZeroDivisionError (division by zero) for the id 0"),
        (lambda i: b"word", "returned bytes, not text, for the id 0"),
        (lambda i: ["a", "b"], "returned 2 texts for the id 0"),
        (lambda i: None, "returned NoneType, not text, for the id 0"),
        (["a", "b"], "no text for the id 2 (2 entries)"),
        ({0: "a"}, "no text for the id 1 (1 entries)"),
        ([0, 1, 2, 3, 4, 5], "has int, not text, for the id 0"),
    ],
)
def test_a_decode_that_fails_is_said_once_and_shows_the_ids(decode, said):
    inputs = BatchReader(decode)
    message = inputs.message([argument(IDS)])
    assert said in message.problem
    assert message.problem.count("shown as numbers") == 1
    assert message.examples[1].words[-1] == "5"
    assert inputs.message([argument(IDS)]).problem == message.problem


def test_a_negative_id_is_never_counted_from_the_end():
    inputs = BatchReader(WORDS.__getitem__)
    assert inputs.text([-1, 0]) == ["-1", WORDS[0]]
    assert "negative" in inputs.message([argument([[-1]])]).problem


def test_the_ids_are_those_that_an_embedding_receives():
    arguments = [
        argument(IDS, "mask", embedded=False),
        argument(IDS, "batch/x", embedded=True),
        argument(IDS, "y", embedded=False),
    ]
    found, problem = BatchReader(WORDS).tokens_in(arguments)
    assert found is arguments[1]
    assert problem == ""


def test_ids_that_are_not_in_the_vocabulary_are_another_argument():
    arguments = [argument(IDS + 90, "years"), argument(IDS, "x")]
    assert BatchReader(WORDS).tokens_in(arguments)[0] is arguments[1]


def test_without_a_choice_nothing_is_guessed():
    found, problem = BatchReader(WORDS).tokens_in([argument(IDS, "a"), argument(IDS, "b")])
    assert found is None
    assert problem == "Several arguments may hold tokens: 'a', 'b'. Choose with tokens=."


@pytest.mark.parametrize("tokens", [1, "y", "batch/y"])
def test_the_argument_can_be_told(tokens):
    arguments = [argument(IDS, "x"), argument(IDS, "batch/y", place=1)]
    assert BatchReader(WORDS, tokens).tokens_in(arguments)[0] is arguments[1]


@pytest.mark.parametrize(
    ("tokens", "value", "said"),
    [
        ("z", IDS, "no argument tokens='z'. It has 'x'."),
        ("x", np.ones((2, 3)), "tokens='x' is float64[2, 3], which holds no ids"),
        (0, np.ones((2, 3, 4), int), "tokens=0 is int64[2, 3, 4], which holds no ids"),
        (None, np.ones((2, 3)), "No argument holds ids of tokens"),
        (None, np.zeros((2, 0), int), "No argument holds ids of tokens"),
    ],
)
def test_what_is_not_there_is_said(tokens, value, said):
    message = BatchReader(WORDS, tokens).message([argument(value, "x")])
    assert said in message.problem
    assert (message.tokens, message.positions, message.examples) == ("", 0, ())


def test_one_sequence_without_a_batch_is_one_example():
    message = BatchReader(WORDS).message([argument([1, 2])])
    assert message.examples[0].words == (WORDS[1], WORDS[2])
    assert (message.batch, message.positions) == (1, 2)


def test_long_texts_and_large_batches_are_cut():
    message = BatchReader(lambda i: "x" * 1000).message(
        [argument(np.zeros((3, MOST_WORDS + 5), int))]
    )
    assert len(message.examples) == 1
    assert len(message.examples[0].words) == MOST_WORDS
    assert len(message.examples[0].words[0]) < 200
    assert message.positions == MOST_WORDS + 5


def test_labels_and_predictions_have_names():
    logits = np.array([[0.0, 2, 1], [5, 1, 1], [np.nan, 1, 1]])
    inputs = BatchReader(labels=["cat", "dog", "<i>emu</i>"])
    message = inputs.message([argument(np.ones((3, 4, 4)), "x"), argument([2, 0, 1], "y")])
    assert [e.prediction for e in message.examples] == ["", "", ""]
    message = inputs.with_predictions(message, [logits, np.ones(3)])
    assert [e.label for e in message.examples] == ["<i>emu</i>", "cat", "dog"]
    assert [e.prediction for e in message.examples] == ["dog", "cat", ""]
    assert all(e.words == () for e in message.examples)


def test_a_label_that_could_be_another_is_none():
    two = [argument(np.ones((2, 4)), "x"), argument([0, 1], "y"), argument([1, 0], "z")]
    assert BatchReader(labels=["cat", "dog"]).message(two).examples == ()


def test_keywords_of_another_kind_are_those_of_the_model():
    array = np.ones(3)
    inputs, others = reader_of(lambda x, **others: x, decode=True, tokens=5, labels=array)
    assert not inputs.given
    assert others.keys() == {"decode", "tokens", "labels"}
    inputs, others = reader_of(
        lambda x, tokens: x, decode=WORDS, tokens=array, labels=np.array(["a"])
    )
    assert (inputs.decode, inputs.tokens, inputs.labels) == (WORDS, None, ["a"])
    assert others == {"tokens": array}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decode": 5}, "decode= takes a function of ids, or the texts of all ids; it is int 5."),
        ({"decode": np.ones(2)}, "it is float64[2]. The call"),
        ({"labels": "abc"}, "it is str 'abc'. The call that is inspected has no argument of this"),
        ({"tokens": "x"}, "or pass decode=tokenizer.decode too, and tokens=0 for the first"),
        ({"images": True}, "or pass images=0 for the first argument."),
    ],
)
def test_what_neither_the_screen_nor_the_model_takes_is_named(given, said):
    with pytest.raises(TypeError) as raised:
        reader_of(lambda x, mask=None: x, **given)
    assert said in str(raised.value)


def test_what_a_layer_of_the_model_refuses_is_named_too():
    _, others = reader_of(lambda *args, **kwargs: 0, decode=5)
    error, another = (
        TypeError(f"f() got an unexpected keyword argument {x!r}") for x in ["decode", "x"]
    )
    for one in (error, another):
        with pytest.raises(TypeError), noting_passed_on(others):
            raise one
    assert "it is int 5. So it went to the model. If it is not meant" in error.__notes__[0]
    assert not hasattr(another, "__notes__")
