"""Thumbnails of a batch: how pictures are found, their bytes against NumPy, and what is said."""

import base64

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.screen.batch_reader import Argument, BatchReader, reader_of
from nnx_inspector.screen.pictures import MOST_BYTES, NOT_FINITE, pictures_in

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, (5, 12, 10, 3)).astype(np.uint8)


def argument(value, path="x", place=0):
    return Argument(path, place, value)


def shown(value, **given):
    """The thumbnails as an array, and the message."""
    message, problem = pictures_in([argument(value)], **given)
    assert message is not None, problem
    shape = (message.count, message.height, message.width, message.channels)
    return np.frombuffer(base64.b64decode(message.pixels), np.uint8).reshape(shape), message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (BYTES, "0 … 255"),
        (BYTES.astype(np.int32), "0 … 255"),
        (BYTES.astype(np.float32), "0 … 255"),
        (BYTES / np.float32(255), "0 … 1"),
        (jnp.asarray(BYTES) / 255, "0 … 1"),
        (BYTES / np.float32(127.5) - 1, "−1 … 1"),
        (np.moveaxis(BYTES, -1, 1) / np.float32(255), "0 … 1"),
    ],
)
def test_every_usual_range_and_layout_gives_the_same_bytes(value, words):
    found, message = shown(value)
    np.testing.assert_array_equal(found, BYTES)
    assert (message.shown, message.rows, message.columns) == (words, 12, 10)


def test_normalised_pixels_are_stretched_channel_by_channel():
    value = (BYTES / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.1])
    found, message = shown(value.astype(np.float32))
    low, high = value.min((0, 1, 2)), value.max((0, 1, 2))
    np.testing.assert_allclose(found, np.rint((value - low) / (high - low) * 255), atol=1)
    assert message.shown.startswith("stretched from −")


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_other_numbers_of_channels_are_said(channels):
    value = RANDOM.random((2, 9, 9, channels)).astype(np.float32)
    found, message = shown(value, named="images=0")
    first = value[..., :3] if channels == 4 else value[..., :1]
    np.testing.assert_allclose(found, np.rint(first * 255), atol=1)
    words = {1: "0 … 1", 4: "channels 0 to 2 of 4; 0 … 1"}
    assert message.shown == words.get(channels, f"channel 0 of {channels}; 0 … 1")


def test_large_pictures_become_means_of_blocks_within_the_bounds():
    value = RANDOM.random((64, 200, 100)).astype(np.float32)
    found, message = shown(value)
    assert found.nbytes <= MOST_BYTES
    step = -(-200 // min(96, int((MOST_BYTES / 64) ** 0.5)))
    down, across = 200 // step, 100 // step  # whole blocks
    pixels = np.rint(value * 255)[:, : down * step, : across * step]
    wanted = pixels.reshape(64, down, step, across, step).mean((2, 4))
    np.testing.assert_allclose(found[:, :down, :across, 0], wanted, atol=1)
    assert (message.rows, message.columns) == (200, 100)


def test_pixels_that_are_not_finite_have_their_colour_also_in_a_reduced_picture():
    for side in (10, 300):
        value = RANDOM.random((2, side, side)).astype(np.float32)
        value[1, 0, 0] = np.nan
        found, message = shown(value)
        assert tuple(found[1, 0, 0]) == NOT_FINITE
        assert tuple(found[0, 0, 0]) != NOT_FINITE
        assert message.shown == "0 … 1; 1 pixel is NaN or Inf"


def test_constant_pictures_and_pictures_without_a_finite_pixel():
    found, message = shown(np.full((2, 8, 8), 7.5, np.float32), named="images=0")
    assert (found == 0).all()
    assert message.shown == "all 7.5, stretched from 7.5 … 7.5"
    found, message = shown(np.full((2, 8, 8), np.inf, np.float32), named="images=0")
    assert message.shown == "no finite pixel; 128 pixels are NaN or Inf"


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((4, 50, 3), np.float32),  # a series of three features
        RANDOM.normal(size=(4, 16, 16)).astype(np.float32),  # features of positions
        np.ones((4, 1, 16, 16), bool),  # a mask of attention
        np.where(np.tri(16), 0, -1e9).reshape(1, 1, 16, 16).astype(np.float32),  # another
        np.zeros((4, 16, 16), np.int32),
        np.zeros((4, 4, 4, 3), np.float32),
        np.zeros((0, 16, 16, 3), np.float32),
        np.zeros((2, 5, 16, 16, 3), np.float32),
        np.zeros((4, 16, 16, 3), np.complex64),
    ],
)
def test_what_only_looks_like_a_picture_is_none(value):
    assert pictures_in([argument(value)]) == (None, "")


def test_what_was_told_to_be_a_picture_and_is_none_is_said():
    message = BatchReader(images="x").message([argument(np.zeros((4, 50, 3), np.float32))])
    assert message.pictures is None
    assert message.problem.startswith("images='x' is float32[4, 50, 3], which holds no pictures")
    message = BatchReader(images=3).message([argument(BYTES)])
    assert message.problem == "This pass has no argument images=3."


def test_the_argument_is_told_or_the_first_and_its_batch_counts():
    both = [
        argument(np.zeros((7, 2)), "mask", 0),
        argument(BYTES, "a", 1),
        argument(BYTES[:3], "b", 2),
    ]
    message = BatchReader().message(both)
    assert (message.batch, message.pictures.path) == (5, "a")
    assert message.pictures.shown.endswith("the first of 2 arguments with pictures")
    assert BatchReader(images="b").message(both).pictures.path == "b"
    assert BatchReader(images=2).message(both).batch == 3
    assert BatchReader(images=False).message(both).pictures is None
    assert not BatchReader(images=False).has_any([BYTES])
    assert BatchReader().has_any([BYTES])


def test_images_of_another_kind_are_an_argument_of_the_model():
    inputs, others = reader_of(lambda x, images: x, images=BYTES)
    assert inputs.images is None
    assert others["images"] is BYTES
    assert reader_of(len, images="none")[0].images is False
