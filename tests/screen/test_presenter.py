"""When the newest pass is sent: a frame that took a processor long is followed by a pause."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from inside import acknowledge, last_sent
from summaries import summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import comm, presenter
from nnx_inspector.screen.comm import InspectorWidget
from nnx_inspector.screen.presenter import LONG_FRAME, PAUSE_FACTOR, Presenter


class Owner:
    """A recording with one pass, and no more than a frame needs."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.recording.append(0, {"a": {"output": summary_of(np.ones(4))}})

    def snapshot(self) -> dict[str, Any]:
        return {"recording": self.recording, "metrics": {}}


@pytest.mark.parametrize("busy", [False, True])
def test_a_pause_follows_what_took_the_processor_long_not_what_waited_for_it(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    now = {"monotonic": 100.0, "thread_time": 5.0}
    clock = types.SimpleNamespace(**{name: lambda name=name: now[name] for name in now})
    monkeypatch.setattr(presenter, "time", clock)
    monkeypatch.setattr(comm, "time", clock)
    monkeypatch.setattr(InspectorWidget, "send", lambda *_: None)
    monkeypatch.setattr(Presenter, "state_changed", lambda _: None)
    owner = Owner()
    view = Presenter(owner.snapshot)
    view.display_requested = True
    took = 2 * LONG_FRAME

    def send(*_: Any, **__: Any) -> None:
        view.screen.next_seq()
        now["monotonic"] += took
        now["thread_time"] += took if busy else 0.0

    monkeypatch.setattr(view, "_send_pass", send)  # a frame is due: the moment
    sent: list[float] = []
    for _ in range(40):
        before = last_sent(view.screen)
        view.present()
        if last_sent(view.screen) > before:
            acknowledge(view.screen)
            sent.append(now["monotonic"])
        now["monotonic"] += 0.026
    pauses = np.diff(sent) - took
    if busy:
        assert pauses.min() >= PAUSE_FACTOR * took - 1e-9
        assert view.screen.dropped == 40 - len(sent)
    else:
        assert pauses.max() == pytest.approx(0.026)
        assert view.screen.dropped == 0
    view.screen.close()
