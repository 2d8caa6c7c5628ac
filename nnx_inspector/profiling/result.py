"""The result of `profile`: the cost of a step by module, as a table, a pandas frame and a figure.

Invariant: the times of all rows add up to `step_ms`. What is not known is NaN, never 0. Measures
nothing.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nnx_inspector.errors import printable
from nnx_inspector.recordings.tree_rows import Site

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go

OUTSIDE, IDLE = "(outside modules)", "(idle)"
MOST_ROWS: Final = 40
"""The most rows of the table that is printed."""
_TIMES: Final = ("total", "forward", "backward", "update")
_HEADINGS: Final = ("module", "type", *_TIMES, "kept", "at the peak", "FLOPs", "of possible")
_COLOURS: Final = ("rgb(31, 130, 196)", "rgb(205, 100, 20)", "rgb(118, 131, 143)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """What one module costs in a step; its submodules have rows of their own.

    Attributes:
        site: the module's path, `""` for the model itself, or one of the two rows that are no
            module: "(outside modules)" and "(idle)".
        type: the name of its class.
        forward_ms, backward_ms, update_ms: its own time, without that of its submodules. What
            remat computes again is backward.
        total_ms: its time with that of all modules in it.
        kept_bytes: the size of the values that it computes and that the backward pass reads.
        peak_bytes: the size of what it has computed that is there when the program needs most
            memory.
        flops: its own floating-point operations, forward and backward.
        flops_of_possible: `flops` in its own time, relative to `Profile.possible_flops`; NaN if it
            spends too little time to tell.
    """

    site: str
    type: str = ""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    update_ms: float = 0.0
    total_ms: float = 0.0
    kept_bytes: float = math.nan
    peak_bytes: float = math.nan
    flops: float = math.nan
    flops_of_possible: float = math.nan

    @property
    def own_ms(self) -> float:
        """Its own time in all parts of the step."""
        return self.forward_ms + self.backward_ms + self.update_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of one step by module. Its repr is a table.

    Attributes:
        rows: the modules in the order of the model, then what is no module's.
        step_ms: the time of the traced run that the rows divide: the fastest of `runs`.
        untraced_ms: the time of the same step without a trace, likewise.
        runs: how many runs were traced.
        peak_bytes: the most memory that the step's largest program needs at once, with its
            arguments; NaN if XLA does not say.
        argument_bytes: the size of what that program gets: parameters, state, the batch.
        possible_flops: floating-point operations per second of a large matrix product in `dtype`,
            measured on this device, or of a module of the step that is faster; NaN if the step has
            no matrix product.
        dtype: that of most of the step's matrix products.
        device: its kind.
        folder: where the trace is, for XProf and Perfetto; None if it was not kept.
        notes: what is not known, and why, in sentences.
    """

    rows: tuple[ModuleCost, ...]
    step_ms: float
    untraced_ms: float
    runs: int
    peak_bytes: float = math.nan
    argument_bytes: float = math.nan
    possible_flops: float = math.nan
    dtype: str = ""
    device: str = ""
    folder: str | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, site: str) -> ModuleCost:
        """The row of a module, `profile["blocks/0"]`.

        Raises:
            KeyError: it has none; the text lists those that there are.
        """
        for row in self.rows:
            if row.site == site:
                return row
        raise KeyError(f"{site!r} has no row. There are {[row.site for row in self.rows]}.")

    def shown_in(self, rows: Sequence[Site]) -> tuple[Site, ...]:
        """The rows of the tree with the figures of each module with those in it, as FLOPs."""
        return tuple(
            dataclasses.replace(row, **self._with_submodules(row.key)) if row.layer < 0 else row
            for row in rows
        )

    def _with_submodules(self, site: str) -> dict[str, float | None]:
        inside = [row for row in self.rows if row.site == site or _is_within(row.site, site)]
        mine = [row for row in inside if row.site == site]
        if not mine:
            return {}
        seconds = math.fsum(row.forward_ms + row.backward_ms for row in inside) / 1e3
        flops = math.fsum(row.flops for row in inside)
        share = flops / seconds / self.possible_flops if seconds else math.nan
        share = share if share <= 1 else math.nan
        found = (mine[0].total_ms, math.fsum(row.kept_bytes for row in inside), share)
        names = ("step_ms", "kept_bytes", "of_possible")
        return {n: None if math.isnan(x) else x for n, x in zip(names, found, strict=True)}

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas DataFrame with a row for each of `rows`, and their fields as columns.

        `forward_ms`, `backward_ms` and `update_ms` of all rows add up to `step_ms`.
        """
        import pandas as pd

        names = [field.name for field in dataclasses.fields(ModuleCost)]
        return pd.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=names)

    def figure(self) -> go.Figure:
        """A plotly figure: the modules as a flame, each as wide as its time, the model on top.

        What a module spends itself is the part below it that is empty. Hovering shows its figures.
        """
        import plotly.graph_objects as go

        ids, labels, parents, values, colours, texts = [""], ["step"], [""], [0.0], [""], [""]
        tops = [row for row in self.rows if row.site == "" or row.site.startswith("(")]
        known = {row.site for row in self.rows}
        for row in self.rows:
            above = row.site.rpartition("/")[0]
            while above and above not in known:
                above = above.rpartition("/")[0]
            inside = not row.site.startswith("(") and row.site != "" and "" in known
            ids.append(f"/{row.site}")
            labels.append(row.site.rpartition("/")[2] or row.type)
            parents.append(f"/{above}" if inside else "")
            values.append(row.total_ms)
            most = (row.forward_ms, row.backward_ms, row.update_ms + (row.site == IDLE))
            colours.append(_COLOURS[most.index(max(most))])
            texts.append("<br>".join(f"{a} {b}" for a, b in _cells_of(row) if b))
        values[0] = math.fsum(row.total_ms for row in tops)
        colours[0] = _COLOURS[2]
        texts[0] = f"{_ms(self.step_ms)} ms"
        drawn = go.Icicle(
            ids=ids[1:],
            labels=labels[1:],
            parents=parents[1:],
            values=values[1:],
            branchvalues="total",
            marker={"colors": colours[1:]},
            hovertext=texts[1:],
            hoverinfo="label+text",
            tiling={"orientation": "v"},
            sort=False,
        )
        figure = go.Figure(drawn)
        figure.update_layout(
            title=f"One step: {_ms(self.step_ms)} ms on {self.device}",
            paper_bgcolor="rgba(0,0,0,0)",
            font={"color": "#777777"},
            margin={"t": 48, "l": 8, "r": 8, "b": 8},
        )
        return figure

    def __repr__(self) -> str:
        rows = [_HEADINGS, *self._table_rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return printable("\n".join([*lines, *self._footer()]))

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            style = ' style="text-align:left;white-space:pre"'
            return "".join(f"<{tag}{style}>{html.escape(x)}</{tag}>" for x in cells)

        rows = [line(_HEADINGS, "th"), *(line(cells, "td") for cells in self._table_rows())]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        below = "<br>".join(map(html.escape, self._footer()))
        return f"<table>{table}</table><p>{printable(below)}</p>"

    def _table_rows(self) -> list[list[str]]:
        shown = [row for row in self.rows if row.total_ms or row.site.startswith("(")]
        if len(shown) > MOST_ROWS:  # the most expensive ones, in the order of the model
            least = sorted((row.total_ms for row in shown), reverse=True)[MOST_ROWS - 1]
            shown = [row for row in shown if row.total_ms >= least][:MOST_ROWS]
        cells: list[list[str]] = []
        for row in shown:
            module = not row.site.startswith("(")
            depth = row.site.count("/") + 1 if row.site and module else 0
            name = row.site.rpartition("/")[2] if module else row.site
            said = [text for _, text in _cells_of(row)]
            cells.append(["  " * depth + (name or "(model)"), row.type, *said])
        return cells

    def _footer(self) -> list[str]:
        hidden = len(self.rows) - len(self._table_rows())
        lines = [
            f"one step: {_ms(self.step_ms)} ms traced (the fastest of {self.runs}), "
            f"{_ms(self.untraced_ms)} ms without a trace, on {self.device}"
        ]
        if not math.isnan(self.peak_bytes):
            lines.append(
                f"peak memory: {size_text(self.peak_bytes)}, of which "
                f"{size_text(self.argument_bytes)} are parameters and other arguments"
            )
        if not math.isnan(self.possible_flops):
            rate = f"{self.possible_flops / 1e9:.3g} GFLOP/s"
            lines.append(
                f"possible: {rate}, the most that a large matrix product in {self.dtype} or a "
                f"module of the step reached"
            )
        lines += [f"{hidden} rows are not shown; to_frame() has all"] * (hidden > 0)
        return [*lines, *self.notes]


def _is_within(site: str, other: str) -> bool:
    """Whether a module is in another one."""
    return site.startswith(f"{other}/" if other else "") and site != other and site[:1] != "("


def _cells_of(row: ModuleCost) -> list[tuple[str, str]]:
    """The figures of a row in words, each after its name; "" if it is not known."""
    phases = [0.0] * 3 if row.site == IDLE else [row.forward_ms, row.backward_ms, row.update_ms]
    times = [row.total_ms, *phases]
    found = [(name, f"{_ms(x)} ms" if x else "") for name, x in zip(_TIMES, times, strict=True)]
    found += [("kept", size_text(row.kept_bytes)), ("at the peak", size_text(row.peak_bytes))]
    found.append(("FLOPs", "" if math.isnan(row.flops) else f"{row.flops:.3g}"))
    share = row.flops_of_possible
    return [*found, ("of what is possible", "" if math.isnan(share) else f"{100 * share:.0f} %")]


def _ms(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 1000 else f"{x:.0f}"


def size_text(number: float) -> str:
    """A number of bytes in words, `"1.5 MB"`; `""` for NaN and 0.

    Example:
        >>> size_text(1_500_000)
        '1.5 MB'
    """
    if math.isnan(number) or not number:
        return ""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.3g} {unit}"
        number /= 1000
    return ""
