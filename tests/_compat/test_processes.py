"""The coordinator of a job, which `tests/whole/test_processes.py` tries with two processes."""

from jax._src import distributed
from jax._src.lib import _jax

from nnx_inspector._compat.processes import coordinator


def test_a_process_that_is_alone_has_none():
    assert distributed.global_state.client is None
    assert coordinator() is None


def test_jax_has_what_is_asked_of_it():
    wanted = ("key_value_set", "key_value_dir_get", "key_value_delete", "wait_at_barrier")
    missing = [name for name in wanted if not hasattr(_jax.DistributedRuntimeClient, name)]
    assert not missing, f"jax's client of the coordinator has no {missing}"
