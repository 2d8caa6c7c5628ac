"""The bounded history of a run: the summaries of its passes, and metrics, over the steps.

Invariants: a recording never grows beyond its bounds; thinned passes are counted; the first pass,
the newest, and those with the first NaN and Inf stay. A quantity that was not measured is None or
absent, never zero. A recording may be used from any thread. Does not measure, does not draw, and
imports no jax.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.background import Subscription
from nnx_inspector.files import real_path
from nnx_inspector.recordings.curves import Curves, Tally, entries_to_drop, scalar
from nnx_inspector.recordings.facts import (
    Facts,
    FactsSource,
    PassStats,
    Uncalled,
    known_so_far,
    read_pending,
)
from nnx_inspector.recordings.format import Columns
from nnx_inspector.recordings.history import (
    HistoryArrays,
    casts_frame,
    choices_frame,
    evenly_spaced,
    history_of,
    metrics_frame,
    passes_frame,
)
from nnx_inspector.recordings.passes import (
    Mark,
    Pass,
    PassLayout,
    Quantity,
    check_quantity,
    check_site,
    end_mark,
    make_mark,
    make_pass,
    step_number,
)
from nnx_inspector.recordings.save import HELD, Journal, Sections, State, save
from nnx_inspector.recordings.tree_rows import PARAMETER_QUANTITIES, STATE
from nnx_inspector.stats.choices.rows import EXPERT_STATS, HEAD_STATS
from nnx_inspector.stats.encoding import Packed, decode
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_POINTS_PER_PASS: Final = 10


class Recording:
    """Summaries and metrics of a run, bounded in passes and in bytes.

    When a bound is exceeded, about every second pass of the older half is dropped, so that the
    rest stays evenly spaced: the distant past becomes coarser and the recent past stays whole.
    The first pass, the newest, and those with the first NaN, +Inf and -Inf of each quantity are
    never dropped. `thinned` counts the dropped passes.

    Args:
        max_steps: the most passes to keep, at least 2.
        max_bytes: the most memory to use, in bytes. The first and the newest pass are kept
            whatever they take. Metrics take up to a quarter of it.

    Attributes:
        cut_short: whether it was read from a file whose end is missing. Passes may then be
            missing that `thinned` does not count.
        name: its name on screen; that of its file, if it was read from one.

    Raises:
        ValueError: a bound is too small.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> recording = Recording(max_steps=100)
        >>> recording.append(0, {"blocks/0": {"output": empty()}}, metrics={"loss": 2.5})
        >>> recording.steps, recording.sites, recording.curves()["loss"].tolist()
        ([0], ('blocks/0',), [[0.0, 2.5]])
    """

    def __init__(self, *, max_steps: int = 2000, max_bytes: int = 256 * 2**20):
        if max_steps < 2 or max_bytes < 4096:
            raise ValueError(
                f"A recording needs at least 2 passes and 4096 bytes, got max_steps={max_steps} "
                f"and max_bytes={max_bytes}. The defaults are 2000 passes and 256 MiB."
            )
        self.max_steps, self.max_bytes = max_steps, max_bytes
        self._lock = threading.RLock()
        self._journal: Journal | None = None
        self._held: dict[int, Pass] = {}
        self._marks: list[Mark] = []
        self._passes: list[Pass] = []
        self._incomplete: tuple[Pass, ...] = ()
        self._bytes = 0
        self._begun = 0  # how many passes a file says that it had
        self._sites, self._parameters = dict[str, None](), dict[str, None]()
        self._layouts: dict[tuple[tuple[str, str], ...], PassLayout] = {}
        self._firsts: set[tuple[bool, str, str]] = set()
        self._curves = Curves(_POINTS_PER_PASS * max_steps, max_bytes // 4)
        self._facts: Facts | None = None
        self._learnt: list[FactsSource] = []
        self._tables: dict[str, Columns] = {}
        self._subscriptions: tuple[tuple[Subscription, Any, Any], ...] = ()
        self.cut_short, self.name = False, ""

    def append(
        self,
        step: int,
        summaries: Mapping[str, Mapping[str, Summary | None]],
        *,
        metrics: Mapping[str, float] | None = None,
        kind: str = "watch",
        perturbed: bool = False,
        setting: int = 0,
        figures: PassStats | None = None,
        held: int | None = None,
    ) -> None:
        """Add one pass. If an argument is invalid, nothing is added.

        Args:
            step: any integer. Several passes may have the same step; they stay in order.
            summaries: key -> quantity -> Summary, in the order of execution. Summaries with rows
                are merged; None marks a quantity not measured.
            metrics: scalars of this step; see `add_metrics`.
            kind: where the pass came from, shown in the frame.
            perturbed: whether a perturbation was on.
            setting: a number that is equal for passes with equal perturbations; see `Pass`.
            figures: further figures of this pass, which the rules need; see `PassStats`.
            held: the ticket under which the pass was held; see `hold`.

        Raises:
            ValueError: there is no such quantity.
            TypeError: a summary holds tracers, or a metric or the step is not a number of its kind.
        """
        marks: Any = {"step": step, "kind": kind, "setting": setting, "perturbed": perturbed}
        item = make_pass(summaries, figures=figures, **marks)  # without the lock: it may take long
        values = {name: scalar(name, value) for name, value in (metrics or {}).items()}
        with self._lock:
            if values:
                self._add(item.step, values)
            last = () if self._appended in self.seams else self._passes[-1:]  # of this run
            if held is not None and [(p.step, p.kind) for p in last] == [(item.step, kind)]:
                return  # an interrupt came between adding it and noting that it was added
            self._announce_change()
            news = not item.firsts <= self._firsts
            item = dataclasses.replace(item, number=self._appended, news=news)
            item = self.take(item)
            before = self._held.pop(ticket := -1 if held is None else held, None)
            self._append_to_file(lambda to: to.of_pass(item, ticket=ticket, like=before))
            for one, of_pass, _ in self._subscriptions:
                one.submit(item.step, of_pass, item)
        self._report_failure()

    def hold(
        self,
        ticket: int,
        step: int,
        summaries: Mapping[str, Mapping[str, Summary | None]],
        *,
        kind: str = "watch",
        perturbed: bool = False,
        setting: int = 0,
    ) -> None:
        """Write to the attached file, if there is one, a pass that may be incomplete.

        The pass joins the recording when `append` is called with `held=ticket`. If the process is
        killed before that, the file still has it. The other arguments are those of `append`.
        """
        if not self.attached:
            return
        marks: Any = {"step": step, "kind": kind, "setting": setting, "perturbed": perturbed}
        item = make_pass(summaries, **marks)
        with self._lock:
            news = not item.firsts <= self._firsts
            item = dataclasses.replace(item, number=self._appended, news=news)
            self._announce_change()
            if self._held.pop(ticket, None) is not None:  # of a loop whose end was interrupted
                self._announce_change()  # and so it goes from the file too
            self._held[ticket] = item
            self._append_to_file(lambda to: to.of_pass(item, kind=HELD, ticket=ticket))
        self._report_failure()

    def take(self, item: Pass) -> Pass:
        """Add a finished pass, whose number is greater than those of all others, and return it as
        it is kept: passes with summaries of the same keys share the layout.
        """
        with self._lock:
            layout = item.layout
            if layout.keys in self._layouts:
                item = dataclasses.replace(item, layout=self._layouts[layout.keys])
            else:
                for key, what in layout.keys:
                    if what != STATE:  # those are read from passes
                        of_sites = what not in PARAMETER_QUANTITIES
                        (self._sites if of_sites else self._parameters)[key] = None
                self._layouts[layout.keys] = layout
                self._bytes += layout.nbytes
            self._firsts |= item.firsts
            self._passes.append(item)
            self._bytes += item.nbytes
            while len(self._passes) > self.max_steps or self.nbytes > self.max_bytes:
                gone = entries_to_drop(
                    [p.number for p in self._passes], [p.news for p in self._passes]
                )
                if not gone:
                    break
                self._passes = [p for i, p in enumerate(self._passes) if i not in gone]
                self._layouts = {p.keys: p.layout for p in self._passes}
                self._bytes = sum(p.nbytes for p in self._passes)
                self._bytes += sum(layout.nbytes for layout in self._layouts.values())
            return item

    @property
    def _appended(self) -> int:
        """How many passes were appended: the newest one is never dropped."""
        return max(self._passes[-1].number + 1 if self._passes else 0, self._begun)

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to the curve of each metric. NaN and Inf are kept as they are.

        Args:
            step: the step that the values belong to.
            values: name -> number (a Python, NumPy or jax scalar).

        Raises:
            TypeError: a value is not a single number. Nothing is added then.
        """
        at = step_number(step)
        numbers = {name: scalar(name, value) for name, value in values.items()}
        with self._lock:
            if numbers:
                self._add(at, numbers)
        self._report_failure()

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        self._announce_change()
        self._curves.add(step, values)
        self._append_to_file(lambda sections: sections.of_points(step, values))
        for one, _, of_metrics in self._subscriptions:
            if of_metrics is not None:
                one.submit(step, of_metrics, step, dict(values))

    def subscribe(
        self,
        f: Callable[[Pass], object],
        *,
        metrics: Callable[[int, dict[str, float]], object] | None = None,
        failed: Callable[[str], object] | None = None,
        name: str = "",
    ) -> Subscription:
        """Call a function with each pass that is recorded from now on, in a thread, in order.

        Recording never waits for it. At most 256 calls wait; what is recorded then is left out.

        Args:
            f: called with each `Pass`.
            metrics: called with the step and the numbers by name whenever metrics are recorded.
            failed: called with a message at the first call that raises, in the thread, and if calls
                were left out, at the end. Without it, both are warnings at the end.
            name: what messages call `f`, at the beginning of a sentence.

        Returns:
            A function that ends it once `f` has had all that is recorded. An `f` that has not
            returned for 10 seconds then is not waited for.

        Raises:
            TypeError: `f` is not callable.

        Example:
            >>> from nnx_inspector.stats.summary import empty
            >>> recording, steps = Recording(), []
            >>> end = recording.subscribe(lambda one: steps.append(one.step))
            >>> recording.append(7, {"head": {"output": empty()}})
            >>> end()
            >>> steps
            [7]
        """
        if not callable(f):
            raise TypeError(f"subscribe takes a function of a pass, got {type(f).__name__}.")
        one = Subscription(name or f"The function {getattr(f, '__name__', repr(f))}", failed)
        with self._lock:
            self._subscriptions = (*self._subscriptions, (one, f, metrics))

        def end() -> None:
            with self._lock:
                self._subscriptions = tuple(s for s in self._subscriptions if s[0] is not one)

        one.ended = end
        return one

    def state(self) -> State:
        """Everything to save."""
        facts = self.facts
        with self._lock:
            return State(
                max_steps=self.max_steps,
                max_bytes=self.max_bytes,
                appended=self._appended,
                thinned_points=self._curves.thinned,
                sites=tuple(self._sites),
                firsts=frozenset(self._firsts),
                passes=tuple(self._passes),
                held=dict(self._held),
                curves=self._curves.arrays(),
                dropped=self._curves.dropped(),
                facts=facts,
                tables=dict(self._tables),
                marks=tuple(self._marks),
            )

    def begin(
        self,
        appended: int,
        thinned_points: int,
        sites: Iterable[str],
        firsts: Set[tuple[bool, str, str]],
        dropped: Mapping[str, Tally],
    ) -> None:
        """Set what a file says besides the passes and points that follow."""
        with self._lock:
            self._begun = appended
            self._curves.begin(thinned_points, dropped)
            self._sites.update(dict.fromkeys(sites))
            self._firsts |= firsts

    def show_incomplete(self, found: Iterable[Pass]) -> None:
        """Show these passes as the newest, in place of those of the call before. No bound thins
        them out, and what is appended or saved goes on without them.
        """
        with self._lock:
            self._incomplete, firsts = (), set(self._firsts)
            for number, item in enumerate(found, self._appended):
                news = not item.firsts <= firsts
                self._incomplete += (dataclasses.replace(item, number=number, news=news),)
                firsts |= item.firsts

    def take_incomplete(self) -> None:
        """Add the passes of `show_incomplete` as they are."""
        with self._lock:
            found, self._incomplete = self._incomplete, ()
            for item in found:
                self.take(item)

    def become(self, other: Recording) -> None:
        """Take over everything that another recording has; the other is not used any more."""
        with self._lock, other._lock:
            own = "_lock", "_journal", "_subscriptions", "name"
            vars(self).update({**vars(other), **{name: vars(self)[name] for name in own}})

    def learn(self, facts: FactsSource) -> None:
        """Add facts about the model to those already known. If they are a function, it is called
        when somebody asks, or now if a file is attached: to read a program takes long.
        """
        if self._learnt[-1:] != [facts]:
            self._learnt.append(facts)
        _ = self.attached and self.facts
        self._report_failure()

    def miss(self, uncalled: Uncalled | None) -> None:
        """Note that a watched loop never called the model, or with None that it does."""
        with self._lock:
            self.know(dataclasses.replace(self._facts or Facts(), uncalled=uncalled))
        self._report_failure()

    def count_where(self, where: str) -> None:
        """Note which positions count from now on, as a clause; "" for all."""
        with self._lock:
            self.know(dataclasses.replace(self._facts or Facts(), where=where))

    def know(self, facts: Facts) -> None:
        """Replace what is known about the model."""
        with self._lock:
            if facts != (self._facts or Facts()):
                self._announce_change()
                self._facts = facts
                self._append_to_file(lambda sections: sections.of_facts(facts))

    def keep_table(self, title: str, columns: Columns) -> None:
        """Keep a table of numbers and text, in place of the one with this title."""
        with self._lock:
            self._announce_change()
            self._tables[title] = columns
            self._append_to_file(lambda sections: sections.of_table(title, columns))
        self._report_failure()

    def table(self, title: str) -> Columns | None:
        """The columns of the table with this title, or None."""
        return self._tables.get(title)

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Title -> a table about the model: "modules", or of a search, "examples of conv1"."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        _ = self.facts  # reading them adds the table of modules
        return {title: pd.DataFrame(dict(table)) for title, table in [*self._tables.items()]}

    @property
    def marks(self) -> tuple[Mark, ...]:
        """When the runs that were saved to its file began, went on and ended, oldest first."""
        return tuple(self._marks)

    @property
    def seams(self) -> tuple[int, ...]:
        """The numbers of the passes with which a restarted run went on, in order."""
        return tuple(mark.number for mark in self.marks if mark.event == "resumed")

    @property
    def facts(self) -> Facts | None:
        """What is known about the model, or None."""
        for found in read_pending(self._learnt, self._lock):
            self.know(found if self._facts is None else self._facts.joined(found))
        return self._facts

    @property
    def where(self) -> str:
        """Which positions the figures count, such as "tokens != 0"; "" for all. It is the text of a
        lambda, or the name of a function, or the shape of a mask.
        """
        return "" if self._facts is None else self._facts.where

    @property
    def facts_so_far(self) -> Facts | None:
        """The same without what is yet to be read; see `learn`."""
        return known_so_far(self._facts, [*self._learnt])

    @property
    def nbytes(self) -> int:
        """The memory that passes, metrics and tables take, in bytes, besides a cache that all
        recordings share: up to 600 unpacked summaries of about 5 kB.
        """
        with self._lock:
            tables = sum(c.nbytes for table in self._tables.values() for c in table.values())
            return self._bytes + self._curves.nbytes + tables

    @property
    def thinned(self) -> int:
        """How many passes were dropped to stay within the bounds."""
        with self._lock:
            return self._appended - len(self._passes)

    @property
    def thinned_points(self) -> int:
        """How many points of metrics were dropped."""
        return self._curves.thinned

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes kept, oldest first, as a snapshot that later appends do not change."""
        with self._lock:
            return (*self._passes, *self._incomplete)

    @property
    def steps(self) -> list[int]:
        """The step of each pass, in order; one with several passes occurs several times."""
        return [p.step for p in self.passes]

    @property
    def perturbed(self) -> list[bool]:
        """Whether a perturbation was on, for each pass."""
        return [p.perturbed for p in self.passes]

    @property
    def sites(self) -> tuple[str, ...]:
        """The keys of all sites ever appended, in the order in which they were first seen."""
        with self._lock:
            return tuple(self._sites)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The paths of all parameters that were measured."""
        return tuple(self._parameters)

    def __len__(self) -> int:
        """The number of passes kept."""
        return len(self.passes)

    def __repr__(self) -> str:
        passes = self.passes
        steps = f", steps {passes[0].step} to {passes[-1].step}" if passes else ""
        gone = f", {self.thinned} older passes thinned out" if self.thinned else ""
        points = f", {self._curves.thinned} metric points thinned out" * bool(self._curves.thinned)
        points += ", read from a file whose end is missing" * self.cut_short
        return (
            f"Recording({len(passes)} passes{steps}, {len(self.sites)} sites, "
            f"{self.nbytes / 2**20:.1f} MiB{gone}{points})"
        )

    def summary(
        self, site: str, quantity: Quantity = "output", *, index: int = -1
    ) -> Summary | None:
        """The summary of one pass, the newest by default.

        Args:
            site, quantity: a site key, or the path of a parameter, and what was measured there.
            index: the index of a pass, as in `steps`.

        Returns:
            The summary, or None if that pass did not measure it.

        Raises:
            KeyError: no pass ever had this site.
            IndexError: there is no such pass.
        """
        self._check(site, quantity)
        if not -len(passes := self.passes) <= index < len(passes):
            raise IndexError(f"There is no pass {index} in a recording with {len(passes)} passes.")
        return passes[index].summary(site, quantity)

    def _check(self, site: str, quantity: str) -> None:
        check_quantity(quantity, site)
        check_site(site, (*self.sites, *self.parameters, *self.states))

    def curves(self) -> dict[str, npt.NDArray[np.float64]]:
        """The metrics by name, each float64[n, 2]: step and value, in the order of arrival."""
        with self._lock:
            return self._curves.arrays()

    def tallies(self) -> dict[str, Tally]:
        """What was counted of each metric; exact, even where points were dropped."""
        with self._lock:
            return self._curves.tallies()

    # -------------------------------------------------------- many passes at once

    @property
    def states(self) -> tuple[str, ...]:
        """The keys of the arrays of optimizers in its passes: `"optimizer/mu/head/kernel"`."""
        layouts = {id(one.layout): one.layout for one in self.passes}.values()
        keys = (key for one in layouts for key, quantity in one.keys if quantity == STATE)
        return tuple(dict.fromkeys(keys))

    def series(self, site: str, quantity: Quantity = "output") -> tuple[list[int], list[Summary]]:
        """The steps and summaries of all passes that measured this, oldest first."""
        steps, blobs = self._series(site, quantity)
        found = decode(Packed.of(blobs))
        return steps, [found.summary(row) for row in range(len(steps))]

    def history(
        self, site: str, quantity: Quantity = "output", *, columns: int = 300
    ) -> HistoryArrays:
        """A site's quantity over the steps, as the screen draws it.

        The axis spans the finite values of all passes kept. A pass that did not measure this has
        no column.

        Args:
            site, quantity: as for `summary`.
            columns: the most columns, at least 2. If there are more passes, this many are picked
                evenly, including the first and the newest.

        Raises:
            ValueError: `columns` is below 2.
        """
        steps, every = self._series(site, quantity)
        return history_of(evenly_spaced(steps, columns), evenly_spaced(every, columns), every)

    def _series(self, site: str, quantity: str) -> tuple[list[int], list[bytes]]:
        self._check(site, quantity)
        found = [(p.step, blob) for p in self.passes if (blob := p.piece(site, quantity))]
        return [step for step, _ in found], [blob for _, blob in found]

    def to_frame(self, *, layers: bool = False) -> pd.DataFrame:
        """A tidy pandas frame: a row for each pass, site (array, parameter) and quantity.

        Columns: `step, pass, kind, perturbed, site, quantity`, statistics (counts as Int64; the
        unknown is missing), quantiles within 6.25 %, `q01, q05, q25, q50, q75, q95, q99`, and of a
        "parameter" `update_ratio`, the norm of the step's change divided by that of the value, and
        `update_lost`: of the elements to which the step added something other than 0, the share
        that stayed what they were, because the parameter's dtype rounds that off;
        `update_decayed`, the norm of weight decay divided by that of what it is added to; and
        `update_clipped`, the part of a norm that clipping takes (NaN: not seen). `attrs["seams"]`
        has the numbers (`pass`) with which a restarted run went on.

        Args:
            layers: whether to add rows for single layers of stacked modules (`"blocks[3]"`). The
                row of the stack covers the same values: do not add both up.
        """
        return passes_frame(self.passes, layers=layers, seams=self.seams)

    def casts_frame(self, *, step: int | None = None) -> pd.DataFrame:
        """What would become of all that was measured in lower precision, as a tidy pandas frame.

        Columns: `site, quantity, dtype, scaled`, and three shares of the finite values. `to_zero`
        are the nonzero values that would be rounded to 0. `subnormal` are those that would lose
        precision because they are too small. `overflow` are those that are too large. The dtypes
        are bfloat16, float16, float8_e4m3fn and float8_e5m2. Each has a row as it is, and a row
        with the array scaled so that its largest value is the largest of the dtype. All shares come
        from the histogram, so they are estimates where it counts a sample, or where a limit falls
        within one of its bins.

        Args:
            step: that of the pass; by default the newest one.

        Raises:
            KeyError: no pass has this step.

        Example:
            >>> from nnx_inspector.stats.summarize import summarize
            >>> recording = Recording()
            >>> recording.append(0, {"head": {"output": summarize(np.array([1e-9, 1e-6, 1.0]))}})
            >>> frame = recording.casts_frame()
            >>> float(frame[frame["dtype"] == "float16"]["to_zero"].iloc[0])
            0.3333333333333333
        """
        passes = [one for one in self.passes if step is None or one.step == step]
        if step is not None and not passes:
            steps = [one.step for one in self.passes]
            said = f"It has {len(steps)} passes, of the steps {steps[0]} to {steps[-1]}" * bool(
                steps
            )
            raise KeyError(f"No pass of step {step} is in the recording. {said or 'It is empty'}.")
        return casts_frame(passes[-1] if passes else None)

    def heads_frame(self) -> pd.DataFrame:
        """What each head of each attention did in each pass, as a tidy pandas frame.

        Columns: `step, pass, site, head`, and the following. All but `logit` are means over queries
        with at least two keys that no mask excludes; of many, over 64 evenly spaced queries of 16
        examples.

        - `entropy` of the probabilities in nats, before a dropout.
        - `evenness`, the entropy as a share of the logarithm of the number of allowed keys, which
          is the most that it can be: 1 if a head looks at all keys alike, 0 if at one key.
        - `distance` between a query and its keys in positions, weighted by probability; NaN if
          there are not as many queries as keys.
        - `first`, the probability of the first key.
        - `logit`, the greatest of all logits that enter the softmax, of keys that no mask excludes.
        - `keys`, the number of allowed keys.

        A site is the call that computes the attention, `"attn@attention"`. Attention that a fused
        kernel computes, or a while loop, has no rows, nor has a call of a loop that nothing jits.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(attn, jnp.ones((1, 4, 8)), display=False)
            >>> y = insp.run()
            >>> insp.recording.heads_frame()[["site", "head", "evenness", "keys"]].round(2)
                     site  head  evenness  keys
            0  @attention     0       1.0   4.0
            1  @attention     1       1.0   4.0
        """
        return choices_frame(self.passes, "head", HEAD_STATS)

    def experts_frame(self) -> pd.DataFrame:
        """What each expert of each router was given in each pass, as a tidy pandas frame.

        Columns: `step, pass, site, expert`, and the following.

        - `load`, the share of the tokens that choose the expert; of all experts together, as many
          as a token chooses.
        - `dropped`, the share of these choices that the capacity of the expert leaves out. It is
          known where the choice becomes a one-hot mask, whose cumulative sum over the tokens is
          compared with the capacity, or becomes a one-hot vector of as many slots; NaN elsewhere (a
          sort, a scatter that drops, a kernel), where the program says it in no form that is
          recognised, and for an expert that nothing chooses.
        - `entropy` of the router's softmax over all experts in nats, the mean over tokens; NaN if
          it has none.
        - `evenness`, the same as a share of the logarithm of the number of experts.
        - `logit`, the greatest that the expert got; NaN if the choice is made by probabilities.

        A site is the call that chooses, `"moe@experts"`.
        """
        return choices_frame(self.passes, "expert", EXPERT_STATS)

    def metrics_frame(self) -> pd.DataFrame:
        """The metrics as a tidy pandas frame: columns `step, name, value`, name by name."""
        return metrics_frame(self.curves())

    # ------------------------------------------------------------------- its file

    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Save the recording to a file, which `nni.load` reads.

        An existing file is replaced in one piece, or stays as it is if saving fails.

        Raises:
            OSError: the file cannot be written.
            InspectorError: a name is longer than 65,536 bytes.
        """
        with self._lock:
            if self._journal is not None and self._journal.path == real_path(path):
                self._journal.rewrite()
                return
        save(path, self.state())

    def attach(self, path: str | bytes | os.PathLike[str], failed: Callable[[str], object]) -> None:
        """Save to a file, and from then on append each pass and metric to it.

        A process that is killed loses nothing that was appended. The file stays within about
        twice the recording's bytes: it is rewritten when it has grown beyond that.

        Args:
            path: the file. A file that was attached before is left as it is.
            failed: called once, with a message, if appending fails.
        """
        with self._lock:
            going_on = bool(self._marks) and self._marks[-1].event == "resumed"
            begun = [] if going_on else [make_mark("begun", self._appended)]
            before, marks = self._journal, self._marks
            self._marks = [*marks, *begun]
            try:
                self._journal = Journal(path, self.state, failed)
            except BaseException:
                self._marks = marks
                raise
            _attached.add(self)
            if before is not None:
                if before.path != self._journal.path:  # else the new file is in its place
                    before.end(make_mark("saved", self._appended))
                before.close(retry=False)

    def detach(self, error: BaseException | None = None) -> None:
        """Stop appending to the file, which then says that the run ended, or what error left it."""
        with self._lock:
            before = self._journal
            if before is not None:
                if self._marks[-1].open:  # an interrupt may have left the rest to a second call
                    self.note(end_mark(error, self._appended))
                self._journal = None
                before.close()
            self._held = {}
        if before is not None:
            before.tell()

    def note(self, mark: Mark) -> None:
        """Add an event of the run."""
        with self._lock:
            self._announce_change()
            self._marks = [*self._marks, mark]
            self._append_to_file(lambda sections: sections.of_mark(mark))

    def catch_up(self) -> None:
        """Write to the attached file what an interrupt has left out."""
        with self._lock:
            if self._journal is not None:
                self._journal.catch_up()

    @property
    def attached(self) -> bool:
        """Whether passes are appended to a file."""
        return self._journal is not None

    def _announce_change(self) -> None:
        """Before each change that is written, so that none is left out by an interrupt."""
        if self._journal is not None:
            self._journal.announce()

    def _append_to_file(self, make: Callable[[Sections], bytes]) -> None:
        if self._journal is not None:
            self._journal.write(make, self.nbytes)

    def _report_failure(self) -> None:
        if (journal := self._journal) is not None:
            journal.tell()


_attached: weakref.WeakSet[Recording] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Let the files say that the run has ended, where nobody has closed what writes them."""
    for one in list(_attached):
        one.detach()
