"""A script that trains in a thread and takes requests, until it is to end."""

import threading

import jax.numpy as jnp
import numpy as np
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
forward = nnx.jit(lambda model, x: model(x))


class TrainingThread:
    """A loop in a thread that makes passes until it is to end.

    Args:
        model: what it trains.
        step: a function of the model and the number of the step; by default a jitted forward pass.
        how: the arguments of `nni.watch`.
    """

    def __init__(self, path, model=None, step=None, **how):
        self.path, self.model, self.errors = path, model or TwoLayers(nnx.Rngs(0)), []
        self._step = step or (lambda model, number: forward(model, X))
        self._how = {"every": 1, "control": True, **how}
        self._passed, self._over, self._output = threading.Condition(), False, None
        self.steps = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        with self._passed:
            assert self._passed.wait_for(lambda: self._output is not None or self.errors, 60)

    def _run(self):
        try:
            with nni.watch(self.model, save=self.path, **self._how) as self.recording:
                while not self._over:
                    output = np.asarray(self._step(self.model, self.steps))
                    with self._passed:
                        self._output = output
                        self.steps += 1
                        self._passed.notify_all()
        except BaseException as error:
            with self._passed:
                self.errors.append(error)
                self._passed.notify_all()

    def wait_for(self, wanted):
        """Wait for a pass that returns these values."""
        self.wait(lambda: np.allclose(self._output, wanted))

    def wait(self, condition):
        """Wait for something that is looked at after each pass."""
        with self._passed:
            assert self._passed.wait_for(condition, 60)

    def end(self):
        self._over = True
        self.thread.join()
        return self.errors
