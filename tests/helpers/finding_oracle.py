"""The numbers of a finding's sentence, and the same numbers by NumPy from the model's own arrays.

The oracle knows nothing of the package: it replaces `__call__` of the model's classes while the
loss runs once, line by line and scanned layers one by one, keeps what each module returns, and
differentiates the loss by what is added to it. All figures are computed in float64.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)"


def key_of(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


class Oracle:
    """What the modules of a model return in one run of a loss, and the gradients of that.

    Attributes:
        outputs: site -> its outputs as float64, one for each call.
        inputs: site -> the first argument of each call, if that is a number or an array of them.
        loss: the loss.
    """

    def __init__(self, model: nnx.Module, loss: Any, batch: Any):
        self.model, self._loss, self._batch = model, loss, batch
        found: dict[str, list[Any]] = {}
        self.inputs: dict[str, list[np.ndarray]] = {}

        def on_output(site: str, out: Any) -> Any:
            found.setdefault(site, []).append(out)
            return out

        self.loss = float(self._run(on_output))
        self._raw = {site: outs for site, outs in found.items() if all(map(_is_known, outs))}
        self.outputs = {
            site: [np.asarray(out.astype(jnp.float32), np.float64) for out in outs]
            for site, outs in self._raw.items()
        }

    def _run(self, on_output: Callable[[str, Any], Any]) -> Any:
        """The loss of a copy; `seen(site, out)` gives what each module returns."""
        copy = nnx.clone(self.model)  # with variables of its own, made where the loss runs
        sites = {id(m): key_of(path) for path, m in nnx.iter_modules(copy)}
        classes = {type(m) for _, m in nnx.iter_modules(copy)}
        originals = {cls: cls.__dict__["__call__"] for cls in classes if "__call__" in cls.__dict__}

        def replaced(original: Any, cls: type) -> Any:
            def call(module: Any, *args: Any, **kwargs: Any) -> Any:
                out = original(module, *args, **kwargs)
                known = type(module) is cls and id(module) in sites
                if known and args and _is_known(args[0], kind=jnp.number):
                    values = np.asarray(args[0]).astype(np.float64)
                    self.inputs.setdefault(sites[id(module)], []).append(values)
                return on_output(sites[id(module)], out) if known else out

            return call

        for cls, original in originals.items():
            cls.__call__ = replaced(original, cls)
        line_by_line = mock.patch.multiple(nnx, scan=_loop(sites), remat=lambda f: f)
        try:
            with line_by_line:
                return self._loss(copy, self._batch)
        finally:
            for cls, original in originals.items():
                cls.__call__ = original

    def examined(self, site: str) -> list[np.ndarray] | None:
        """What is examined of a site's outputs, `[examples, positions, units]` for each call.

        None if its calls differ in shape.
        """
        calls = self.outputs.get(site, [])
        if len({x.shape for x in calls}) != 1 or calls[0].ndim < 2:
            return None
        first, *between, last = calls[0].shape
        steps = [-(-first // 128), *_steps_between(between), -(-last // 64)]
        thinned = [x[tuple(slice(None, None, step) for step in steps)] for x in calls]
        return [x.reshape(len(x), -1, x.shape[-1]) for x in thinned]

    def variables(self) -> dict[str, np.ndarray]:
        """Path -> the values of each floating-point variable, statistics too."""
        return {
            key_of(path): np.asarray(x[...].astype(jnp.float32), np.float64)
            for path, x in nnx.to_flat_state(nnx.state(self.model))
            if jnp.issubdtype(x.dtype, jnp.floating)
        }

    def dtype(self, site: str) -> Any:
        """The dtype of what a site returns."""
        return self._raw[site][0].dtype

    def gradient_norms(self) -> dict[str, float]:
        """Site -> the L2 norm of the loss's gradient by all that it returns."""
        added = {
            f"{site} {i}": jnp.zeros(out.shape, out.dtype)
            for site, outs in self._raw.items()
            for i, out in enumerate(outs)
        }

        def of(added: Any) -> Any:
            calls: dict[str, int] = {}

            def on_output(site: str, out: Any) -> Any:
                number = calls[site] = calls.get(site, -1) + 1
                more = added.get(f"{site} {number}")
                return out if more is None else out + more

            return self._run(on_output)

        squares: dict[str, float] = {}
        for key, found in jax.grad(of)(added).items():
            site = key.rpartition(" ")[0]
            values = np.asarray(found.astype(jnp.float32), np.float64)
            squares[site] = squares.get(site, 0.0) + float((values**2).sum())
        return {site: float(np.sqrt(square)) for site, square in squares.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        """Path -> the values of each parameter."""
        flat = nnx.to_flat_state(nnx.state(self.model, nnx.Param))
        return {
            key_of(path): np.asarray(jnp.asarray(x[...]).astype(jnp.float32), np.float64)
            for path, x in flat
        }

    def parameter_gradients(self) -> dict[str, np.ndarray]:
        """Path -> the gradient of the loss by each parameter."""
        grads = nnx.grad(self._loss)(self.model, self._batch)
        return {
            key_of(path): np.asarray(jnp.asarray(x[...]).astype(jnp.float32), np.float64)
            for path, x in nnx.to_flat_state(grads)
        }


def batch_norm_offsets(
    calls: list[np.ndarray], held: dict[str, np.ndarray], site: str
) -> dict[str, float]:
    """How far the outputs of a BatchNorm are from its bias, and their deviation from its scale."""
    step = -(-held[f"{site}/scale"].size // 64) if f"{site}/scale" in held else 1
    scale = held.get(f"{site}/scale", np.ones(1))[::step]
    bias = held.get(f"{site}/bias", np.zeros(1))[::step]
    mean = np.mean([x.mean(axis=(0, 1)) for x in calls], axis=0)
    deviation = np.mean([x.std(axis=(0, 1)) for x in calls], axis=0)
    return {
        "shifted": float(np.median(np.abs(mean - bias) / np.abs(scale))),
        "scaled": float(np.median(deviation / np.abs(scale))),
    }


def _loop(sites: dict[int, str]) -> Callable[..., Any]:
    """`nnx.scan` over the layers of a stack as a loop, in which each layer has its own sites.

    `sites` gets them, by the identity of their modules. Another scan stays as it is.
    """
    scan, layers = nnx.scan, list[Any]()  # that are kept, and so their identities

    def looped(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        if how != {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}:
            return scan(f, **how)

        def run(stack: Any, carry: Any) -> Any:
            definition, state = nnx.split(stack)
            for i in range(len(jax.tree.leaves(state)[0])):
                layer = nnx.merge(definition, jax.tree.map(lambda x, i=i: x[i], state))
                layers.append(layer)
                for path, module in nnx.iter_modules(layer):
                    sites[id(module)] = f"{key_of((sites[id(stack)], *path))}[{i}]"
                carry = f(layer, carry)
            return carry

        return run

    return looped


def _steps_between(lengths: list[int]) -> list[int]:
    """The step along each axis of the positions: an odd one, so that few enough are left.

    Of the axes, the one of which the smallest part is looked at gets twice as many, while there
    are at most 64 in all.
    """
    counts = [1 for _ in lengths]
    while True:
        more = [
            [*counts[:i], min(2 * count, length), *counts[i + 1 :]]
            for i, (count, length) in sorted(
                enumerate(zip(counts, lengths, strict=True)), key=lambda x: x[1][0] / x[1][1]
            )
            if count < length
        ]
        allowed = [new for new in more if np.prod(new) <= 64]
        if not allowed:
            break
        counts = allowed[0]
    steps = [-(-length // count) for length, count in zip(lengths, counts, strict=True)]
    return [step if step % 2 else step + 1 for step in steps]


def _is_known(out: Any, *, kind: Any = jnp.floating) -> bool:
    floats = isinstance(out, jax.Array) and jnp.issubdtype(out.dtype, kind)
    return floats and not isinstance(out, jax.core.Tracer)


def parse_sentence(pattern: str, text: str) -> dict[str, str]:
    """The named parts of a sentence; `#name#` in the pattern stands for a number.

    Raises:
        AssertionError: the text is another sentence.
    """
    named = re.sub(r"#(\w+)#", lambda m: NUMBER.replace("(", f"(?P<{m[1]}>", 1), pattern)
    found = re.search(named, text)
    assert found is not None, (pattern, text)
    return {name: part for name, part in found.groupdict().items() if part is not None}


def close(said: str, oracle: float, *, percent: bool = False) -> bool:
    """Whether a number in a sentence is the oracle's, rounded as the sentence rounds."""
    value, whole = float(said), oracle * (100 if percent else 1)
    digits = said.partition("e")[0].lstrip("-").replace(".", "").lstrip("0")
    unit = 10.0 ** (np.floor(np.log10(abs(value))) - max(len(digits), 1) + 1) if value else 1e-300
    if percent or ("e" not in said and "." not in said and abs(value) >= 1):
        unit = min(unit, 1.0)
    return abs(value - whole) <= 0.51 * unit + 2e-3 * abs(whole)
