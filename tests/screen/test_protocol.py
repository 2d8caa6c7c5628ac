"""The messages: checked field by field, valid JSON, and the same in Python and TypeScript."""

import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from nnx_inspector.screen import protocol
from nnx_inspector.screen.protocol import headers

JS = pathlib.Path(__file__).parents[2] / "js"
GOLDEN = sorted((JS / "test" / "golden").glob("*.json"))


def test_the_generated_types_and_goldens_are_up_to_date():
    subprocess.run([sys.executable, "-B", JS / "generate_protocol.py", "--check"], check=True)


def test_there_is_a_golden_for_every_message():
    names = {cls.type for cls in (*protocol.TO_BROWSER, *protocol.TO_KERNEL)}
    assert {p.stem for p in GOLDEN} >= names


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_a_golden_is_decoded_and_encoded_to_the_same(path):
    header = json.loads(path.read_text())
    assert protocol.to_header(protocol.from_header(header)) == header


def test_a_float_that_is_not_finite_never_reaches_the_json():
    effect = protocol.Effect(
        source="x",
        clean={"loss": math.nan},
        perturbed={"loss": math.inf},
        output_change=math.nan,
        kl=math.inf,
        top1_changed=None,
        sites=(protocol.SiteEffect(site="a", change=math.nan),),
        alone=(),
        moved={"a": math.inf},
    )
    assert headers.to_fields(effect) == {
        "source": "x",
        "clean": {"loss": None},
        "perturbed": {"loss": None},
        "output_change": None,
        "kl": None,
        "top1_changed": None,
        "sites": [{"site": "a", "change": None}],
        "alone": [],
        "moved": {"a": None},
    }


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (3, "must be an object, got int"),
        ({"type": "melt"}, "Unknown message type 'melt'"),
        ({"type": "select", "id": 1}, r"lacks \['site'\]"),
        ({"type": "select", "id": 1, "site": "a", "x": 1}, r"unknown fields \['x'\]"),
        ({"type": "select", "id": True, "site": "a"}, "select.id must be int, got bool"),
        ({"type": "select", "id": "1", "site": "a"}, "select.id must be int, got str"),
        (
            {"type": "adjust", "id": 1, "perturbation": 1, "enabled": 1, "strength": None},
            "adjust.enabled must be bool, got int",
        ),
        (
            {"type": "adjust", "id": 1, "perturbation": 1, "enabled": True, "strength": 1e999},
            "adjust.strength must be finite",
        ),
    ],
)
def test_a_malformed_header_is_refused_with_its_field(header, text):
    with pytest.raises(protocol.ProtocolError, match=text):
        protocol.from_header(header)


def test_buffers_hold_their_arrays_in_the_stated_order():
    table = np.arange(20.0).reshape(1, 2, 10)
    sparks = np.arange(64, dtype=np.uint8).reshape(1, 2, 32)
    buffer = protocol.buffer_of(table.T, sparks, b"counts", [1, 2])
    ends = np.array([1.0, 2.0]).tobytes()
    assert buffer == table.T.copy().tobytes() + sparks.tobytes() + b"counts" + ends
