"""The collector is paused while the tree is made, and as the user left it afterwards."""

import contextlib
import gc

import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.gc_pause import gc_paused


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collector(request):
    """The collector as a user may have set it."""
    before = gc.isenabled()
    gc.enable() if request.param else gc.disable()
    yield request.param
    gc.enable() if before else gc.disable()


class Seen(nnx.Module):
    def __init__(self) -> None:
        self.raises = False

    def __call__(self, x):
        assert not gc.isenabled()
        if self.raises:
            raise ValueError("of the model")
        return x


def test_the_collector_is_as_it_was(collector):
    model = Seen()
    nni.Inspector(model, jnp.ones(2), display=False).close()
    assert gc.isenabled() == collector
    model.raises = True
    with pytest.raises(ValueError, match="of the model"):
        nni.Inspector(model, jnp.ones(2), display=False)
    assert gc.isenabled() == collector


def test_pauses_that_overlap_end_in_any_order(collector):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(gc_paused())
    second.enter_context(gc_paused())
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled() == collector
