"""Measures each construct against each promise and writes `notebooks/constructs.md`.

Run `python tests/helpers/constructs.py`: it computes every cell.
Invariant: a wrong number, a wrong attribution or a call that is neither seen nor reported is an
error, unless `KNOWN` says why it is unavoidable. The tests compare the file with a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from compilations import Compilations
from construct_cases import BEFORE, CONSTRUCTS, INSIDE, Construct, X, squares
from flax import nnx

from nnx_inspector.errors import InspectorWarning
from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.activations import Zero
from nnx_inspector.perturbations.perturb import perturb
from nnx_inspector.records.capture import capture, value_and_grad

FILE = pathlib.Path(__file__).parents[2] / "notebooks" / "constructs.md"

COLUMNS = {
    "fires": "`intercept_methods` without `model=`: the interceptor runs around every call.",
    "attributed": "`intercept_methods` with `model=`: every call has its path, the right one.",
    "instance": "with a submodule as `model=`: that one instance is intercepted and no other.",
    "output": "`capture`: the summary of a site's outputs is that of the values computed by hand.",
    "gradient": "`value_and_grad`: the summary of a site's gradients is that of `jax.grad`.",
    "perturb": "`perturb` with `model=` and `Zero()`: the result is that of a zero at the site.",
    "watched": "`watch`: what the step sends while it runs is the summary of the same values.",
    "passive": "hooks that change nothing: the result is the one without hooks.",
    "gone": "after the hooks: the old result, nothing is traced again, the model and its classes "
    "are as they were.",
}

YES, NO = "yes", "no"
UNATTRIBUTED, UNATTRIBUTED_LISTED = "unattributed (warned)", "unattributed (listed)"
UNSEEN = "unseen (warned)"
LISTED = "unseen (listed)"

_THREAD = "hooks hold for the thread that opened them; another thread opens its own"
_EXPORT = "an exported function is a finished program, and its calls cannot be noticed"
_EXPORTS = "an exported function is a finished program, from which no marks can be read"
_COPY = (
    "a clone that was made before is a separate model: pass it as `model=`. `capture` and "
    "`watch` list its calls"
)
_HOOKS = ("fires", "attributed", "instance", "perturb", "watched")

KNOWN: dict[tuple[str, str, str], str] = {
    **{("another thread calls the model", INSIDE, column): _THREAD for column in _HOOKS},
    **{
        ("`jax.export`", BEFORE, column): _EXPORT
        for column in ("fires", "attributed", "instance", "perturb", "output", "gradient")
    },
    **{("`jax.export`", INSIDE, column): _EXPORTS for column in ("output", "gradient")},
    **{
        ("`nnx.clone` of the model", BEFORE, column): _COPY
        for column in ("attributed", "instance", "perturb")
    },
}
"""(construct, moment, column) -> why a call is neither seen nor reported."""


class WrongError(AssertionError):
    """A measurement or a report is wrong, which is worse than missing."""


# ---------------------------------------------------------------- the oracle


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of a construct's network, computed from its parameters without NNX."""

    result: np.ndarray
    zeroed: np.ndarray
    outputs: np.ndarray
    gradients: np.ndarray


@functools.cache
def expected(make: Callable[[], Any], forward: Callable[..., Any]) -> Expected:
    model, seen = make(), []

    def remember(value: Any) -> Any:
        seen.append(value)
        return value

    result = forward(model, X, remember)

    def loss(shifts: list[Any]) -> Any:
        rest = iter(shifts)
        return squares(forward(model, X, lambda value: value + next(rest)))

    gradients = jax.grad(loss)([0.0 * value for value in seen])
    zeroed = forward(model, X, lambda value: 0.0 * value)
    flat = lambda arrays: np.concatenate([np.ravel(a) for a in arrays])  # noqa: E731
    return Expected(np.asarray(result), np.asarray(zeroed), flat(seen), flat(gradients))


def close(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-4, atol=1e-6)


def is_summary_of(summary: Any, values: np.ndarray) -> bool:
    v = values.astype(np.float64)
    found = (summary.mean, summary.std, summary.min, summary.max)
    return summary.size == v.size and close(found, (v.mean(), v.std(), v.min(), v.max()))


# -------------------------------------------------------------- measuring


