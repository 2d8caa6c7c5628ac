"""The gates of recurrent cells, by the field's names, against the equations of each cell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

B, T, D, H = 16, 5, 4, 12
X = jax.random.normal(jax.random.key(0), (B, T, D))


class Net(nnx.Module):
    def __init__(self, cell: nnx.Module):
        self.rnn = nnx.RNN(cell)  # type: ignore[arg-type]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rnn(x)


def linear(layer: Any, x: np.ndarray) -> np.ndarray:
    bias = np.asarray(layer.bias[...], np.float64) if layer.bias is not None else 0.0
    return x @ np.asarray(layer.kernel[...], np.float64) + bias


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(cell: Any, x: np.ndarray, change: Any) -> dict[str, np.ndarray]:
    c = h = np.zeros((B, H))
    rows: list[dict[str, np.ndarray]] = []
    for t in range(T):
        if isinstance(cell, nnx.OptimizedLSTMCell):
            i, f, g, o = np.split(linear(cell.dense_i, x[:, t]) + linear(cell.dense_h, h), 4, -1)
        else:
            pairs = [
                (cell.ii, cell.hi),
                (cell.if_, cell.hf),
                (cell.ig, cell.hg),
                (cell.io, cell.ho),
            ]
            i, f, g, o = (linear(a, x[:, t]) + linear(b, h) for a, b in pairs)
        at = {"i": sigmoid(i), "f": sigmoid(f), "g": np.tanh(g), "o": sigmoid(o)}
        at = {name: change(name, value) for name, value in at.items()}
        c = at["f"] * c + at["i"] * at["g"]
        h = at["o"] * np.tanh(c)
        rows.append({**at, "": h})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def gru(cell: Any, x: np.ndarray, change: Any) -> dict[str, np.ndarray]:
    h, rows = np.zeros((B, H)), list[dict[str, np.ndarray]]()
    for t in range(T):
        xr, xz, xn = np.split(linear(cell.dense_i, x[:, t]), 3, -1)
        hr, hz, hn = np.split(linear(cell.dense_h, h), 3, -1)
        at = {"r": change("r", sigmoid(xr + hr)), "z": change("z", sigmoid(xz + hz))}
        at["n"] = change("n", np.tanh(xn + at["r"] * hn))
        h = (1 - at["z"]) * at["n"] + at["z"] * h
        rows.append({**at, "": h})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def same(name: str, value: np.ndarray) -> np.ndarray:
    return value


@pytest.mark.parametrize(
    ("make", "explicit", "names"),
    [
        (nnx.OptimizedLSTMCell, lstm, "ifgo"),
        (nnx.LSTMCell, lstm, "ifgo"),
        (nnx.GRUCell, gru, "rzn"),
    ],
)
def test_each_gate_is_that_of_the_equations(make: Any, explicit: Any, names: str) -> None:
    cell = make(D, H, rngs=nnx.Rngs(0))
    model, x = Net(cell), np.asarray(X, np.float64)
    wanted = explicit(cell, x, same)
    _, record = nni.capture(model, only="rnn/cell@?", values=True)(X)
    assert sorted(record) == sorted(f"rnn/cell@{name}" for name in names)
    for name in names:
        found = record[f"rnn/cell@{name}"]
        assert found.values.shape == (T, B, H)  # a row for each step of time
        np.testing.assert_allclose(found.values, wanted[name], atol=1e-5)
        assert found.row(2).output.mean == pytest.approx(wanted[name][2].mean(), abs=1e-5)
        half = explicit(cell, x, lambda at, v, name=name: v / 2 if at == name else v)
        moved = nni.perturbed(model)({f"rnn/cell@{name}": nni.Scale(0.5)}, X)
        np.testing.assert_allclose(moved.swapaxes(0, 1), half[""], atol=1e-5)


def test_a_simple_cell_and_one_with_other_functions_have_the_names_of_operations() -> None:
    simple = Net(nnx.SimpleCell(D, H, rngs=nnx.Rngs(0)))
    _, record = nni.capture(simple, only="rnn/cell@tanh", values=True)(X)
    np.testing.assert_array_equal(record["rnn/cell@tanh"].values.swapaxes(0, 1), simple(X))
    other = Net(nnx.LSTMCell(D, H, activation_fn=nnx.sigmoid, rngs=nnx.Rngs(0)))
    sites = [c.site for c in nni.trace(other, X, only="rnn/cell@logistic*").calls]
    assert sites == [f"rnn/cell@logistic{n}" for n in ("", "[1]", "[2]", "[3]", "[4]")]


def test_findings_see_gates_that_are_shut() -> None:
    cell = nnx.OptimizedLSTMCell(D, H, rngs=nnx.Rngs(0))
    bias = cell.dense_h.bias
    assert bias is not None

    def found() -> list[nni.Finding]:
        insp = nni.Inspector(Net(cell), X, only=["**", "rnn/cell@?"], display=False)
        findings = [f for f in insp.findings if f.rule == "saturated-units"]
        insp.close()
        return findings

    assert found() == []
    bias[...] = jnp.concatenate([bias[...][:H], bias[...][H : 2 * H] - 40, bias[...][2 * H :]])
    (one,) = found()
    assert (one.site, one.severity) == ("rnn/cell@f", "error")
    assert "flat parts of the sigmoid" in one.what


def test_both_ways_have_rows_in_the_order_in_which_they_run() -> None:
    rngs = nnx.Rngs(0)
    ways = [nnx.RNN(nnx.GRUCell(D, H, rngs=rngs)) for _ in range(2)]
    _, record = nni.capture(nnx.Bidirectional(*ways), only="**/cell@z", values=True)(X)
    x = np.asarray(X, np.float64)
    for name, way, seen in zip(("forward", "backward"), ways, (x, x[:, ::-1]), strict=True):
        wanted = gru(way.cell, seen, same)["z"]
        np.testing.assert_allclose(record[f"{name}_rnn/cell@z"].values, wanted, atol=1e-5)


def test_each_step_of_an_own_scan_has_its_gradient() -> None:
    class Own(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(D, D, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            def step(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = nnx.sigmoid(self.inner(h)) * row
                return h, h

            return jax.lax.scan(step, jnp.zeros((B, D)), x.swapaxes(0, 1))[1]

    def explicit(added: jax.Array) -> jax.Array:
        h, loss = jnp.zeros((B, D)), jnp.zeros(())
        for t in range(T):
            h = (jax.nn.sigmoid(model.inner(h)) + added[t]) * X[:, t]
            loss += (h**2).sum()
        return loss

    model = Own()
    wanted = jax.grad(explicit)(jnp.zeros((T, B, D)))
    run = nni.value_and_grad(lambda m, x: (m(x) ** 2).sum(), only="@logistic")
    entry = run(model, X)[0][1]["@logistic"]
    norms = [entry.row(t).gradient.norm for t in range(T)]
    assert norms == pytest.approx([float(jnp.linalg.norm(g)) for g in wanted], rel=1e-4)
