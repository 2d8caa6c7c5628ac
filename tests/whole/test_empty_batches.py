"""A study of an empty batch is refused in words; a pass over it is made as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni


class Language(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(7, 4, rngs=rngs)
        self.blocks = nnx.Sequential(*[nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 7, rngs=rngs)

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        x = self.token(tokens)
        if cache is not None:
            x = x + cache.sum()
        return self.head(self.blocks(x))


def loss_fn(model: Any, tokens: Any, *rest: Any) -> Any:
    return (model(tokens, *rest) ** 2).sum()


STUDIES: dict[str, Callable[..., Any]] = {
    "attribute": lambda model, *x: nni.attribute(model, *x),
    "lens": lambda model, *x: nni.lens(model, *x),
    "logit_attribution": lambda model, *x: nni.logit_attribution(model, *x),
    "sweep": lambda model, *x: nni.sweep(model, loss_fn, *x, progress=False),
    "top_examples": lambda model, *x: nni.top_examples(model, [x], "head", progress=False),
    "units": lambda model, *x: nni.Inspector(model, *x, display=False).units("head"),
    "insp.attribute": lambda model, *x: nni.Inspector(model, *x, display=False).attribute(),
    "insp.lens": lambda model, *x: nni.Inspector(model, *x, display=False).lens(),
    "insp.sweep": lambda model, *x: nni.Inspector(model, *x, display=False).sweep(progress=False),
}


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("study", STUDIES)
def test_it_is_refused_in_words(study: str, shape: tuple[int, int]):
    model, tokens = Language(rngs=nnx.Rngs(0)), jnp.zeros(shape, int)
    if study == "top_examples" and shape[0]:
        with pytest.raises(ValueError, match=r"example|empty"):
            STUDIES[study](model, tokens)
        return
    with pytest.raises(ValueError, match=r"batch has none: it is int32\[|no batch with an example"):
        STUDIES[study](model, tokens)


@pytest.mark.parametrize("study", STUDIES)
def test_one_example_and_an_empty_cache_beside_it_are_studied(study: str):
    model, tokens = Language(rngs=nnx.Rngs(0)), jnp.ones((2, 5), int)
    if study == "top_examples":  # a batch is along the first axis of all its arrays
        STUDIES[study](model, tokens)
    else:
        STUDIES[study](model, tokens, jnp.zeros((0, 4)))


def test_a_pass_is_made_as_ever():
    model, tokens = Language(rngs=nnx.Rngs(0)), jnp.zeros((0, 5), int)
    y, record = nni.capture(model, units=-1)(tokens)
    assert y.shape == (0, 5, 7)
    assert record["head"].output.size == 0
    (loss, _), _ = nni.value_and_grad(loss_fn)(model, tokens)
    assert loss == 0
    insp = nni.Inspector(model, tokens, display=False)
    assert insp.run(tokens).shape == (0, 5, 7)
    assert insp.step(loss_fn, tokens) == 0
    insp.close()