@dataclasses.dataclass
class Subject:
    """A construct under measurement: its model, and the function if it is made before the hooks."""

    construct: Construct
    moment: str
    model: Any = None
    made: Any = None
    plain: Any = None
    before: Any = None
    steady: int = 0
    compared: int = 0

    def __post_init__(self) -> None:
        self.model = self.construct.model()
        self.made = self.construct.build(self.model)
        self.plain = self.made(self.model, X)
        result = primary(self.plain)
        if not isinstance(result, jax.ShapeDtypeStruct) and not close(result, self.expected.result):
            raise WrongError(f"{self.construct.name} is not what is written out for it")
        with Compilations() as counted:
            self.made(self.model, X)
        self.steady = len(counted.kinds)
        self.before = snapshot(self.model)

    @property
    def expected(self) -> Expected:
        return expected(self.construct.model, self.construct.forward)

    def run(self, model: Any, x: Any) -> Any:
        if self.moment == BEFORE:
            return self.made(model, x)
        return self.construct.build(model)(model, x)


def primary(out: Any) -> Any:
    """The network's own result in the value that a construct returns."""
    return out[0] if isinstance(out, tuple) else out


def snapshot(model: Any) -> Any:
    """The state that must not change: graphdef, attributes, classes and their functions."""
    if not isinstance(model, nnx.Module):
        return None
    modules = [m for _, m in nnx.iter_modules(model)]
    classes = {cls for m in modules for cls in type(m).__mro__ if issubclass(cls, nnx.Module)}
    members = {cls: dict(vars(cls)) for cls in classes}
    code = {
        function: function.__code__
        for names in members.values()
        for function in names.values()
        if isinstance(function, types.FunctionType)
    }
    return nnx.graphdef(model), [set(vars(m)) for m in modules], members, code


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collects the texts of our own warnings; any other warning is an error."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    for warning in caught:
        if not issubclass(warning.category, InspectorWarning):
            raise WrongError(f"a warning that is not ours: {warning.message}")
        texts.append(str(warning.message))


def reported(texts: list[str]) -> str:
    """The cell for a call that was not seen, from the warnings."""
    if any("ahead of time" in text for text in texts):
        return UNSEEN
    return UNATTRIBUTED if texts else NO


def same_result(subject: Subject, out: Any) -> None:
    subject.compared += 1
    if jax.tree.structure(out) != jax.tree.structure(subject.plain):
        raise WrongError("the result has another structure than without hooks")
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(subject.plain), strict=True):
        alike = a.shape == b.shape and a.dtype == b.dtype
        if isinstance(a, jax.ShapeDtypeStruct):
            alike = alike and isinstance(b, jax.ShapeDtypeStruct)
        else:
            alike = alike and np.allclose(a, b, rtol=1e-5, atol=1e-6)
        if not alike:
            raise WrongError("the result is not the one without hooks")


class Sites:
    """An interceptor that records each site, and each method of a type, that is called."""

    def __init__(self) -> None:
        self.sites: set[Any] = set()
        self.methods: set[tuple[str, str]] = set()

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        self.sites.add(context.site)
        self.methods.add((type(context.module).__name__, context.method_name))
        return next_fun(*args, **kwargs)


@functools.cache
def methods_called(make: Callable[[], Any], sites: frozenset[str]) -> tuple[set[Any], set[str]]:
    """Types and methods at the sites of NNX modules (without `model=` paths may be relative to
    something else), and the sites of all others.
    """
    model = make()
    modules = dict(nnx.iter_modules(model)) if isinstance(model, nnx.Module) else {}
    of = {"/".join(map(str, path)): type(m).__name__ for path, m in modules.items()}
    return {(of[site], "__call__") for site in sites if site in of}, {*sites} - {*of}


def fires(subject: Subject) -> str:
    look, construct = Sites(), subject.construct
    with told() as texts:
        with intercept_methods(look):
            out = subject.run(subject.model, X)
    same_result(subject, out)
    methods, others = methods_called(construct.model, construct.sites)
    if methods <= look.methods and others <= look.sites:
        return YES
    if look.methods:
        raise WrongError(f"of {methods | others} only {look.methods | look.sites} are seen")
    return reported(texts)


def attributed(subject: Subject) -> str:
    look, sites = Sites(), subject.construct.sites
    with told() as texts:
        with intercept_methods(look, model=subject.model):
            out = subject.run(subject.model, X)
    same_result(subject, out)
    if not look.sites <= sites:
        raise WrongError(f"calls of {sorted(look.sites - sites)} that are not made")
    if look.sites == sites:
        return YES
    if look.sites:
        raise WrongError(f"only {sorted(look.sites)} of {sorted(sites)}")
    return reported(texts)


