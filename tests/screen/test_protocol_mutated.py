"""Mutated messages: each is either valid or refused with a text."""

import copy
import json
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import receive

from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget, Screen

GOLDEN = pathlib.Path(__file__).parents[2] / "js" / "test" / "golden"
HEADERS = {p.stem: json.loads(p.read_text()) for p in sorted(GOLDEN.glob("*.json"))}
TO_KERNEL = [cls.type for cls in protocol.TO_KERNEL]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=30),
    st.sampled_from([53, 400, 5000]).map(lambda n: -(10**n)), st.just("*a" * 40_000),
    st.sampled_from(["__proto__", "constructor", "\x00", "\u202e", "<img src=x>", "x" * 10_000]),
    st.sampled_from(sorted(HEADERS)),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value, path=()):
    """The path of every part of a header."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw, names=tuple(HEADERS)):
    """A golden message with one to three of its parts replaced, deleted, added or nested."""
    header = copy.deepcopy(HEADERS[draw(st.sampled_from(list(names)))])
    for _ in range(draw(st.integers(1, 3))):
        parts = [p for p in places(header) if p]
        if not parts:  # everything was deleted
            break
        *around, last = draw(st.sampled_from(parts))
        parent = header
        for key in around:
            parent = parent[key]
        what = draw(st.sampled_from(["replace", "delete", "add", "nest", "repeat"]))
        if what == "replace":
            parent[last] = draw(values)
        elif what == "delete":
            del parent[last]
        elif what == "add" and isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = draw(values)
        elif what == "nest":
            parent[last] = [{"a": parent[last]}]
        elif isinstance(parent[last], list):
            parent[last] = parent[last] * 50
    return header


many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@given(mutated() | values)
@many
def test_a_mutated_message_is_refused_in_words_or_is_one(header):
    try:
        message = protocol.from_header(header)
    except protocol.ProtocolError as error:
        said = str(error)
    else:
        again = json.loads(protocol.to_json(message))
        assert protocol.from_header(again) == message
        return
    assert 0 < len(said) < 1000


@given(st.lists(mutated(TO_KERNEL) | mutated() | values, max_size=3))
@many
def test_what_the_browser_sends_gets_at_most_one_reply_and_raises_nothing(headers):
    sent, handled = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InspectorWidget, "send", lambda self, content, *_: sent.append(content))
        screen = Screen()
        screen.handler = lambda: handled.append
        for header in headers:
            sent.clear()
            handled.clear()
            receive(screen, header)
            replies = [protocol.from_header(content) for content in sent]
            assert all(isinstance(reply, protocol.Reply) for reply in replies)
            assert len(replies) + len([m for m in handled if m.type not in ("hello", "ack")]) <= 1
            assert all(isinstance(m, protocol.TO_KERNEL) for m in handled)
            for reply in replies:
                assert json.dumps(protocol.to_header(reply), ensure_ascii=False).encode()
                if not reply.ok:
                    assert reply.id == header["id"]
                    assert len(reply.error) < 1000
        screen.close()


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb", "ok"])
def test_half_a_surrogate_pair_can_be_sent(name):
    reply = protocol.Reply(id=1, ok=False, error=name)
    text = protocol.to_json(reply)
    assert json.loads(text.encode("utf-8"))["error"] == name.encode(errors="replace").decode()
