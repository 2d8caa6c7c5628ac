"""The pattern of cudnn's kernel, from its operands. The kernel itself needs a GPU: the call is only
traced here, and the pattern computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

B, Q, K, H, G, D = 2, 5, 6, 4, 2, 8


class Attends(nnx.Module):
    def __init__(self, **how: Any):
        attend = jax.nn.dot_product_attention
        self.attend = nnx.static(functools.partial(attend, implementation="cudnn", **how))

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.attend(q, k, v)


class Stopped(Exception):
    """Raised in place of running the kernel, with its pattern."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{kernel}.check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(f"{kernel}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(f"{kernel}.is_cuda_compute_capability_equal", lambda _: False)


def arrays(heads: int = H) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(B, Q, H, D), (B, K, heads, D), (B, K, heads, D)]
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(*of).astype(jnp.bfloat16) for of in pairs]


def pattern_of(model: Any, *args: Any) -> np.ndarray:
    def stop(_: Any, args: Any, *rest: Any) -> Any:
        raise Stopped(args[0])

    with nni.intercept_methods(stop, only="@attention", model=model):
        with pytest.raises(Stopped) as stopped:
            model(*args)
    return np.asarray(stopped.value.args[0], np.float64)


RNG = np.random.default_rng(1)
MASK = RNG.random((B, 1, Q, K)) > 0.3
MASK[..., 0] = True  # no query without keys
BIAS = RNG.normal(size=(B, H, Q, K))
CAUSAL = np.tril(np.ones((Q, K), bool))
WINDOW = CAUSAL & (np.arange(Q)[:, None] - np.arange(K) <= 2)
LENGTHS = np.asarray([3, K])
PADDED = np.arange(K) < LENGTHS[:, None, None, None]
GIVEN = {"key_value_seq_lengths": jnp.asarray(LENGTHS, jnp.int32)}
BIASED = {"bias": jnp.asarray(BIAS, jnp.bfloat16)}
CASES: dict[str, tuple[int, dict[str, Any], Any, Any]] = {
    "bare": (H, {}, True, 0.0),
    "grouped": (G, {"scale": 0.5}, True, 0.0),
    "causal": (G, {"is_causal": True}, CAUSAL, 0.0),
    "window": (H, {"is_causal": True, "local_window_size": 2}, WINDOW, 0.0),
    "padding": (H, GIVEN, PADDED, 0.0),
    "padding, causal": (H, {**GIVEN, "is_causal": True}, PADDED & CAUSAL, 0.0),
    "mask": (H, {"mask": jnp.asarray(MASK)}, MASK, 0.0),
    "bias": (H, BIASED, True, BIAS),
    "bias, mask": (G, {**BIASED, "mask": jnp.asarray(MASK)}, MASK, BIAS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_pattern_of_a_kernel_is_that_of_numpy(case: str) -> None:
    heads, how, mask, bias = CASES[case]
    q, k, v = arrays(heads)
    a, b = (np.asarray(x, np.float64) for x in (q, k))
    scores = np.einsum("bqhd,bkhd->bhqk", a, b.repeat(H // heads, axis=2))
    scores = np.where(mask, scores * how.get("scale", 1 / np.sqrt(D)) + bias, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(pattern_of(Attends(**how), q, k, v), wanted, atol=0.01)


def test_a_trace_finds_the_kernel_and_a_perturbation_is_refused() -> None:
    (q, k, v), model = arrays(G), Attends(is_causal=True)
    (call,) = nni.trace(model, q, k, v, only="**@attention").calls
    assert (call.site, call.output) == ("@attention", f"bfloat16[{B},{H},{Q},{K}]")
    assert nni.trace(model, q, k, v).calls[0].attends == 1
    with pytest.raises(ValueError, match=r"'@attention' cannot be changed.*implementation=\"xla\""):
        nni.perturbed(model)({"@attention": nni.Zero()}, q, k, v)
    with nni.perturb("@attention", nni.Zero()):
        with pytest.raises(ValueError, match="'@attention' cannot be changed"):
            model(q, k, v)


def test_the_kernel_is_called_as_without_a_selection() -> None:
    (q, k, v), model = arrays(), Attends(return_residual=True)

    def kernels(only: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(lambda *args: nni.capture(model, only=only)(*args))(q, k, v)
        return [line.strip() for line in str(jaxpr).splitlines() if "mask_type" in line]

    assert kernels("") == kernels(["", "@attention"])
    assert len(kernels("")) == 1
