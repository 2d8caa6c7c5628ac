"""The file of a site's values: what is written is what is read, and nothing else is read."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from nnx_inspector.errors import InspectorError
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control import folder
from nnx_inspector.screen.control.values import pack_values, unpack_values

DTYPES = [
    np.float16, np.float32, np.float64, np.int8, np.uint16, np.int32, np.int64, np.uint64, np.bool_,
    np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip


def shown(*arrays, site="a"):
    held = tuple(
        protocol.HeldArray(
            number=i, call=0, name=str(i), shape=x.shape, dtype=x.dtype.name,
            axes=("",) * x.ndim, bytes=x.nbytes,
        )
        for i, x in enumerate(arrays)
    )  # fmt: skip
    return protocol.Arrays(
        request=1, site=site, part="output", clean=False, parts=("output",), arrays=held,
        perturbed=False, source="Step 3 of the run.", notes=(),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_dtype_come_back(dtype):
    x = (
        np.arange(-6, 6)
        .reshape(3, 4)
        .clip(0 if np.dtype(dtype).name[0] == "u" else -6)
        .astype(dtype)
    )
    found = unpack_values(pack_values("r", 3, shown(x, x[:0], x[0, 0]), [x, x[:0], x[0, 0]]), "r")
    assert found.step == 3
    assert [one.shape for one in found.arrays] == [(3, 4), (0, 4), ()]
    if x.dtype.kind in "biufc":
        assert found.arrays[0].dtype == x.dtype
    np.testing.assert_array_equal(found.arrays[0], x.astype(found.arrays[0].dtype))


def test_numbers_that_are_not_finite_come_back():
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    found = unpack_values(pack_values("r", 3, shown(x), [x]), "r")
    np.testing.assert_array_equal(found.value.view(np.uint32), x.view(np.uint32))


X = np.ones((2, 3), np.float32)
WHOLE = pack_values("r", 3, shown(X), [X])


def with_header(**changes):
    line, _, rest = WHOLE.partition(b"\n")
    about = json.loads(line)
    about["message"]["arrays"][0].update(changes)
    return json.dumps(about).encode() + b"\n" + rest


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"[1]\n", "another form"),
        (b"[" * 100_000, "another form"),
        (b"\x80\x04\x95.", "codec"),
        (json.dumps({"run": "r", "step": 1, "message": {"type": "hello"}}).encode(), "lacks"),
        (
            json.dumps(
                {"run": "r", "step": 1, "message": {"type": "measure_next", "id": 1}}
            ).encode(),
            "no arrays",
        ),
        (pack_values("another", 3, shown(X), [X]), "another run"),
        (WHOLE[:-1], "cut off"),
        (WHOLE + b"x", "too long"),
        (with_header(shape=[2, 1 << 40]), "cut off"),
        (with_header(shape=[-2, -3]), "cut off"),
        (with_header(dtype="object"), "no numbers of dtype 'object'"),
        (with_header(dtype="V4"), "no numbers of dtype"),
        (with_header(dtype="O,f4"), "no numbers of dtype"),
        (with_header(shape=["__import__('os')"]), "must be int"),
    ],
)
def test_what_has_another_form_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        unpack_values(data, "r")


def test_a_file_of_another_form_is_an_error_and_goes(tmp_path):
    made = folder.create_folder(tmp_path / "run.nni")
    folder.write_values(made, 7, b"nothing")
    with pytest.raises(InspectorError, match="cannot be read"):
        folder.read_values(tmp_path / "run.nni", "r", 7)
    with pytest.raises(InspectorError, match="not there"):
        folder.read_values(tmp_path / "run.nni", "r", 7)
