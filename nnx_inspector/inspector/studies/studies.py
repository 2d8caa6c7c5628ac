"""Studies of an inspector's model beside its passes: lenses, attribution, examples of a unit.

One study at a time, on a copy of the model in its modes, without the perturbations, with the batch
of the last requested pass, which all panels look at. Invariant: the screen shows figures of the
same result that Python gets, and an error of a study is shown in its panel. The recording keeps
examples. `lenses` computes; nothing is drawn.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import numpy as np

from nnx_inspector.arrays import is_array
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.passes.batch import (
    arguments_of,
    forward_request,
    given_arguments,
    unaligned_sites,
)
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.job import Job, Show
from nnx_inspector.inspector.studies.messages import (
    attribution_message,
    examples_message,
    lens_message,
    logits_message,
)
from nnx_inspector.inspector.values.positions import is_unaligned
from nnx_inspector.lenses.attribution import Attribution, attribute
from nnx_inspector.lenses.examples import TopExamples, search_examples
from nnx_inspector.lenses.lens import Lens, lens
from nnx_inspector.lenses.logits import logit_attribution
from nnx_inspector.program.function import is_input
from nnx_inspector.progress import Progress, Report, show_progress
from nnx_inspector.records.donated import retry_if_donated
from nnx_inspector.screen import protocol
from nnx_inspector.screen.batch_reader import Argument
from nnx_inspector.typing import Array, Function, Kwargs, Value


def require_site_argument(site: str | None) -> str:
    """The site of `insp.examples`, or a TypeError that shows a call."""
    if site is None:
        raise TypeError("insp.examples takes a site too: insp.examples(batches, 'encoder').")
    return site


def study_request(what: Value, **fields: object) -> protocol.Study:
    """The request for a study from Python; other fields are as when a panel is opened."""
    of_nobody = dict[str, Value](
        id=0, again=True, site="", example=0, position=-1, unit=0, axis=-1, token=None, unembed="",
        norm="", method="gradient_times_input",
    )  # fmt: skip
    return protocol.Study(what=what, **{**of_nobody, **fields})


NOT_ONE_CALL = "what the last step gives to the model is not one call like the example's"

T = TypeVar("T")
Make = Callable[[Call, Report], Value]
"""Makes a study of a call, and reports its progress."""
Select = Callable[[Value], Value]
"""Of a batch of the user's data, what the model is called with."""

_PANELS: dict[str, tuple[type[Value], Function]] = {
    "lens": (protocol.Lens, lens_message),
    "logits": (protocol.Logits, logits_message),
    "attribution": (protocol.Attributed, attribution_message),
    "examples": (protocol.UnitExamples, examples_message),
}
"""The message of each kind of study, and what makes it of a result."""


@dataclasses.dataclass(frozen=True)
class _LastResult:
    """The last result of a kind, the name of its pass, the number of its batch (-1: other data),
    the words of an example, and the pictures of several, if no batch on screen has them.
    """

    result: Value
    source: str
    batch: int
    words: Callable[[int], list[str]]
    pictures: Callable[[Sequence[int]], protocol.Pictures | None] = lambda examples: None


