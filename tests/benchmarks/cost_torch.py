"""The rows in PyTorch: the bare steps, hooks with `torch.histc`, torchlens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch

from tests.benchmarks import nets_torch
from tests.benchmarks.cost_jax import Case, Row
from tests.benchmarks.machine import processor

ON_GPU = jax.default_backend() == "gpu" and torch.cuda.is_available()
"""Beside a GPU of jax's, PyTorch takes its own; with a build for the CPU it stays on that."""
DEVICE = "cuda" if ON_GPU else "cpu"
MACHINE = torch.cuda.get_device_name() if ON_GPU else processor()
if ON_GPU:
    torch.set_float32_matmul_precision("high")  # TF32, as jax by default


def _model(case: Case) -> Any:
    model = getattr(nets_torch, case.maker)(*case.sizes, **case.options()).to(DEVICE)
    return model.to(torch.bfloat16) if case.half else model


def _finished(step: Callable[[], Any]) -> Callable[[], Any]:
    """`step`, and a wait for what it has launched."""

    def call() -> Any:
        out = step()
        if ON_GPU:
            torch.cuda.synchronize()
        return out

    return call


def _size(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(_size(part) for part in tree) if isinstance(tree, (list, tuple)) else 0


def _row(label: str, against: str, step: Callable[[], Any]) -> Row:
    return Row(label, against, _finished(step), machine=MACHINE)


def rows(case: Case) -> list[Row]:
    """The rows of PyTorch; torchlens apart, for it leaves wrappers on PyTorch's functions."""
    x, labels = (torch.from_numpy(a).to(DEVICE) for a in case.data())
    labels = labels.long()
    torch.manual_seed(0)
    model = _model(case)
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
        _row(step, step, train),
        _row("forward and backward hooks, histc", step, hooked(train, True)),
        _row(look, look, forward),
        _row("forward hooks, histc", look, hooked(forward, False)),
    ]
    for row in (out[1], out[3]):
        row.result = _size(row.call())
    return out


def torchlens_rows(case: Case) -> list[Row]:
    """torchlens, which is run after everything else."""
    import torchlens

    x = torch.from_numpy(case.data()[0]).to(DEVICE)
    model = _model(case)

    def trace() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchlens.trace(model, x)

    return [_row("torchlens.trace, all kept", "PyTorch forward pass", trace)]