def instance(subject: Subject) -> str:
    look, part = Sites(), subject.construct.part(subject.model)
    if part is None:
        return "n/a (no NNX module of its own)"
    with told() as texts:
        with intercept_methods(look, model=part):
            out = subject.run(subject.model, X)
    same_result(subject, out)
    if not look.sites <= {""}:
        raise WrongError(f"calls of {sorted(look.sites)} for one instance")
    return YES if look.sites else reported(texts)


def recorded(subject: Subject, record: Any, texts: list[str], quantity: str) -> str:
    probe = subject.construct.probe
    values = subject.expected.outputs if quantity == "output" else subject.expected.gradients
    if probe in record:
        summary = getattr(record[probe], quantity)
        if summary is None or not is_summary_of(summary, values):
            raise WrongError(f"{quantity} of {probe!r}: {summary}, but it is {values}")
        return YES
    if probe in record.unseen:
        return LISTED
    if any(key.startswith("(") for key in record.unseen):
        return UNATTRIBUTED_LISTED
    return reported(texts)


def works_without_us(construct: Construct, moment: str, transform: Any, what: str) -> str:
    """Empty, or the cell that says that a transform of the construct raises by itself."""
    model = construct.model()  # a failure may leave this model broken
    made = construct.build(model)
    run = lambda m, x: (made if moment == BEFORE else construct.build(m))(m, x)  # noqa: E731
    try:
        transform(run)(model, X)
    except Exception:
        return f"n/a ({what})"
    return ""


def as_program(subject: Subject, f: Callable[..., Any]) -> Any:
    """`f(model, X)` compiled as a whole, which is faster than operation by operation.

    Under nnx.jit the model is a copy, and a closure over the model would call the original.
    """
    if subject.moment not in subject.construct.closes:
        return nnx.jit(f)(subject.model, X)
    if subject.construct.writes:
        return f(subject.model, X)
    return jax.jit(lambda x: f(subject.model, x))(X)


def loss_of(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, x: squares(primary(run(model, x)))


def output(subject: Subject) -> str:
    cannot = works_without_us(subject.construct, subject.moment, nnx.jit, "cannot be traced")
    if cannot:
        return cannot
    with told() as texts:
        captured = capture(subject.run, only=subject.construct.probe, inputs=False)
        out, record = as_program(subject, captured)
    same_result(subject, out)
    return recorded(subject, record, texts, "output")


def gradient(subject: Subject) -> str:
    transform = lambda run: nnx.jit(nnx.grad(loss_of(run)))  # noqa: E731
    what = "cannot be differentiated"
    cannot = works_without_us(subject.construct, subject.moment, transform, what)
    if cannot:
        return cannot
    loss = loss_of(subject.run)
    wanted = nnx.jit(nnx.value_and_grad(loss))(subject.model, X)
    with told() as texts:
        graded = value_and_grad(loss, only=subject.construct.probe, inputs=False)
        (value, record), grads = as_program(subject, graded)
    if not close(value, wanted[0]):
        raise WrongError("the loss is not the one without hooks")
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True):
        if not close(a, b):
            raise WrongError("the gradients are not those without hooks")
    return recorded(subject, record, texts, "gradient")


def perturbed(subject: Subject) -> str:
    with told() as texts:
        named = subject.model if isinstance(subject.model, nnx.Module) else None
        with perturb(subject.construct.probe, Zero(), model=named):
            out = subject.run(subject.model, X)
    if isinstance(primary(out), jax.ShapeDtypeStruct):
        return "n/a (only shapes are computed)"
    if close(primary(out), subject.expected.zeroed):
        return YES
    if not close(primary(out), subject.expected.result):
        raise WrongError(f"perturbed to {primary(out)}, not to {subject.expected.zeroed}")
    return reported(texts)


def watched(subject: Subject) -> str:
    probe = subject.construct.probe
    session = Session(subject.model, only=probe, gradients=False)
    try:
        with told() as texts:
            with session.open():
                out = subject.run(subject.model, X)
        same_result(subject, out)
        arrived = session.take()
        if session.errors:
            raise WrongError(f"errors in callbacks: {session.errors}")
        if "output" in arrived.get(probe, {}):
            if not is_summary_of(arrived[probe]["output"], subject.expected.outputs):
                raise WrongError(f"watched {arrived[probe]['output']}")
            return YES
        if probe in session.unseen:
            return LISTED
        if session.executables:
            return LISTED
        if session.unattributed:
            return UNATTRIBUTED_LISTED
        return reported(texts)
    finally:
        session.close()


def passive(subject: Subject) -> str:
    return YES if subject.compared else NO  # each measure before compared the result


