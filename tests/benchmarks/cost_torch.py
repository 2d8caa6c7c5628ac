"""The rows in PyTorch: the bare steps, hooks with `torch.histc`, torchlens."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torchlens

from tests.benchmarks import nets_torch
from tests.benchmarks.cost_jax import Case, Row


def _size(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(_size(part) for part in tree) if isinstance(tree, (list, tuple)) else 0


def rows(case: Case) -> list[Row]:
    """The rows of PyTorch; torchlens apart, for it leaves wrappers on PyTorch's functions."""
    x, labels = (torch.from_numpy(a) for a in case.data())
    labels = labels.long()
    torch.manual_seed(0)
    model = getattr(nets_torch, case.maker)(*case.sizes, **case.options())
    parameters = list(model.parameters())

    def train() -> None:
        scores = model(x)
        loss = torch.nn.functional.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
        )
        loss.backward()
        with torch.no_grad():
            for p in parameters:
                p -= 1e-3 * p.grad
                p.grad = None

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def hooked(step: Any, gradients: bool) -> Any:
        def call() -> list[Any]:
            hooks = nets_torch.Hooks(model, gradients=gradients)
            try:
                step()
            finally:
                hooks.remove()
            return hooks.take()

        return call

    step, look = "PyTorch train step", "PyTorch forward pass"
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    out = [
        Row(step, step, train),
        Row("forward and backward hooks, histc", step, hooked(train, True)),
        Row(look, look, forward),
        Row("forward hooks, histc", look, hooked(forward, False)),
    ]
    for row in (out[1], out[3]):
        row.result = _size(row.call())
    return out


def torchlens_rows(case: Case) -> list[Row]:
    """torchlens, which is run after everything else."""
    x = torch.from_numpy(case.data()[0])
    model = getattr(nets_torch, case.maker)(*case.sizes, **case.options())

    def trace() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchlens.trace(model, x)

    return [Row("torchlens.trace, all kept", "PyTorch forward pass", trace)]
