"""The usual names of the gates of NNX's recurrent cells: `cell@f` is an LSTM's forget gate.

Invariant: only a cell that runs NNX's own code with the usual functions, so that the order of its
operations is known, gets these names; in any other cell a gate is named after its operation. Knows
nothing of values.
"""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx

_LSTM = {"logistic": "i", "logistic[1]": "f", "tanh": "g", "logistic[2]": "o"}
_GRU = {"logistic": "r", "logistic[1]": "z", "tanh": "n"}
_CELLS: Mapping[type, Mapping[str, str]] = {
    nnx.LSTMCell: _LSTM,
    nnx.OptimizedLSTMCell: _LSTM,
    nnx.GRUCell: _GRU,
}
_NONE: Mapping[str, str] = {}


def gates_of(module: object, method: str) -> Mapping[str, str]:
    """Name of an operation -> name of the gate that it computes, in a call of a module."""
    names = _CELLS.get(type(module), _NONE)
    functions = [getattr(module, name, None) for name in ("gate_fn", "activation_fn")]
    usual = [getattr(f, "__name__", "") for f in functions] == ["sigmoid", "tanh"]
    return names if usual and method == "__call__" else _NONE
