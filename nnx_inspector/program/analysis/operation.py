"""An operation that makes a NaN or an infinity, its operands in figures, and both in words.

Invariant: a figure is of all values of the operand. Runs nothing.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

OF_NEGATIVES = {"log", "log1p", "sqrt", "rsqrt", "pow", "digamma", "lgamma", "acosh"}
_OF_ZEROS = {"div", "mul", "dot_general", "log", "rsqrt", "pow", "integer_pow", "rem", "atan2"}
Loops = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """The figures of an operand.

    Attributes:
        dtype, shape: of the array.
        nan, posinf, neginf, zeros, negative: how many of its values are of each kind.
        low, high: the smallest and the largest finite value; NaN if there is none.
    """

    dtype: str
    shape: tuple[int, ...]
    nan: int
    posinf: int
    neginf: int
    zeros: int
    negative: int
    low: float
    high: float

    @staticmethod
    def of(x: object) -> Operand:
        array = np.asarray(jax.device_get(x))
        wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
        values = np.abs(wide) if np.iscomplexobj(wide) else wide
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
        return Operand(
            dtype=str(array.dtype),
            shape=array.shape,
            nan=int(np.isnan(values).sum()),
            posinf=int((values == np.inf).sum()),
            neginf=int((values == -np.inf).sum()),
            zeros=int((values == 0).sum()),
            negative=int((values < 0).sum()),
            low=float(low),
            high=float(high),
        )

    def _number(self, value: float) -> str:
        """A value in words: exact if it is an integer, because it may be an id."""
        exact = self.dtype.startswith(("int", "uint")) and math.isfinite(value)
        return str(int(value)) if exact else f"{value:.4g}"

    def in_words(self, *, zeros: bool = False, negative: bool = False) -> str:
        """Its range and its infinities; if wanted, its zeros and negative values too."""
        counts = [(self.nan, "NaN"), (self.posinf, "+Inf"), (self.neginf, "-Inf")]
        counts += [(self.zeros, f"zero{'s' * (self.zeros > 1)}")] * zeros
        counts += [(self.negative, "negative")] * negative
        found = [(n, what) for n, what in counts if n]
        size = math.prod(self.shape)
        if size == 1:
            return found[0][1] if self.low != self.low else self._number(self.low)
        for n, what in found:
            if n == size:
                return f"{size} {what}" + " values" * (what == "negative")
        low, high = self._number(self.low), self._number(self.high)
        within = f" from {low} to {high}" if self.low <= self.high else ""
        among = " and ".join(f"{n} {what}" for n, what in found)
        return f"{size} values{within}" + f" with {among}" * bool(found)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that makes a NaN or an infinity.

    Attributes:
        name: the primitive, such as "log" or "dot_general".
        site: the site whose call it belongs to; None if unknown, as in the backward pass.
        makes: "NaN" or "Inf".
        operands: the figures of what it received.
        source: `file:line` of the user's code; "" if unknown.
        function: the name of the function that has this line; "" if unknown.
        loops: the iteration of each loop around it, outermost first: ("scan", 3).
        backward: whether it belongs to the backward pass of that line.
        result: the dtype of its result.
        length: of a gather, how many entries the axis has that its indices select from; else 0. The
            indices are then those that the user's code gave, before negative ones were counted from
            the end.
        after: for a NaN made from an infinity, the operation that made the infinity; None if there
            is none, or the infinity was an argument or a constant.
    """

    name: str
    makes: str
    operands: tuple[Operand, ...]
    site: str | None = None
    source: str = ""
    function: str = ""
    loops: Loops = ()
    backward: bool = False
    result: str = ""
    length: int = 0
    after: Operation | None = None

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self) -> str:
        """`"log of 8 values from 0 to 3 with 2 zeros, in logits at model.py:41"`."""
        what = f"conversion to {self.result}" if self.name == "convert_element_type" else self.name
        how = {"zeros": self.name in _OF_ZEROS, "negative": self.name in OF_NEGATIVES}
        operands = [one.in_words(**how) for one in self.operands]
        if len(operands) > 1:
            operands = [f"[{words}]" for words in operands]
        text = f"{what} of {' and '.join(operands)}" if operands else what
        if self.length:
            at = f" at [{self.operands[1].in_words()}]" if self.operands else ""
            text = f"{what}{at} along an axis of length {self.length} (NaN outside of it)"
        folder, _, name = self.source.replace("\\", "/").rpartition("/")
        if "ipykernel_" in folder:  # the file's name is generated
            name = f"line {name.rpartition(':')[2]} of a notebook cell"
        place = f"{self.function} at {name}" if self.function else name
        if self.backward:
            text += ", in the backward pass" + f" of {place}" * bool(self.source)
        elif self.source:
            text += f", in {place}"
        for loop, iteration in self.loops:
            text += f", in iteration {iteration} of a {loop}"
        if self.after is not None:
            text += f"; the infinity comes from {self.after.in_words()}"
        return text
