"""`top_examples`: which inputs excite each unit of a site most, least, and a random few.

The data goes through an `ExampleSearch`; memory does not grow with it. Invariant: the result does
not depend on how the data is divided into batches, as far as the model does not. Changes no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from nnx_inspector.arrays import is_array
from nnx_inspector.errors import add_note, warn
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.lenses.example_search import ExampleSearch, MakeCall
from nnx_inspector.lenses.extremes import LEAST, MOST, NO_EXAMPLE, RANDOM, Extremes
from nnx_inspector.lenses.traced_pass import model_of
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.program.editing.position_masks import Where, where_of
from nnx_inspector.program.function import module_function
from nnx_inspector.progress import Progress, Report, show_progress
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Float, Int, Value

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """A few examples for each unit, in order.

    Attributes:
        values: the unit's value, `[units, k]`; NaN where there is no example.
        examples: the number of the example in the data, from 0 on; -1 for none.
        places: where in the example the value is, `[units, k, axes]`: a token's position, or row
            and column.
    """

    values: Float[np.ndarray, "units k"]
    examples: Int[np.ndarray, "units k"]
    places: Int[np.ndarray, "units k axes"]

    def rows(self, unit: int) -> Iterator[tuple[int, npt.NDArray[np.integer[Any]], float]]:
        """The example, place and value of each rank of a unit."""
        return zip(map(int, self.examples[unit]), self.places[unit], self.values[unit], strict=True)


@dataclasses.dataclass(frozen=True, eq=False)
class TopExamples:
    """The examples that excite each unit of a site most and least.

    Attributes:
        site: the site.
        axis: the axis of the units in what it returns.
        count: how many examples there were.
        most, least: the examples with the largest and with the smallest values, at the places that
            count.
        random: a few drawn at random, the same for all units, each with its largest value.
        nan: for each unit, how many examples have a NaN, which is left out.
        stopped: whether the pass over the data was stopped before its end.
        notes: how batches of other shapes were handled, and whether positions do not fit, in words.
        shape: the lengths of the axes of `places`, in the last form of batch.
        starts: the number of the first example of each batch.
    """

    site: str
    axis: int
    count: int
    most: Examples
    least: Examples
    random: Examples
    nan: Int[np.ndarray, " units"]
    stopped: bool
    notes: tuple[str, ...]
    shape: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.nan)

    @property
    def constant(self) -> npt.NDArray[np.bool_]:
        """The units with the same value everywhere: their examples mean nothing."""
        first, last = self.most.values[:, 0], self.least.values[:, 0]
        return (first == last) | np.isnan(first)

    def to_frame(self, unit: int | None = None) -> pd.DataFrame:
        """A tidy pandas DataFrame, with a row for each unit and example.

        Args:
            unit: one unit, or None for all.

        Columns: `unit`; `which`, "most", "least" or "random"; `rank`, from 1 on; `example`;
        `position`, or `row, column`, or `place_0, ...`; `value`.
        """
        import pandas as pd

        return pd.DataFrame(self.columns(unit))

    def columns(self, unit: int | None = None) -> dict[str, np.ndarray]:
        """The columns of `to_frame`, as arrays."""
        chosen = np.arange(self.units) if unit is None else np.array([self._unit_index(unit)])
        kinds = {"most": self.most, "least": self.least, "random": self.random}
        example, value = (
            np.stack([getattr(of, name)[chosen] for of in kinds.values()], 1)
            for name in ("examples", "values")
        )
        places = np.stack([of.places[chosen] for of in kinds.values()], 1)
        axes, there = places.shape[-1], example != NO_EXAMPLE
        known = {1: ["position"], 2: ["row", "column"]}
        names = known.get(axes, [f"place_{i}" for i in range(axes)])
        unit_at, which, rank = np.nonzero(there)
        return {
            "unit": chosen[unit_at],
            "which": np.array(list(kinds), object)[which],
            "rank": rank + 1,
            "example": example[there].astype(np.int64),
            **{name: places[there][:, i].astype(np.int64) for i, name in enumerate(names)},
            "value": value[there].astype(np.float64),
        }

    def _unit_index(self, unit: int) -> int:
        if not -self.units <= unit < self.units:
            raise IndexError(f"{self.site!r} has {self.units} units; there is no unit {unit}.")
        return unit % self.units

    def __repr__(self) -> str:
        constant = int(self.constant.sum())
        also = f", {constant} of them constant" * bool(constant) + ", stopped" * self.stopped
        return f"TopExamples({self.site!r}, {self.count} examples, {self.units} units{also})"


def top_examples(
    f: object,
    data: Iterable[object],
    site: str,
    *,
    k: int = 9,
    axis: int = -1,
    inputs: Callable[[Any], Any] | None = None,
    seed: int = 0,
    progress: Progress = True,
    where: Value = None,
) -> TopExamples:
    """Find the inputs that excite each unit, head or channel of a site most and least.

    One pass over the data serves all units; only the examples kept stay in memory. A unit's value
    for an example is its largest (for `least`, its smallest) over the example's places.

    Args:
        f: the model, or a bound method of it.
        data: any iterable of batches. A batch is the model's argument, or a tuple of its
            arguments; their first axis is that of the examples.
        site: the site's key; `"blocks/mlp[2]"` for one layer of a stack.
        k: how many examples to keep of each kind.
        axis: the axis of the units in what the site returns: -1 for features and channels, -2 for
            the heads of `[batch, length, heads, features]`.
        inputs: a function of a batch that returns what the model receives, if the batch holds more:
            `lambda batch: batch["image"]`.
        seed: chooses the random examples.
        progress: as in `sweep`, in batches. A stop, or an interrupt after the first batch, returns
            what was found so far.
        where: which positions count, such as those that are no padding; see `capture`. An example
            of which none counts is left out. Of a site without positions all places count, and
            `notes` says so.

    If the last batch is smaller, copies of its first example fill it up and are left out again. For
    a batch of another shape, the program is compiled again. `notes` reports both. As with jit, a
    later call with a model and batches of the same form compiles nothing.

    Raises:
        ValueError: there is no such site, unit axis or layer; the data is empty; the first axis
            is not that of the examples.
        TypeError: `f` is not a module; a batch does not fit its arguments; the site returns no real
            numbers.
        InspectorError: the site is called several times, or the call cannot be traced.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> data = np.random.default_rng(0).normal(size=(5, 8, 2)).astype("float32")
        >>> found = nni.top_examples(model, data, "layers/0", k=2)
        >>> found
        TopExamples('layers/0', 40 examples, 3 units)
        >>> list(found.to_frame(unit=1)["which"])
        ['most', 'most', 'least', 'least', 'random', 'random']
    """
    function = module_function(f, "top_examples")
    model = model_of(function, (), {}, "top_examples")
    Selection(without_layers(site)[0]).require_match(model)
    found = search_examples(
        lambda args: (function, args, {}),
        *(data, site, k, axis, inputs, seed, progress),
        where=where_of(where),
    )
    for note in found.notes if where is not None else ():
        if note.startswith("where="):
            warn(f"{note}.")
    return found


def search_examples(
    make_call: MakeCall,
    data: Iterable[object],
    site: str,
    k: int,
    axis: int,
    inputs: Callable[[Any], Any] | None,
    seed: int,
    progress: Progress,
    *,
    where: Where | None = None,
) -> TopExamples:
    """As `top_examples`, for any call over a model."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a number of examples, 1 or more, got {k!r}.")
    total = len(data) if isinstance(data, Sized) else None
    search = ExampleSearch(make_call, site, k, axis, seed, where)
    with show_progress(progress, "examples") as report:
        stopped = _search_batches(search, data, inputs, total, report)
        search.merge()
    if search.found is None:
        raise ValueError("data has no batch with an example in it.")
    found: Extremes = jax.device_get(search.found)
    kept = found.kept
    places = np.stack(kept.place, -1) if kept.place else np.empty((*kept.example.shape, 0), int)
    most, least, random = (
        Examples(kept.value[i].T, kept.example[i].T, places[i].swapaxes(0, 1))
        for i in (MOST, LEAST, RANDOM)
    )
    return TopExamples(
        site=site,
        axis=axis,
        count=search.count,
        most=most,
        least=least,
        random=random,
        nan=found.nan,
        stopped=stopped,
        notes=search.notes(),
        shape=search.shape,
        starts=tuple(search.starts),
    )


def _search_batches(
    search: ExampleSearch,
    data: Iterable[object],
    inputs: Callable[[Any], Any] | None,
    total: int | None,
    report: Report,
) -> bool:
    """Send all batches through; whether that was stopped before the end."""
    done = 0
    try:
        for batch in data:
            given = batch if inputs is None else inputs(batch)
            try:
                search.take(given if isinstance(given, tuple) else (given,))
            except (TypeError, ValueError, IndexError) as error:
                array: Any = data
                if is_array(array):
                    whole = type_text(array.dtype, array.shape)
                    add_note(
                        error,
                        f"data is one array, {whole}, so each entry of its first "
                        "axis was taken as a batch. To pass it as one batch, write [data].",
                    )
                raise
            done += 1
            if report(done, done + 1 if total is None else total) and done != total:
                return True
    except KeyboardInterrupt:
        if search.found is None:
            raise
        return True
    return False
