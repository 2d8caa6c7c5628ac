"""The half of `Inspector` that reads measurements, and measures on request.

Invariant: nothing here changes the model, the perturbations or the recording.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from nnx_inspector.errors import InspectorError
from nnx_inspector.findings.finding import Findings, cell
from nnx_inspector.hooks.sites import Only, of_operation, parse_key, site_key
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.cost.compilations import Compilation, compilations_table
from nnx_inspector.inspector.diagnosing import Diagnosing, first_nan_in
from nnx_inspector.inspector.export import write_html
from nnx_inspector.inspector.panels import compare_with, parameters_at, units_at
from nnx_inspector.inspector.passes.batch import arguments_of
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.studies.studies import Studies, study
from nnx_inspector.inspector.values.opening import Opening, Part, opened_tree
from nnx_inspector.inspector.values.reading import look_of, positions_of
from nnx_inspector.lenses.attribution import Attribution, Method
from nnx_inspector.lenses.lens import Lens
from nnx_inspector.lenses.logits import LogitAttribution
from nnx_inspector.lenses.unembedding import Norm, Unembed
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.program.analysis.operation import Operation
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import Displayed, InspectorWidget
from nnx_inspector.screen.comparison import At
from nnx_inspector.screen.export.markdown import ROWS, report
from nnx_inspector.screen.export.page import MAX_BYTES
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go

    from nnx_inspector.profiling.result import Profile
    from nnx_inspector.stats.bins import Scale


class Readings(Displayed):
    """Measurements, recorded and on request. `Inspector` is the class to use."""

    _core: Core
    _rerun: Reruns
    _diagnosing: Diagnosing
    _opening: Opening
    _studies: Studies

    def _widget(self) -> InspectorWidget:
        return self._core.view.screen.control

    @property
    def model(self) -> nnx.Module:
        """The model as the user gave it: to the constructor, or later to `update`."""
        return self._core.watched

    @property
    def trace(self) -> Trace:
        """The trace of the example's calls."""
        return self._core.trace

    @property
    def recording(self) -> Recording:
        """Everything measured so far."""
        self._rerun.first(needed=False)
        return self._core.recording

    @property
    def findings(self) -> Findings:
        """The problems found in this run, worst first."""
        self._rerun.first()
        return self._diagnosing.found()

    @property
    def compilations(self) -> list[Compilation]:
        """What jax has compiled in this process since the inspector was made, oldest first: which
        function, for how long, and why. The last thousand are kept.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> step = jax.jit(lambda x: x + 1)
            >>> for size in (4, 7):
            ...     _ = step(jnp.ones((size, 2)))
            >>> [one.why for one in insp.compilations if one.function == "<lambda>"]
            ['first call', 'x is f32[7,2], before f32[4,2]']
        """
        return self._core.meter.compilations.all()

    def first_nan(self) -> Operation | None:
        """The operation that makes the first NaN of the last requested pass (the example, `run` or
        `step`), with the model's present parameters and without perturbations. After `step` the
        backward pass is searched too.

        Returns:
            See `nni.first_nan`.

        Raises:
            InspectorError: the pass cannot be searched; the text says why.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model = nnx.Sequential(jnp.sqrt, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
            >>> insp = nni.Inspector(model, -jnp.ones((4, 2)), display=False)
            >>> insp.first_nan().name
            'sqrt'
            >>> insp.close()
        """
        return first_nan_in(self._core.require_open())

    @property
    def effect(self) -> protocol.Effect | None:
        """The effect of the active perturbations against the clean pass, or None until it is
        measured.

        After `step` there is an effect without a perturbation too, with equal figures on both
        sides. Reading it waits for the program that measures it. In a watched loop it is that of
        the last measured step, or of the model as it is now if no step has measured it; from
        another thread than the loop's it is None until a step has. `source` names the pass and the
        model's step.
        """
        return self._rerun.read_effect()

    @property
    def selected(self) -> str:
        """The key of the site on screen; can be set."""
        return self._core.view.selected

    @selected.setter
    def selected(self, site: str) -> None:
        self._core.select(site)

    def parameters(self, site: str) -> dict[str, Summary]:
        """The present Summary of each `nnx.Param` of a module (and of the modules in it), by
        path.

        Raises:
            ValueError: there is no such site.
            InspectorError: the arrays were donated to a training step that is still running.
        """
        return parameters_at(self._core.trace, self._core.known(site))

    def units(self, site: str, *, axis: int = -1) -> Any:
        """The Units of a site's output (a pytree of them for a pytree): figures for each unit along
        an axis, such as -2 for the heads of `query`, `key` and `value`. The last pass is made
        again, with its perturbations, in a program that is compiled once per site and axis.

        Raises:
            ValueError: there is no such site.
            InspectorError: it returns no array with units, or as in `parameters`.
        """
        core = self._core.require_open()
        return units_at(core, core.known(site), axis=axis)

    def compare(
        self,
        other: Recording | Record | nnx.Pytree | Mapping[Any, Any] | None,
        *,
        at: At = None,
        name: str = "",
    ) -> pd.DataFrame | None:
        """Compare this run with another one, or the weights of the model, and show both on screen.

        The other run's pass is pinned: its figures and histograms stand beside those of the pass
        on screen, and the panel "Compare" ranks the sites.

        Args:
            other: a Recording, for instance `nni.load("run.nni")`, or a Record of `nni.capture`,
                of this model or of one with sites of the same names. Or weights: a module, its
                state, or dictionaries of arrays, as in `nni.compare_weights`; the panel then
                ranks the parameters. None ends the comparison.
            at: as in `nni.compare`: one step for both runs, or a pair of a step of the other run
                and a step of this one.
            name: the other run's name on screen; by default the name of its file, if any.

        Returns:
            The frame of `nni.compare(other, insp.recording)`, largest difference first; its `a` is
            the other run. For weights, that of `nni.compare_weights(other, model)`. None if `other`
            is None.

        Raises:
            TypeError, ValueError: as in `nni.compare`.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(model, jnp.ones((4, 2)))
            >>> _, record = nni.capture(model)(2 * jnp.ones((4, 2)))
            >>> insp.compare(record, name="doubled").site.tolist()
            ['', '']
            >>> insp.close()
        """
        self._rerun.first()
        return compare_with(self._core.require_open(), other, at, name)

    def figure(self, site: str, *, quantity: str = "output", scale: Scale = "symlog") -> go.Figure:
        """A plotly figure of one site: its histogram now and over the steps.

        `scale` is the axis of the histograms, "symlog" or "linear".
        """
        from nnx_inspector.recordings.figure import figure

        return figure(self.recording, site, quantity=quantity, scale=scale)  # type: ignore[arg-type]

    def to_html(self, path: str | bytes | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> int:
        """Write one page that shows the recording, without a kernel and without a network.

        It is the same screen: tree, flow, distributions, time, and the present parameters, units,
        code and state. It keeps what was on screen of values, attention (at most 2 MB of both),
        words, comparisons, lenses and the last sweep. What needs the model is switched off.
        For a large model it has the details of 300 modules: the selected one and those nearest to
        the root.

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
        self._rerun.first()
        self._rerun.wait_unless_looping()  # for the effect
        return write_html(self._core, path, self.findings, max_bytes=max_bytes)

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
        on = (one for one in self._core.handles.all() if one.enabled)
        layout = self._core.view.layout
        return report(
            self.recording,
            self.findings,
            title=f"Report of {type(self.model).__name__}",
            sites=() if layout is None else layout.sites,
            rows=rows,
            about=[f"perturbed now: {cell(f'{one.perturbation} at {one.site!r}')}" for one in on],
            tables={"Compiled functions": compilations_table(self.compilations)},
        )

    def profile(
        self,
        step: Callable[..., Any],
        /,
        *args: Any,
        runs: int = 3,
        folder: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Profile:
        """Measure where the time and the memory of your training step go, by module, and show it in
        the tree: in the columns "time, ms", "kept" and "of poss."

        The step runs on copies of its arguments, so the model, the optimizer and donated arrays
        stay as they are. It runs as it is, without perturbations.

        Args:
            step, args, runs, folder, kwargs: as in `nni.profile`.

        Raises:
            As `nni.profile`, and InspectorError while a loop runs.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
            >>> insp = nni.Inspector(model, x)
            >>> step = nnx.jit(nnx.grad(lambda model, x: (model(x) ** 2).mean()))
            >>> [row.site for row in insp.profile(step, model, x).rows]
            ['', '(outside modules)', '(idle)']
            >>> insp.close()
        """
        from nnx_inspector.profiling.profile import profile

        core = self._core.require_open()
        core.require_here("The step")
        if core.looping:
            raise InspectorError("A loop is running. Profile its step before or after it.")
        found = profile(self.model, step, *args, runs=runs, folder=folder, **kwargs)
        core.show_profile(found)
        return found

    def values(
        self, site: str, *, part: Part = "output", call: int | None = None, clean: bool = False
    ) -> Any:
        """The arrays of one site in the pass on screen, as the panel "Values" shows them.

        The pass (the example, or the last `run` or `step`) is made again with the model's present
        parameters, in a program of its own that keeps the arrays of this site only.

        Args:
            site: its key; also that of an operation within a call, `"attn@attention"`, or of one
                layer of a stack, `"layers/mlp[2]"`.
            part: "output", "input", "gradient" (of the loss by the output, after `step`),
                "parameter", or "attention" (the patterns that a call computes).
            call: which call of the site, if it was called several times.
            clean: whether to leave the perturbations out.

        Returns:
            The module's output (for inputs its only array, or `(args, kwargs)`) as arrays on the
            device, with None in place of any other leaf. The first axes are those of the scans
            around the call, then those of the vmaps. For parameters, a dict from name to array.

        Raises:
            ValueError: there is no such site.
            InspectorError: there are no such values; the text says why.
            IndexError: there is no such call.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> insp.values("").shape
            (4, 3)
            >>> sorted(insp.values("", part="parameter"))
            ['bias', 'kernel']
            >>> insp.close()
        """
        core = self._core.require_open()
        whole, layers = without_layers(site)
        called, operation = of_operation(whole)
        by_module = operation and called not in core.view.keys  # a method that has no row
        known = called if operation else site
        core.known(site_key(parse_key(whole)[0]) if by_module else known, layers=False)
        if layers and part == "parameter":
            raise InspectorError(
                f"The parameters of all layers of {whole!r} are one array each. Read them as "
                f"values({whole!r}, part='parameter')."
            )
        opened = self._opening.open(look_of(core), whole, part, clean=clean)
        found = opened_tree(opened, whole, call)
        return jax.tree.map(lambda x: x[layers], found) if layers else found

    def words(
        self, site: str, example: int = 0, *, unit: int = 0, axis: int | None = None
    ) -> pd.DataFrame:
        """The tokens of an example, each with the figures of a site at its position.

        They colour the text in the panel "Words". The pass on screen is made again, as in `values`.

        Args:
            site: its key, `"layers[3]"` for one layer of a stack. Its output needs an axis for the
                positions of the tokens.
            example: which example of the batch.
            unit: the unit whose value is shown.
            axis: the axis of the tokens in what the site (or its layer) returns. Needed if it is
                not found, or to choose another: the keys of a pattern (-1) instead of its queries.

        Returns:
            A frame with a row for each position: `position`, `word`, `norm` (over the units),
            `unit` (its value) and, after `step`, `gradient` (its norm) and
            `gradient_times_activation` (added up over the units).

        Raises:
            ValueError: there is no such site.
            InspectorError: the site has no axis of positions, or it must be chosen by `axis`; or
                the tokens are not known: the inspector needs `decode=`.
            IndexError: there is no such example or unit.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model, ids = nnx.Embed(3, 2, rngs=nnx.Rngs(0)), jnp.array([[0, 2]])
            >>> insp = nni.Inspector(model, ids, decode=["to", "be", "or"])
            >>> insp.words("").word.tolist()
            ['to', 'or']
            >>> insp.close()
        """
        import pandas as pd

        core = self._core.require_open()
        found = positions_of(core, core.known(site), example, unit, axis)
        if why := found.why_not(site):
            raise InspectorError(why)
        words = core.inputs.words(arguments_of(core), example)
        return pd.DataFrame({"position": range(len(words)), "word": words, **found.figures})

    # --------------------------------------------------- studies of the example

    def lens(
        self,
        *,
        unembed: Unembed = None,
        norm: Norm = None,
        answer: Any = None,
        k: int = 5,
        sites: Only = None,
    ) -> Lens:
        """What the residual stream of the example already says after each layer.

        Like `nni.lens`, which explains the arguments, for the last forward pass, on a copy of the
        present model in `modes` and without the perturbations. The panel "Lens" shows it too.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.lens`; and without `unembed`, a
                ValueError if nothing indicates that the output is logits: no words, classes or
                pictures among the inputs, and no `labels`.
        """
        how = {"unembed": unembed, "norm": norm, "answer": answer, "k": k, "sites": sites}
        return self._studies.lens(study("lens"), **how)

    def logit_attribution(
        self,
        *,
        token: Any = None,
        minus: Any = None,
        unembed: Unembed = None,
        norm: Norm = None,
        sites: Only = None,
    ) -> LogitAttribution:
        """What each site adds to the logit of a token, for the example; see `lens`.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.logit_attribution`.
        """
        how = {"token": token, "minus": minus, "unembed": unembed, "norm": norm, "sites": sites}
        return self._studies.logits(study("logits"), **how)

    def attribute(
        self,
        *,
        output: Any = None,
        method: Method = "gradient_times_input",
        position: int = -1,
        site: str | None = None,
        baseline: Any = 0.0,
        steps: int = 32,
    ) -> Attribution:
        """How much each token or pixel of the example counts for an output; see `lens`.

        The arguments are those of `nni.attribute`. The panel "Attribution" shows it too.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.attribute`.
        """
        how = {"output": output, "method": method, "position": position, "site": site}
        asked = study("attribution", method=method, position=position)
        return self._studies.attribution(asked, **how, baseline=baseline, steps=steps)
