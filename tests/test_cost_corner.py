"""The figures of the cost corner against a count by hand."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector import protocol
from nnx_inspector.presenter import STATED
from nnx_inspector.screen import CREDITS, SHORTEST, InspectorWidget


@pytest.fixture
def sent(monkeypatch):
    sent = []

    def send(self, content, buffers=None, *_):
        sent.append((self.role, content, b"".join(buffers or [])))

    monkeypatch.setattr(InspectorWidget, "send", send)
    return sent


def streamed(sent):
    """Bytes of all that went over the stream, as JSON and buffers."""
    return sum(
        len(json.dumps(content, ensure_ascii=False, sort_keys=True)) + len(buffer)
        for role, content, buffer in sent
        if role == "stream"
    )


def state_of(insp, sent):
    insp._view.state_changed()
    return protocol.from_header(sent[-1][1])


def test_bytes_compilations_and_drops_are_what_was_counted(sent):
    insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)), display=False)
    before = state_of(insp, sent)
    assert before.cost.bytes_sent == streamed(sent[:-1])
    for size in (5, 6, 7):
        jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((size,), "float32")).compile()
    drops = 0
    for _ in range(CREDITS):  # under way: nobody acknowledges them
        insp._view.screen.next_seq()
    for _ in range(10):
        drops += not insp._view.screen.ready_for_frame()
    assert drops >= 1
    after = state_of(insp, sent)
    assert after.cost.compilations == before.cost.compilations + 3
    assert after.cost.frames_dropped == before.cost.frames_dropped + drops
    assert after.cost.bytes_sent == streamed(sent[:-1])
    assert (after.cost.plain_seconds, after.cost.inspected_seconds) == (None, None)
    insp.close()


def test_a_switch_compiles_nothing(sent):
    insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)), display=False)
    handle = insp.perturb("", nni.Scale(0.5))
    assert insp.effect is not None
    before = state_of(insp, sent).cost.compilations
    for enabled in (False, True, False, True):
        handle.enabled = enabled
    handle.perturbation = nni.Scale(0.25)
    assert state_of(insp, sent).cost.compilations == before
    insp.close()


def test_states_are_fewer_than_frames_unless_something_is_done(sent, monkeypatch):
    insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)), display=False)
    insp.run()
    now = [time.monotonic() + 1.0]
    monkeypatch.setattr("nnx_inspector.presenter.time.monotonic", lambda: now[0])

    def sent_now(**how):
        before = len(sent)
        insp._view.screen._received(None, {"type": "ack", "seq": insp._view.screen._seq}, None)
        insp._view.present(**how)
        types = [content["type"] for _, content, _ in sent[before:]]
        return types.count("frame"), types.count("state")

    assert sent_now() == (1, 1)
    for _ in range(3):
        now[0] += 1.01 * SHORTEST
        assert sent_now() == (1, 0)
    assert sent_now(force=True) == (1, 1)
    now[0] += 1.01 * STATED
    assert sent_now() == (1, 1)
    insp.close()