class Studies:
    """Makes studies, one at a time, and keeps the last result of each kind."""

    def __init__(self, core: Core):
        self._core, self._show = core, core.view.publish
        self._results: dict[str, _LastResult] = {}
        self._job = Job(core, "nnx_inspector.study")
        self.wait, self.stop = self._job.wait, self._job.stop

    # ------------------------------------------------------------- from Python

    def make(self, request: protocol.Study, f: Callable[..., T], **how: object) -> T:
        """The result of a lens or an attribution, which its panel shows too."""
        return self._run_here(request, self._lens_maker(f, how))

    def examples(
        self,
        request: protocol.Study,
        data: Iterable[object] | None,
        k: int,
        inputs: Select | None,
        progress: Progress,
    ) -> TopExamples:
        make = self._search_maker(request, data, k, inputs)
        return self._run_here(request, make, progress, data, inputs)

    # --------------------------------------------------------- from the screen

    def start(self, request: protocol.Study) -> None:
        """Make a study in a thread, or show another part of the last one."""
        self._core.require_open()
        if not request.again and request.what in self._results:
            self._show_part(request)
            return
        make = self._maker_of(request)
        self._job.queue(lambda: self._run(request, make, False, None), self._show_of(request))

    def _show_of(self, request: protocol.Study) -> Show:
        return lambda **said: self._show(self._empty_message(request, **said))

    def _maker_of(self, request: protocol.Study) -> Make:
        # no site is called "none", and False is the norm that a lens takes for no norm
        norm = False if request.norm == "none" else request.norm or None
        read = {"unembed": request.unembed or None, "norm": norm}
        if request.what == "lens":
            return self._lens_maker(lens, {**read, "answer": request.token})
        if request.what == "logits":
            before = self._results.get("lens")
            token = request.token
            if token is None and before:
                token = before.result.answer
            return self._lens_maker(logit_attribution, {**read, "token": token})
        if request.what == "attribution":
            how = {"output": request.token, "method": request.method, "position": request.position}
            return self._lens_maker(attribute, how)
        self._core.require_site(request.site)
        return self._search_maker(request, None, 5, None)

    # ------------------------------------------------------------------ within

    def _lens_maker(self, f: Function, how: Kwargs) -> Make:
        def make(call: Call, report: Report) -> Value:
            if f is not attribute and how.get("unembed") is None:
                self._require_classes()
            function, args, kwargs = call.function()
            return f(function, *args, **how, **kwargs)

        return make

    def _require_classes(self) -> None:
        """Raise a ValueError if nothing indicates that the model's output is logits."""
        core = self._core
        passes = [(one.args, one.kwargs) for one in (core.example, core.request)]
        arrays = [x for x in jax.tree.leaves(passes) if is_array(x)]
        whole = any(getattr(x.dtype, "kind", "") in "iu" for x in arrays)
        if not whole and not core.inputs.has_any(arrays):
            raise ValueError(
                "Nothing indicates that this model's output is logits: its inputs hold no words, "
                "classes or pictures. If it is, name the site that makes them with unembed=, or "
                "the classes with labels= of the Inspector."
            )

    def _search_maker(
        self, request: protocol.Study, data: Iterable[object] | None, k: int, inputs: Select | None
    ) -> Make:
        def make(call: Call, report: Report) -> TopExamples:
            kwargs = call.kwargs if data is None else {}
            return search_examples(
                lambda args: dataclasses.replace(call, args=args, kwargs=kwargs).function(),
                [call.args] if data is None else data,
                request.site, k, request.axis, inputs, 0, report, where=call.entry.where,
            )  # fmt: skip

        return make

    def _run_here(
        self,
        request: protocol.Study,
        make: Make,
        progress: Progress = False,
        data: Iterable[object] | None = None,
        inputs: Select | None = None,
    ) -> Value:
        self._core.require_open()
        self._job.reserve()
        return self._run(request, make, progress, data, inputs)

    def _run(
        self,
        request: protocol.Study,
        make: Make,
        progress: Progress,
        data: Iterable[object] | None,
        inputs: Select | None = None,
    ) -> Value:
        core, show = self._core, self._show_of(request)
        with self._job.running(show):
            studied = forward_request(core) if data is None else core.example
            source = f"{core.request.name.lower()}, at step {core.step}"
            if studied is None:
                studied, source = core.example, f"{core.example.name.lower()}: {NOT_ONE_CALL}"
            switches = core.modes.switches()
            read_call = lambda: studied.call(core.model, switches).copied()  # noqa: E731
            call = retry_if_donated(read_call, "The model", core.model)
            with show_progress(progress, request.what) as bar, call.configuration.applied():
                result = make(call, self._job.report_to(show, bar))
            if isinstance(result, TopExamples):
                core.recording.keep_table(f"examples of {result.site}", result.columns())
            if data is not None:
                source = f"the data given, at step {core.step}"
                read = self._argument_reader(data, inputs, result.starts)
                words = lambda example: core.inputs.words(read([example]), 0)  # noqa: E731
                pictures = lambda those: core.inputs.pictures_in(read(those))[0]  # noqa: E731
                found = _LastResult(result, source, -1, words, pictures)
            else:
                of_it = studied.number == core.request.number
                arguments = arguments_of(core) if of_it else given_arguments(core, studied)
                words = lambda example: core.inputs.words(arguments, example)  # noqa: E731
                found = _LastResult(result, source, studied.number if of_it else -1, words)
            self._results[request.what] = found
            if request.what == "lens":
                self._results.pop("logits", None)  # its answers may be others
            self._show_part(request)
            return result

    def _show_part(self, request: protocol.Study) -> None:
        """Show the requested part of what was found."""
        found, inputs = self._results[request.what], self._core.inputs
        of_classes = inputs.decode is None or (request.what == "attribution" and inputs.labels)
        name = inputs.name if of_classes else lambda number: inputs.text([number])[0]
        words, more = found.words, Kwargs()
        if request.what == "examples":
            more["placed"] = self._has_words(found.result)
        elif not self._has_words(found.result):
            words = lambda example: []  # noqa: E731
        _, made = _PANELS[request.what]
        message = made(found.result, request, found.source, words, name, **more)
        message = dataclasses.replace(message, batch=found.batch)
        if request.what == "examples":
            pictures = found.pictures([row.example for row in message.rows])
            message = dataclasses.replace(message, pictures=pictures)
        if request.what == "lens":
            # those on screen may be of another example
            self._show(self._empty_message(study_request("logits")))
        self._show(message)

    def _has_words(self, found: Value) -> bool:
        """Whether the positions of a result are surely those of the tokens."""
        core = self._core
        site = {Lens: lambda: found.sites[-1], Attribution: lambda: found.of.split(" call ")[0],
                TopExamples: lambda: found.site}.get(type(found), lambda: "")()  # fmt: skip
        at = unaligned_sites(core, core.example, given_arguments(core, core.example))
        return not is_unaligned(at, site)

    def _argument_reader(
        self, data: Iterable[object], inputs: Select | None, starts: Sequence[int]
    ) -> Callable[[Sequence[int]], list[Argument]]:
        """What gives the arguments of some examples of the data, as one batch; none if the data is
        gone once it was read, as that of a generator is.
        """
        arguments = given_arguments(self._core, self._core.example)
        batches = _Batches(data, inputs, starts)

        def read(examples: Sequence[int]) -> list[Argument]:
            rows = batches.rows(examples)
            pairs = zip(arguments, rows, strict=False)
            # ids that an embedding receives in part have no known places
            return [dataclasses.replace(one, value=x) for one, x in pairs if not one.changed]

        return read if isinstance(data, Sequence) or is_array(data) else lambda examples: []

    def _empty_message(self, request: protocol.Study, **more: object) -> Value:
        """The message of a study that has found nothing yet."""
        kind, _ = _PANELS[request.what]
        fields = {f.name: _empty_value(f.type) for f in dataclasses.fields(kind)}
        del fields["version"]
        said = {name: getattr(request, name, None) for name in fields}
        said = {name: value for name, value in said.items() if value is not None}
        more = {name: value for name, value in more.items() if name in fields}
        return kind(**{**fields, **said, **more})


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The data of a search, of which single examples are read again; `starts`: the number of the
    first example of each batch.
    """

    data: Value
    inputs: Select | None
    starts: Sequence[int]

    def rows(self, examples: Sequence[int]) -> list[np.ndarray]:
        """Each array of the batches, with these examples only; [] if the data has too few by now,
        or if they are of different shapes.
        """
        found: list[list[np.ndarray]] = []
        for example in examples:
            number = bisect.bisect_right(self.starts, example) - 1
            if not 0 <= number < len(self.data):
                return []
            arrays, size = self._read(self.data[number])
            at = example - self.starts[number]
            if at >= size:
                return []
            found.append([np.asarray(x[at] if x.shape[:1] == (size,) else x) for x in arrays])
        alike = len({tuple(x.shape for x in one) for one in found}) == 1
        return [np.stack(column) for column in zip(*found, strict=True)] if alike else []

    def _read(self, batch: object) -> tuple[list[Array], int]:
        """The arrays of a batch, and the number of its examples."""
        given = batch if self.inputs is None else self.inputs(batch)
        arrays = [x for x in jax.tree.leaves(given) if is_input(x)]
        return arrays, next((x.shape[0] for x in arrays if x.shape), 0)


def _empty_value(hint: object) -> Value:
    """The empty value of a field's type, which is a text here."""
    text = str(hint)
    if text.startswith("tuple"):  # of what may be None, too
        return ()
    if "None" in text:
        return None
    return {"str": "", "bool": False, "int": 0}[text]
