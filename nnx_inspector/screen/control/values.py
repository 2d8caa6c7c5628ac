"""The values of one site of a steered run, as a file in the folder of its requests.

A line of JSON says what they are, and the arrays follow as plain numbers. Nothing of such a file is
run as code, and what does not have this form is an error. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError
from nnx_inspector.screen import protocol

MOST_BYTES: Final = 16 * 2**20
"""The most bytes of the values of one request."""
_NO_DTYPE: Final = (
    (re.compile(r"bfloat16|float[468]_\w+"), "<f4"),
    (re.compile(r"int[124]"), "<i1"),
    (re.compile(r"uint[124]"), "<u1"),
)
"""The dtypes that NumPy lacks, and what holds their numbers exactly."""


@dataclasses.dataclass(frozen=True, eq=False)
class SiteValues:
    """What a site has returned in one step of a run.

    Attributes:
        shown: the arrays in words, as the screen gets them.
        step: the step.
        arrays: the arrays. Numbers that NumPy has no dtype for, such as bfloat16, are float32 (or
            int8) here, without loss.
    """

    shown: protocol.Arrays
    step: int
    arrays: tuple[npt.NDArray[Any], ...]

    @property
    def calls(self) -> list[dict[str, np.ndarray]]:
        """For each call of the site that took place its arrays by their names; the name of a single
        one is "".
        """
        found: dict[int, dict[str, np.ndarray]] = {}
        for held, array in zip(self.shown.arrays, self.arrays, strict=True):
            found.setdefault(held.call, {})[held.name] = array
        return list(found.values())

    @property
    def value(self) -> np.ndarray:
        """The array that the site returned, if it is one.

        Raises:
            InspectorError: it was called several times, or returned several arrays.
        """
        if len(self.arrays) != 1:
            names = [f"call {one.call} {one.name}".strip() for one in self.shown.arrays]
            raise InspectorError(
                f"{self.shown.site!r} returned {len(names)} arrays in step {self.step}: "
                f"{', '.join(names)}. They are in .calls."
            )
        return self.arrays[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.value, dtype, copy=True if copy is None else copy)

    def __repr__(self) -> str:
        kinds = (f"{one.dtype}{list(one.shape)}" for one in self.shown.arrays)
        return f"SiteValues({self.shown.site!r}, step {self.step}, {', '.join(kinds)})"


def pack_values(run: str, step: int, shown: protocol.Arrays, arrays: Sequence[np.ndarray]) -> bytes:
    """The file of some values; `shown` has a `HeldArray` for each array."""
    about = {"run": run, "step": step, "message": protocol.to_header(shown)}
    plain = (
        np.ascontiguousarray(x, _stored_dtype(one.dtype))
        for one, x in zip(shown.arrays, arrays, strict=True)
    )
    return b"".join([json.dumps(about).encode(), b"\n", *(x.tobytes() for x in plain)])


def unpack_values(data: bytes, run: str) -> SiteValues:
    """The values in a file.

    Raises:
        ValueError: it has another form, or is of another run.
    """
    line, _, rest = data.partition(b"\n")
    try:
        about = json.loads(line)
        if about["run"] != run:
            raise ValueError("it is of another run")
        step, shown = int(about["step"]), protocol.from_header(about["message"])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it has another form: {error}") from error
    if not isinstance(shown, protocol.Arrays):
        raise ValueError("it holds no arrays")
    arrays, at = [], 0
    for one in shown.arrays:
        dtype, count = np.dtype(_stored_dtype(one.dtype)), math.prod(one.shape)
        if min(one.shape, default=0) < 0 or len(rest) - at < count * dtype.itemsize:
            raise ValueError("it is cut off")
        arrays.append(np.frombuffer(rest, dtype, count, at).reshape(one.shape))
        at += count * dtype.itemsize
    if at != len(rest):
        raise ValueError("it is too long")
    return SiteValues(shown, step, tuple(arrays))


def _stored_dtype(dtype: str) -> str:
    """The dtype of the numbers in the file, little-endian."""
    held = next((held for name, held in _NO_DTYPE if name.fullmatch(dtype)), "")
    if not held:
        with contextlib.suppress(TypeError):
            known = np.dtype(dtype).newbyteorder("<")
            held = known.str if known.kind in "biufc" else ""
    if not held:
        raise ValueError(f"there are no numbers of dtype {dtype!r}")
    return held
