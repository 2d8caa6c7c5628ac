"""The bounded history of a run: the summaries of every pass, and metrics, over the steps.

Invariants: a recording never grows beyond its bounds, what was thinned out is counted and said, and
the first pass, the newest, and those with the first NaN and Inf stay. What was not measured is
None or absent, never a zero. Safe to append to and read from any thread. Does not measure, does
not draw, writes no files, imports no jax.
"""

from __future__ import annotations

import difflib
import operator
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.binning import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.compact import decoded, encoded, ranges
from nnx_inspector.curves import Curves, scalar
from nnx_inspector.history import HistoryArrays, figures_of, history_of
from nnx_inspector.observed import Facts, Figures, Observed
from nnx_inspector.passes import Layout, Pass, Quantity, check_quantity
from nnx_inspector.protocol import HISTORY_QUANTILES, STATISTICS
from nnx_inspector.stacks import layer_of
from nnx_inspector.summary import Summary
from nnx_inspector.thinning import surplus

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_Floats = npt.NDArray[np.float64]

_NONFINITE: Final = {"nan": NAN_BIN, "posinf": POSINF_BIN, "neginf": NEGINF_BIN}
_COUNTED: Final = ("size", "zeros", "nan", "posinf", "neginf")
_POINTS_PER_PASS: Final = 10


def _on_host(site: str, quantity: str, summary: object) -> Summary:
    """The summary merged, in NumPy; waits for the device."""
    check_quantity(quantity, site)
    if not isinstance(summary, Summary):
        raise TypeError(
            f"The {quantity} of site {site!r} must be a Summary, got {type(summary).__name__}. "
            "Merge the summaries of a pytree into one first, with nnx_inspector.summary.merge."
        )
    try:
        return summary.merged()
    except TypeError as error:
        raise TypeError(f"The {quantity} of site {site!r}: {error}.") from error


def _step(step: Any) -> int:
    number = operator.index(step)
    if not -(2**53) <= number <= 2**53:
        raise ValueError(f"A step must lie within 2**53 of 0, got {number}. Count from 0.")
    return number


