"""Requests of the browser for values: the messages, and one reply each."""

import threading

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.inspector.values.device_tiles import DEVICE_TILES
from nnx_inspector.screen import protocol
from nnx_inspector.screen.protocol import ReadValues, ShowValues
from nnx_inspector.screen.values import message as values_messages


class Screen:
    """Collects messages, and signals the reply to a request."""

    def __init__(self):
        self.sent, self.said = [], []
        self.replied = threading.Condition()

    def send(self, message, buffer=None):
        protocol.from_header(protocol.to_header(message))  # valid at both ends
        self.sent.append((message, buffer))

    def poll(self):
        """Nobody sends clicks."""

    def reply(self, number, error=""):
        with self.replied:
            self.said.append((number, error, len(self.sent)))
            self.replied.notify_all()


@pytest.fixture
def asked():
    insp = nni.Inspector(models.CNN(nnx.Rngs(0)), models.batch(4, 5, 5, 1), display=False)
    screen = Screen()
    of_insp, inside(insp).view.screen = inside(insp).view.screen, screen

    def ask(message):
        before = len(screen.sent)
        inside(insp).commands.answer(message)
        with screen.replied:
            assert screen.replied.wait_for(lambda: any(s[0] == message.id for s in screen.said), 60)
        ((_, error, sent),) = [s for s in screen.said if s[0] == message.id]
        assert sent == len(screen.sent)  # the message came before the reply
        return (error, *(screen.sent[before:] or [(None, None)])[0])

    ask.insp = insp
    yield ask
    inside(insp).view.screen = of_insp
    insp.close()


def show(number, site="conv", part="output"):
    return ShowValues(id=number, site=site, part=part, clean=False)


def read(number, array, **changes):
    fields = {
        "index": (0, 0, 0, 0), "axes": (3, 1, 2), "starts": (0, 0, 0), "ends": (2, 5, 5),
        "most": (64, 64, 64), "norm_over": -1, "component": "value", "exact": False,
    }  # fmt: skip
    return ReadValues(id=number, array=array, **{**fields, **changes})


def planes(message, buffer):
    dtype = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint64": "<u8"}[message.encoding]
    size = int(np.prod(message.counts))
    step = -(-size * np.dtype(dtype).itemsize // 8) * 8
    assert len(buffer) == step * len(message.planes)
    return {
        name: np.frombuffer(buffer, dtype, size, i * step).reshape(message.counts)
        for i, name in enumerate(message.planes)
    }


def test_arrays_then_their_values(asked):
    error, message, _ = asked(show(1))
    assert error == ""
    assert (message.request, message.site, message.part) == (1, "conv", "output")
    assert message.parts == ("output", "input", "parameter")
    assert message.source.startswith("The example, with the parameters that the model had")
    (array,) = message.arrays
    assert (array.shape, array.dtype, array.bytes) == ((4, 5, 5, 2), "float32", 800)
    error, message, buffer = asked(read(2, array.number, index=(3, 0, 0, 0)))
    found = planes(message, buffer)
    assert (error, message.block, list(found)) == ("", (1, 1, 1), ["value"])
    wanted = np.asarray(asked.insp.values("conv"))[3].transpose(2, 0, 1)
    np.testing.assert_array_equal(found["value"], wanted)


def test_blocks_come_with_their_range(asked):
    _, message, _ = asked(show(1))
    number = message.arrays[0].number
    _, message, buffer = asked(read(2, number, most=(1, 2, 2), ends=(1, 5, 5)))
    found = planes(message, buffer)
    assert message.block == (1, 4, 4)
    wanted = np.asarray(asked.insp.values("conv"), np.float64)[0, :, :, 0]
    for name, of in (("mean", np.mean), ("low", np.min), ("high", np.max)):
        np.testing.assert_allclose(found[name][0, 0, 0], of(wanted[:4, :4]), rtol=1e-5)
        np.testing.assert_allclose(found[name][0, 1, 1], wanted[4, 4], rtol=1e-5)


def test_norms_are_read_with_the_axes_that_are_left(asked):
    _, message, _ = asked(show(1))
    change = {"index": (0, 0, 0), "axes": (-1, 1, 2), "norm_over": 3, "ends": (1, 5, 5)}
    _, message, buffer = asked(read(2, message.arrays[0].number, **change))
    wanted = np.linalg.norm(np.asarray(asked.insp.values("conv"))[0], axis=-1)
    np.testing.assert_allclose(planes(message, buffer)["value"][0], wanted, rtol=1e-5)


def test_exact_values_have_every_digit(asked):
    _, message, _ = asked(show(1, "dropout", "parameter"))
    (key,) = [a for a in message.arrays if a.name == "rngs/key"]
    change = {"index": (0,), "axes": (-1, -1, 0), "ends": (1, 1, 2), "exact": True}
    _, message, buffer = asked(read(2, key.number, **change))
    assert message.encoding == "int64"
    wanted = asked.insp.values("dropout", part="parameter")["rngs/key"]
    np.testing.assert_array_equal(planes(message, buffer)["value"][0, 0], wanted)


def test_what_cannot_be_answered_is_a_readable_reply(asked):
    error, message, _ = asked(show(1, part="gradient"))
    assert message is None
    assert "There is no gradient of 'conv' in a forward pass" in error
    error, _, _ = asked(read(2, 999))
    assert "no longer kept" in error
    _, message, _ = asked(show(3))
    number = message.arrays[0].number
    refused = (
        ({"axes": (0, 1)}, "three numbers"),
        ({"axes": (3, 1, 1)}, "distinct axes"),
        ({"axes": (3, 1, 7)}, "no axis 7"),
        ({"index": (9, 0, 0, 0)}, "Index 9 is out of range"),
        ({"index": (0,)}, "one index per axis"),
        ({"norm_over": 4}, "no axis 4"),
    )
    for request, (change, text) in enumerate(refused, 100):
        error, message, _ = asked(read(request, number, **change))
        assert message is None
        assert text in error


@pytest.mark.parametrize("most", [(1 << 30,) * 3, (0, -5, 1), (1, 1 << 20, 1)])
def test_a_message_has_at_most_so_many_blocks(most):
    bounded = values_messages._limited(most)  # the same with a small bound
    assert 1 <= np.prod(bounded) <= values_messages.MOST_BLOCKS
    assert min(bounded) >= 1


def test_wide_dtypes_travel_as_float64():
    request = read(1, 1, index=(0, 0), axes=(-1, 0, 1), ends=(1, 2, 3))
    kinds = {"bfloat16": "float32", "int8": "float32", "bool": "float32", "int32": "float64"}
    for dtype, encoding in kinds.items():
        message, buffer = values_messages.values_message(
            request, jnp.ones((2, 3), dtype), DEVICE_TILES
        )
        assert message.encoding == encoding
        np.testing.assert_array_equal(planes(message, buffer)["value"], np.ones((1, 2, 3)))
    with jax.enable_x64(True):
        assert values_messages.values_message(request, np.ones((2, 3)))[0].encoding == "float64"
