"""What an inspector and a recorded run have in common: a recording on screen.

Invariant: nothing here changes the recording. Knows no model, and imports no jax.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nnx_inspector.files import replace_file
from nnx_inspector.findings.finding import Findings
from nnx_inspector.recordings.passes import Quantity
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.export.markdown import ROWS, report
from nnx_inspector.screen.export.page import MAX_BYTES, page_of
from nnx_inspector.screen.export.replay import PageContent
from nnx_inspector.screen.presenter import Presenter

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from nnx_inspector.stats.bins import Scale


class RecordingView:
    """A recording on screen. Where a widget is asked for it can be passed, as to
    `mo.ui.anywidget(insp)` in marimo, which reads these names.
    """

    _view: Presenter

    @property
    def comm(self) -> Any:
        """The comm of the widget."""
        return self._view.screen.control.comm

    @property
    def _model_id(self) -> Any:
        return self._view.screen.control.model_id

    def get_state(self) -> dict[str, Any]:
        """The traits of the widget."""
        return self._view.screen.control.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Set traits of the widget."""
        self._view.screen.control.set_state(state)

    @property
    def recording(self) -> Recording:
        """Everything measured so far."""
        raise NotImplementedError

    @property
    def findings(self) -> Findings:
        """The problems found in this run, worst first."""
        raise NotImplementedError

    @property
    def selected(self) -> str:
        """The key of the site on screen; can be set."""
        return self._view.selected

    @selected.setter
    def selected(self, site: str) -> None:
        self._select(site)

    def _select(self, site: str) -> None:
        raise NotImplementedError

    def figure(
        self, site: str, *, quantity: Quantity = "output", scale: Scale = "symlog"
    ) -> go.Figure:
        """A plotly figure of one site: its histogram now and over the steps.

        `scale` is the axis of the histograms, "symlog" or "linear".
        """
        from nnx_inspector.recordings.figure import figure

        return figure(self.recording, site, quantity=quantity, scale=scale)

    def to_html(self, path: str | bytes | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> int:
        """Write one page that shows the recording, without a kernel and without a network.

        It is the same screen: tree, flow, distributions, time, and the present parameters, units,
        code and state. It keeps what was on screen of values, attention (at most 2 MB of both),
        words, comparisons, lenses and the last sweep. What needs the model is switched off, and of
        a run that `nni.open` shows only the recording is there. For a large model it has the
        details of 300 modules: the selected one and those nearest to the root.

        Args:
            path: the file's path; an existing file is replaced once the new one is complete.
            max_bytes: the largest size in bytes. If the recording does not fit, passes are left
                out evenly, and the page says so.

        Returns:
            The size of the file in bytes.

        Raises:
            InspectorError: the page does not fit even with two passes.
            OSError: the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     insp.to_html(pathlib.Path(folder) / "run.html") < 500_000
            True
            >>> insp.close()
        """
        recording = self.recording
        title, content = self._page()
        page = page_of(recording, content, title=f"{title} - nnx_inspector", max_bytes=max_bytes)
        file, size = replace_file(path, [page.encode()])
        os.close(file)
        return size

    def _page(self) -> tuple[str, PageContent]:
        """The title of a page, and all that it shows beside the recording."""
        raise NotImplementedError

    def report(self, *, rows: int = ROWS) -> str:
        r"""The run as one page of Markdown, for a colleague, an issue or a program that reads: what
        was run, what is wrong with the evidence, metrics, the figures of the newest pass, and what
        was compiled.

        Args:
            rows: the most rows of each table, 1 to 60. The page has at most 64 kB.

        Raises:
            ValueError: `rows` is not from 1 to 60.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> print(insp.report().splitlines()[2])
            - model: Linear, 9 parameters, output float32\[4,3\]
            >>> insp.close()
        """
        layout = self._view.layout
        sites = () if layout is None else layout.sites
        return report(
            self.recording, self.findings, sites=sites, rows=rows, **self._report_fields()
        )

    def _report_fields(self) -> dict[str, Any]:
        """The title of a report, and what only this run has to say."""
        raise NotImplementedError
