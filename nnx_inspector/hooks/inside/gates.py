"""The field's names for the gates of NNX's recurrent cells: `cell@f` is what an LSTM forgets by.

Invariant: a name is given only to a cell that runs NNX's own code with the usual functions, in
which the order of the operations is known; in every other cell a gate has the name of its
operation. Knows nothing of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

_LSTM = {"logistic": "i", "logistic[1]": "f", "tanh": "g", "logistic[2]": "o"}
_GRU = {"logistic": "r", "logistic[1]": "z", "tanh": "n"}
_CELLS: Mapping[type, Mapping[str, str]] = {
    nnx.LSTMCell: _LSTM,
    nnx.OptimizedLSTMCell: _LSTM,
    nnx.GRUCell: _GRU,
}
_NONE: Mapping[str, str] = {}


def gates_of(module: Any, method: str) -> Mapping[str, str]:
    """Name of an operation -> name of the gate that it computes, in a call of a module."""
    names = _CELLS.get(type(module), _NONE)
    functions = [getattr(module, name, None) for name in ("gate_fn", "activation_fn")]
    usual = [getattr(f, "__name__", "") for f in functions] == ["sigmoid", "tanh"]
    return names if usual and method == "__call__" else _NONE
