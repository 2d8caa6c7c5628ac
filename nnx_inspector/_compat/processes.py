"""The processes of a job, and what they tell each other beside their programs.

The coordinator that `jax.distributed.initialize` starts keeps texts by name, and barriers with a
time limit. Programs launch no collective for it, and devices are not asked. Invariant: no function
here raises because another process is late or gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax._src import mesh

from nnx_inspector._compat.jit import is_tracer
from nnx_inspector.typing import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinator:
    """What the processes of a job have in common; made by `coordinator`."""

    client: Any

    def put(self, name: str, text: str) -> None:
        """Let each process read a text."""
        self.client.key_value_set(name, text, allow_overwrite=True)

    def texts(self, folder: str) -> dict[str, str]:
        """The texts whose names begin with `folder/`, by the rest of their names."""
        found = self.client.key_value_dir_get(f"{folder}/")
        return {name.removeprefix(f"{folder}/"): text for name, text in found}

    def forget(self, name: str) -> None:
        self.client.key_value_delete(name)

    def wait_at_barrier(self, name: str, seconds: float) -> bool:
        """Wait until every process of the job is here; False if one does not come in time.

        A name serves once: a process that comes when the others have given up returns at once.
        """
        try:
            # A barrier of the coordinator needs no device. One made of a collective would hang for
            # good if a process is late, and could not be told apart from a slow program.
            self.client.wait_at_barrier(name, int(1000 * seconds))
        except jax.errors.JaxRuntimeError:
            return False
        return True


def spans_processes(tree: PyTree) -> bool:
    """Whether what computes with these arrays runs in other processes too: one of them lies partly
    there, or the current mesh does, on which jax puts arrays that lie nowhere in particular.
    """
    if jax.process_count() == 1:
        return False
    # jax.sharding.get_mesh raises while something is traced
    current = mesh.get_concrete_mesh()
    if not current.empty and current.is_multi_process:
        return True
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not is_tracer(x)]
    return any(not x.is_fully_addressable for x in arrays)


def coordinator() -> Coordinator | None:
    """The job's coordinator; None if the process is alone, or jax.distributed is not set up."""
    # jax has no public way to the coordinator that it starts itself. Without it, processes could
    # only agree by a program that all of them launch, and wait for one that does not for good. It
    # can go when jax.experimental.multihost_utils has a barrier with a time limit.
    from jax._src import distributed

    client = distributed.global_state.client
    return None if client is None or jax.process_count() == 1 else Coordinator(client)