def gone(subject: Subject) -> str:
    for _ in range(2):
        with Compilations() as counted:
            out = subject.made(subject.model, X)
    if len(counted.kinds) > subject.steady:
        raise WrongError(f"{counted.kinds}, and {subject.steady} traces and compilations before")
    same_result(subject, out)
    values = [np.asarray(a).tobytes() for a in (primary(out), primary(subject.plain))]
    if subject.moment == BEFORE and values[0] != values[1]:
        raise WrongError("another result than before the hooks")
    if snapshot(subject.model) != subject.before:
        raise WrongError("the model or a class of its is not as before")
    return YES


MEASURES: dict[str, Callable[[Subject], str]] = {
    "fires": fires,
    "attributed": attributed,
    "instance": instance,
    "output": output,
    "gradient": gradient,
    "perturb": perturbed,
    "watched": watched,
    "passive": passive,
    "gone": gone,
}


def measure(construct: Construct, moment: str) -> dict[str, str]:
    """The cells of one construct whose function is made at one moment."""
    subject = Subject(construct, moment)
    cells: dict[str, str] = {}
    for column, measured in MEASURES.items():
        if column in construct.not_applicable:
            cells[column] = f"n/a ({construct.not_applicable[column]})"
            continue
        try:
            cells[column] = measured(subject)
        except NotImplementedError as error:
            if "host_callbacks" not in str(error):
                raise
            cells[column] = "n/a (jax cannot export a callback)"
        except Exception as error:
            error.add_note(f"{construct.name}, made {moment}, {column}")
            raise
        key = (construct.name, moment, column)
        if cells[column] == NO and key not in KNOWN:
            raise WrongError(f"{construct.name}, made {moment}, {column}: a silent no")
        if cells[column] != NO and key in KNOWN:
            raise WrongError(f"{key} is {cells[column]!r} now: take it out of KNOWN")
    return cells


def footnotes() -> list[str]:
    """The reasons of KNOWN, in order: reason number n is footnote n."""
    return list(dict.fromkeys(KNOWN.values()))


def row(construct: Construct) -> str:
    """The line of a construct in the table: both moments, or one cell if they are equal."""
    by_moment = {moment: measure(construct, moment) for moment in construct.moments}
    shown: list[str] = []
    for column in COLUMNS:
        texts = {moment: cells[column] for moment, cells in by_moment.items()}
        for moment in texts:
            reason = KNOWN.get((construct.name, moment, column))
            if reason is not None:
                texts[moment] += f" [{footnotes().index(reason) + 1}]"
        alike = len(set(texts.values())) == 1
        shown.append(
            next(iter(texts.values()))
            if alike
            else "; ".join(f"{moment}: {text}" for moment, text in texts.items())
        )
    return line(construct.name, *shown)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


HEAD = """# What is seen where

Each way to call a model, and whether the promises of nnx_inspector hold for it.
`python tests/helpers/constructs.py` writes this page: every cell is the outcome of a run, and
the tests compare the page with a run on each supported version of flax. A wrong number, a wrong
path, and a call that is neither seen nor reported fail the tests, so they cannot appear here; the
few cells in which a call cannot be reported are marked, with the reason below.

A function can be made **before** the hooks (jitted, mapped, compiled, and called once) or
**inside** them. If both give the same outcome, the cell has it once.

| column | the promise |
|---|---|
"""

LEGEND = """
| cell | meaning |
|---|---|
| yes | it holds |
| unattributed (warned) | the calls are seen, but a warning says that their module is not known |
| unattributed (listed) | the same, listed in `record.unseen` or `session.unattributed` |
| unseen (warned), unseen (listed) | the calls cannot be seen: a warning or a list says so |
| n/a | the promise has no meaning here, or the construct fails without the hooks, too |
| no | it does not hold, for the numbered reason |
"""


def head() -> str:
    columns = "".join(line(f"**{name}**", text) + "\n" for name, text in COLUMNS.items())
    return HEAD + columns + LEGEND


def page(rows: dict[str, str]) -> str:
    """The whole file, from the lines of the constructs."""
    out = [head()]
    for group in dict.fromkeys(c.group for c in CONSTRUCTS):
        out.append(f"\n## {group}\n\n{line('', *COLUMNS)}\n{line(*['---'] * (len(COLUMNS) + 1))}\n")
        out += [rows[c.name] + "\n" for c in CONSTRUCTS if c.group == group]
    out.append("\n## Why not\n\n")
    out += [f"{n}. {reason[0].upper()}{reason[1:]}.\n" for n, reason in enumerate(footnotes(), 1)]
    return "".join(out)


if __name__ == "__main__":
    FILE.write_text(page({construct.name: row(construct) for construct in CONSTRUCTS}))
