"""A kernel that is shut down while inspectors are open says nothing of them."""

import sys
import threading

from jupyter_client.manager import KernelManager

CELL = """
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni
inspectors = [nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))) for _ in "ab"]
assert [len(insp.recording) for insp in inspectors] == [1, 1]
"""
MOVE = """
from nnx_inspector.screen.export import notebook
notebook.REST_SECONDS = 1000
for insp in inspectors:
    insp.run(jnp.zeros((4, 2)))
"""
"""A change that the saved output has not taken over yet when the kernel ends."""


def test_open_inspectors_leave_no_traceback(tmp_path):
    kernel, told = KernelManager(), (tmp_path / "stderr").open("w+")
    kernel.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.start_kernel(stderr=told, stdout=told)
    client = kernel.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        for code, silent in ((CELL, False), (MOVE, True)):
            how = {"silent": silent, "timeout": 120, "output_hook": lambda message: None}
            reply = client.execute_interactive(code, **how)
            assert reply["content"]["status"] == "ok", reply["content"]
        client.shutdown(reply=True, timeout=60)
        ended = threading.Thread(target=kernel.provisioner.process.wait)
        ended.start()
        ended.join(120)
        assert not ended.is_alive()
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    told.seek(0)
    assert "Traceback" not in told.read()
    told.close()