class Recording:
    """Summaries and metrics of a run, bounded in passes and in bytes.

    When a bound is passed, about every second pass of the older half goes, so that the rest is
    spaced evenly: the past becomes coarser, the recent past stays whole. The first pass, the
    newest, and those with the first NaN, +Inf and -Inf of each quantity stay. `thinned` counts
    what went.

    Args:
        max_steps: most passes kept, at least 2.
        max_bytes: most memory taken, in bytes; at least the first and the newest pass are kept,
            whatever they take. Metrics take up to a quarter of it.

    Raises:
        ValueError: a bound is too small.

    Example:
        >>> from nnx_inspector.summary import empty
        >>> recording = Recording(max_steps=100)
        >>> recording.append(0, {"blocks/0": {"output": empty()}}, metrics={"loss": 2.5})
        >>> recording.steps, recording.sites, recording.curves()["loss"].tolist()
        ([0], ('blocks/0',), [[0.0, 2.5]])
    """

    def __init__(self, *, max_steps: int = 2000, max_bytes: int = 256 * 2**20):
        if max_steps < 2 or max_bytes < 4096:
            raise ValueError(
                f"A recording keeps at least 2 passes and 4096 bytes, got max_steps={max_steps} "
                f"and max_bytes={max_bytes}. Leave them out for 2000 passes and 256 MiB."
            )
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._passes: list[Pass] = []
        self._bytes = 0
        self._appended = 0
        self._sites: dict[str, None] = {}
        self._layouts: dict[tuple[tuple[str, str], ...], Layout] = {}
        self._firsts: set[tuple[bool, str, str]] = set()
        self._curves = Curves(_POINTS_PER_PASS * max_steps, max_bytes // 4)
        self._thinned = 0
        self._facts: Facts | None = None

    def append(
        self,
        step: int,
        summaries: Mapping[str, Mapping[str, Summary | None]],
        *,
        metrics: Mapping[str, float] | None = None,
        kind: str = "watch",
        perturbed: bool = False,
        setting: int = 0,
        figures: Figures | None = None,
    ) -> None:
        """Adds one pass. Nothing is added when an argument is refused.

        Args:
            step: any integer; passes of the same step are kept apart, in order.
            summaries: site key -> "output", "gradient" or "input" -> Summary, in the order of
                execution. Summaries with rows are merged; None is what was not measured.
            metrics: scalars of this step; see `add_metrics`.
            kind: where the pass came from, shown in the frame.
            perturbed: whether a perturbation was on.
            setting: a number for the perturbations in force, equal where they are; see `Pass`.
            figures: what rules need of this pass besides; see `observed`.

        Raises:
            ValueError: a quantity is none of the three.
            TypeError: a summary holds tracers, a metric is no number, the step no integer.
        """
        at = _step(step)
        merged: dict[tuple[str, str], Summary] = {}
        for site, quantities in summaries.items():
            for quantity, summary in quantities.items():
                if summary is not None:  # before the lock: it waits for the device
                    merged[site, quantity] = _on_host(site, quantity, summary)
        found = {
            (perturbed, quantity, kind_of_value)
            for (_, quantity), summary in merged.items()
            for kind_of_value, number in _NONFINITE.items()
            if summary.bins[number]
        }
        nonfinite = frozenset(kind_of_value for _, _, kind_of_value in found)
        keys, blobs = tuple(merged), tuple(encoded(s) for s in merged.values())
        values = {name: scalar(name, value) for name, value in (metrics or {}).items()}
        with self._lock:
            layout = self._layouts.get(keys)
            if layout is None:
                layout = Layout(keys, {key: i for i, key in enumerate(keys)})
                self._layouts[keys] = layout
                self._bytes += layout.nbytes
                self._sites.update(dict.fromkeys(site for site, _ in keys))
            new = not found <= self._firsts
            self._firsts |= found
            item = Pass(
                self._appended, at, kind, perturbed, nonfinite, new, layout, blobs, setting, figures
            )
            self._passes.append(item)
            self._bytes += item.nbytes
            self._appended += 1
            self.add_metrics(at, values)
            self._bound()

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to the curve of each metric; NaN and Inf are kept as they are.

        Args:
            step: the step the values belong to.
            values: name -> number (a Python, NumPy or jax scalar).

        Raises:
            TypeError: a value is no single number; then none is added.
        """
        at = _step(step)
        numbers = {name: scalar(name, value) for name, value in values.items()}
        with self._lock:
            self._curves.add(at, numbers)

    def _bound(self) -> None:
        while len(self._passes) > self.max_steps or self.nbytes > self.max_bytes:
            gone = surplus([p.number for p in self._passes], [p.news for p in self._passes])
            if not gone:
                return
            self._passes = [p for i, p in enumerate(self._passes) if i not in gone]
            self._layouts = {p.keys: p.layout for p in self._passes}
            self._bytes = sum(p.nbytes for p in self._passes)
            self._bytes += sum(layout.nbytes for layout in self._layouts.values())
            self._thinned += len(gone)

    def learn(self, facts: Facts) -> None:
        """Adds what is known of the model to what was known of it before."""
        with self._lock:
            self._facts = facts if self._facts is None else self._facts.joined(facts)

    @property
    def observed(self) -> Observed:
        """What is known of the model, and the figures of the passes kept: a snapshot."""
        with self._lock:
            found = [p for p in self._passes if p.figures is not None]
            return Observed(
                facts=self._facts,
                numbers=tuple(p.number for p in found),
                figures=tuple(p.figures for p in found if p.figures is not None),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the passes and the metrics take.

        Apart from it at most 600 summaries of all recordings are cached unpacked, some 5 kB each.
        """
        with self._lock:
            return self._bytes + self._curves.nbytes

    @property
    def thinned(self) -> int:
        """How many passes went to stay within the bounds."""
        return self._thinned

    @property
    def thinned_points(self) -> int:
        """How many points of metrics went to stay within the bounds."""
        return self._curves.thinned

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes kept, oldest first: a snapshot that later appends do not change."""
        with self._lock:
            return tuple(self._passes)

    @property
    def steps(self) -> list[int]:
        """The step of each pass, in order; a step with several passes occurs several times."""
        return [p.step for p in self.passes]

    @property
    def perturbed(self) -> list[bool]:
        """For each pass whether a perturbation was on."""
        return [p.perturbed for p in self.passes]

    @property
    def sites(self) -> tuple[str, ...]:
        """The keys of all sites ever appended, in the order in which they were first seen."""
        with self._lock:
            return tuple(self._sites)

    def __len__(self) -> int:
        """How many passes are kept."""
        return len(self._passes)

    def __repr__(self) -> str:
        passes = self.passes
        steps = f", steps {passes[0].step} to {passes[-1].step}" if passes else ""
        gone = f", {self._thinned} older passes thinned out" if self._thinned else ""
        points = f", {self._curves.thinned} metric points thinned out" * bool(self._curves.thinned)
        return (
            f"Recording({len(passes)} passes{steps}, {len(self.sites)} sites, "
            f"{self.nbytes / 2**20:.1f} MiB{gone}{points})"
        )

    def summary(
        self, site: str, quantity: Quantity = "output", *, index: int = -1
    ) -> Summary | None:
        """The summary of one pass, the newest by default.

        Args:
            site: a site key.
            quantity: "output", "gradient" or "input".
            index: which of the passes kept, as in `steps`.

        Returns:
            None where that pass did not measure it.

        Raises:
            KeyError: no pass ever had this site.
            IndexError: there is no such pass.
        """
        self._check(site, quantity)
        passes = self.passes
        if not -len(passes) <= index < len(passes):
            raise IndexError(f"pass {index} of a recording with {len(passes)} passes")
        return passes[index].summary(site, quantity)

    def series(self, site: str, quantity: Quantity = "output") -> tuple[list[int], list[Summary]]:
        """Steps and summaries of all passes which measured this, oldest first.

        Raises:
            KeyError: no pass ever had this site.
        """
        steps, blobs = self._series(site, quantity)
        return steps, [decoded(blob).summary() for blob in blobs]

    def history(
        self, site: str, quantity: Quantity = "output", *, columns: int = 300
    ) -> HistoryArrays:
        """A site's quantity over the steps, as the screen draws it.

        The axis spans the finite values of all passes kept; passes that did not measure this have
        no column.

        Args:
            site: a site key.
            quantity: "output", "gradient" or "input".
            columns: most columns, at least 2. Where there are more passes, as many are picked,
                evenly, the first and the newest among them.

        Raises:
            KeyError: no pass ever had this site.
            ValueError: `columns` is below 2.
        """
        if columns < 2:
            raise ValueError(f"history takes at least 2 columns, got {columns}")
        steps, blobs = self._series(site, quantity)
        ends = ranges(blobs)
        ends = ends[np.isfinite(ends).all(axis=1)]
        low, high = (ends[:, 0].min(), ends[:, 1].max()) if len(ends) else (0.0, 0.0)
        if len(steps) > columns:
            picked = [round(i * (len(steps) - 1) / (columns - 1)) for i in range(columns)]
            steps, blobs = [steps[i] for i in picked], [blobs[i] for i in picked]
        return history_of(steps, blobs, float(low), float(high))

    def _series(self, site: str, quantity: str) -> tuple[list[int], list[bytes]]:
        self._check(site, quantity)
        key = (site, quantity)
        found = [(p.step, p.packed[p.layout.at[key]]) for p in self.passes if key in p.layout.at]
        return [step for step, _ in found], [blob for _, blob in found]

    def _check(self, site: str, quantity: str) -> None:
        check_quantity(quantity, site)
        sites = self.sites
        if site not in sites:
            close = difflib.get_close_matches(site, sites, n=3, cutoff=0.4) or sites[:3]
            near = ", ".join(map(repr, close)) or "none yet: append a pass first"
            raise KeyError(f"{site!r} is not in this recording. The closest sites are {near}.")

    def curves(self) -> dict[str, _Floats]:
        """The metrics, each as float64[n, 2]: step and value, in the order of arrival."""
        with self._lock:
            return self._curves.arrays()

    def to_frame(self, *, layers: bool = False) -> pd.DataFrame:
        """A tidy pandas frame, one row a pass, site and quantity.

        Columns: `step, pass, kind, perturbed, site, quantity`, the protocol's statistics (counts
        as Int64), and the quantiles `q01, q05, q25, q50, q75, q95, q99`. A figure that is not
        known is missing.

        Args:
            layers: whether there are rows for single layers of stacked modules, `"blocks[3]"`, too.
                What they hold is in the row of the stack as well: do not add both up.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        chosen = [
            (p, key, blob)
            for p in self.passes
            for key, blob in zip(p.keys, p.packed, strict=True)
            if layers or layer_of(key[0]) is None
        ]
        heads = [(p.step, p.number, p.kind, p.perturbed, *key) for p, key, _ in chosen]
        figures = figures_of([blob for _, _, blob in chosen])
        rows = [(*head, *row) for head, row in zip(heads, figures, strict=True)]
        quantiles = [f"q{round(100 * q):02d}" for q in HISTORY_QUANTILES]
        names = ("step", "pass", "kind", "perturbed", "site", "quantity", *STATISTICS, *quantiles)
        types = dict.fromkeys(("step", "pass"), "int64") | {"perturbed": "bool"}
        types |= dict.fromkeys(_COUNTED, "Int64")
        types |= {n: "float64" for n in (*STATISTICS, *quantiles) if n not in _COUNTED}
        frame: Any = pd.DataFrame(rows, columns=list(names))
        return frame.astype(types)

    def metrics_frame(self) -> pd.DataFrame:
        """The metrics as a tidy pandas frame: columns `step, name, value`, name by name."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        points = [(step, name, value) for name, c in self.curves().items() for step, value in c]
        frame: Any = pd.DataFrame(points, columns=["step", "name", "value"])
        return frame.astype({"step": "int64", "value": "float64"})
