"""What a steered run says in its recording: its id, its perturbations, and its answers.

It is the table "control", with a line of text for each thing said. A perturbation is the message
that the screen shows of it. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from nnx_inspector.screen import protocol

CONTROL: Final = "control"
"""The title of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlState:
    """A steered run.

    Attributes:
        run: its id, which each request must have; "" once it is over.
        every: every so many steps are measured.
        perturbations: its perturbations, as the screen shows them.
        answers: the number of a request -> why it failed, "" if it was carried out.
        done: what was carried out, each with the step from which on it acts:
            `(12, 'run.perturb("head", nni.Zero())')`.
    """

    run: str
    every: int
    perturbations: tuple[protocol.Perturbation, ...] = ()
    answers: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    done: tuple[tuple[int, str], ...] = ()

    def to_columns(self) -> dict[str, np.ndarray]:
        """The table."""
        lines = [
            ("run", self.run),
            ("every", str(self.every)),
            *(("perturbation", json.dumps(protocol.to_fields(one))) for one in self.perturbations),
            *(("answer", json.dumps(one)) for one in self.answers.items()),
            *(("done", json.dumps(one)) for one in self.done),
        ]
        return {
            "what": np.array([what for what, _ in lines], object),
            "text": np.array([text for _, text in lines], object),
        }

    @staticmethod
    def from_columns(columns: Mapping[str, Any]) -> ControlState:
        """Read a table, which may come from anybody.

        Raises:
            ValueError, TypeError, KeyError: it is no such table.
        """
        said: dict[str, list[str]] = {}
        for what, text in zip(columns["what"].tolist(), columns["text"].tolist(), strict=True):
            said.setdefault(what, []).append(text)
        read = protocol.struct_of
        return ControlState(
            run=said["run"][0],
            every=int(said["every"][0]),
            perturbations=tuple(
                read(protocol.Perturbation, json.loads(x)) for x in said.get("perturbation", ())
            ),
            answers={int(i): str(why) for i, why in map(json.loads, said.get("answer", ()))},
            done=tuple((int(at), str(text)) for at, text in map(json.loads, said.get("done", ()))),
        )
