"""`sweep`: the effect of perturbing each site alone, measured by one compiled program.

The pass is traced once, with a mask at each site (`sweep_masks`), and vmapped over which mask is
on, in chunks that fit in memory. Invariant: the model, its RNG streams, statistics and optimizer do
not change, and each row equals a pass of `perturbed` with that site alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import unchecked_jit
from nnx_inspector._compat.sharding import auto_sharded
from nnx_inspector.arrays import is_array, require_examples
from nnx_inspector.errors import add_note, warn
from nnx_inspector.hooks.hook import without_hooks, without_watching
from nnx_inspector.hooks.sites import Only, Selection, require_module
from nnx_inspector.perturbations.activations import Perturbation, Zero
from nnx_inspector.perturbations.effects import (
    Logits,
    kl_divergence,
    logits_of,
    mask_key,
    masks_by_key,
    relative_change_where,
    top1_changed,
    value_and_positions,
)
from nnx_inspector.perturbations.perturbed import takes_positions
from nnx_inspector.perturbations.sweep_masks import (
    NO_MASK,
    RESULT,
    ActiveMasks,
    SweepMasks,
    check_sweep,
    default_kind,
    masks_of,
    sweep_hooks,
)
from nnx_inspector.program.analysis.cost import available_bytes, peak_bytes
from nnx_inspector.program.eager import require_trace
from nnx_inspector.program.editing.position_masks import Where, misfit_of, where_of
from nnx_inspector.program.function import ModuleFunction
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marks import INPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import StagedCall, stage_call
from nnx_inspector.program.survey import Mark
from nnx_inspector.progress import Progress, Report, show_progress
from nnx_inspector.records.donated import require_staged
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import Kwargs, Params, PyTree, Value

if TYPE_CHECKING:
    import pandas as pd

MAX_CHUNK = 32
"""Larger chunks are hardly faster, and a sweep can be stopped only between two chunks."""
CPU_CACHE_BYTES = 8 << 20
"""Bytes of a chunk's values on a CPU. Beyond its caches, passes together are slower than one by one
(50 passes of 6 MB: 5.7 s one by one, 7 to 9 s in chunks of 4 to 32)."""
_NOT_REACHED = "the call does not pass through it with these arguments"
_NO_CHANGE = "the model's output is all zeros or not finite: no change is relative to it"
_COLUMNS = ("site", "unit", "loss", "loss_change", "output_change", "kl", "top1_changed", "why_not")


def sweep(
    model: nnx.Module,
    loss_fn: ModuleFunction,
    /,
    *args: object,
    sites: Only = "**",
    perturbation: Perturbation | None = None,
    layers: bool = True,
    units: int | None = None,
    logits: Logits = None,
    chunk: int | None = None,
    progress: Progress = True,
    where: Value = None,
    **kwargs: Value,
) -> pd.DataFrame:
    """Measure the effect of perturbing each site alone, or each unit or head of a site.

    Each call of `sweep` compiles one program for all sites (jax's compilation cache,
    `jax_compilation_cache_dir`, can keep it). The model does not change. Every pass has the same
    random numbers as the clean pass.

    Args:
        model: the module that site paths are relative to.
        loss_fn: called as `loss_fn(model, *args, **kwargs)`; returns a scalar, or `(scalar, aux)`.
            If aux is a dict, its scalars are measured too.
        args: the arguments after the model, for instance the batch.
        sites: which sites; see `intercept_methods`. `"**:*"` includes methods other than calls.
        perturbation: any kind for values, such as `nni.Mean()` or `nni.Scale(0.0, at="input")`;
            `nni.Zero().only(example=0)` for one example. By default `nni.Zero()`, and `nni.Mean()`
            in a chain, where zeros at any site would give nearly the same loss.
        layers: whether each layer of a stacked site (and each step of an RNN) gets its own row,
            `"blocks[1]"`; False perturbs all of them at once.
        units: an axis, each of whose units is perturbed alone: -1 for features and channels, 0 for
            examples; for the heads of an `nnx.MultiHeadAttention`, -2 with `sites="**/out"` and
            `nni.Zero(at="input")`. None perturbs them together.
        logits: which part of the model's output is logits: True for an output of one array
            `[..., classes]`, a function of the output, or False for none. By default its array, if
            it has only one, of rank 2 or more, over whose last axis the loss takes a maximum.
        chunk: the number of passes at once. By default as many as fit in half of the free memory
            (on a CPU, in its caches), and at most 32. 1 avoids vmap.
        progress: True for a bar with a Stop button in a notebook and a line in a terminal, or a
            function `(done, total)` that returns True to stop. The button needs ipykernel 7 and
            JupyterLab 4.4 or newer; interrupting the kernel always works.
        where: which positions count, in `output_change`, `kl` and `top1_changed`, and in the mean
            of an `nni.Mean()`; see `capture`. The loss is that of `loss_fn`, whatever it counts.
        kwargs: keyword arguments of `loss_fn`.

    Returns:
        A pandas DataFrame with a row for each site, ranked by `|loss_change|` (non-finite first).
        Columns: `site`; with `units`, `unit`; `loss`, and `loss_change` from the clean pass; the
        same two for each scalar of aux; `output_change`, the norm of the change of the model's
        output, relative to that of the clean output (missing if that is all zeros, not finite, or
        not floating-point); for logits `kl`, KL(clean || perturbed) in nats, and `top1_changed`, a
        fraction (both missing without logits); `why_not`, the reason if a site could not be
        measured. `attrs`: "clean", the clean values; "perturbation"; "chunk"; "stopped";
        "unmeasured", the sites left when stopped. If stopped, or interrupted after the first site,
        it returns the rows measured so far.

    Raises:
        TypeError: `model` is not a module, the loss not a scalar, or `perturbation` not a kind for
            values, or one that has no meaning at any of the sites.
        ValueError: a glob in `sites` matches nothing, or only sites that the call does not reach;
            an array of the perturbation fits no site; or the batch has no example.
        InspectorError: `sweep` is called within a traced function, or the call cannot be traced.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> def loss_fn(model, x):
        ...     return (model(x) ** 2).mean()
        >>> frame = nni.sweep(model, loss_fn, jnp.ones((4, 2)), sites="layers/*")
        >>> list(frame["site"])
        ['layers/0']
    """
    require_module(model)
    if not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise TypeError(f"sweep takes a function loss_fn(model, *args), got {kind}.")
    what: Any = dict(model=model, sites=sites, perturbation=perturbation, layers=layers)
    how: Params = dict(units=units, logits=logits, chunk=chunk, progress=progress)
    how["where"], told = where_of(where), list[str]()
    frame = sweep_call(
        ModuleFunction(loss_fn), (model, *args), kwargs, **what, **how, unfit=told.append
    )
    for text in told:
        warn(text)
    return frame


def sweep_call(
    function: ModuleFunction,
    args: tuple[object, ...],
    kwargs: Kwargs,
    *,
    model: nnx.Module,
    sites: Only,
    perturbation: Perturbation | None,
    layers: bool,
    logits: Logits,
    chunk: int | None,
    progress: Progress,
    units: int | None = None,
    of_a_loss: bool = True,
    root: str = "",
    where: Where | None = None,
    unfit: Callable[[str], object] = lambda text: None,
) -> pd.DataFrame:
    """As `sweep`, for any call over a model.

    Args:
        of_a_loss: whether the function returns a loss, or `(loss, aux)`. Otherwise it returns the
            model's output, and the frame has no columns for a loss.
        root: with a loss, the site that returns the model's output; `""` if it is not called.
        unfit: called with a text if `where` fits no value.
    """
    check_sweep(kind := Zero() if perturbation is None else perturbation, chunk)
    selection = Selection(sites)
    selection.require_match(model)
    marking = sweep_hooks(selection, root, inputs=kind.at == INPUT, where=where)
    with show_progress(progress, "sweep") as report, unchecked_jit(), without_watching():
        with (
            require_trace(_untraceable_text),
            stage_call(function, args, kwargs, marking, roots={(): model}) as stage,
        ):
            require_staged(stage)
            require_examples(stage.arrays, "sweep")
            if text := misfit_of(stage.survey.marks):
                unfit(text)
            masks = masks_of(stage, selection.terms, kind, layers=layers, units=units)
            report(0, len(masks.names))
            if perturbation is None and units is None:
                kind = default_kind(stage, masks.first, RESULT)
            one = _SweepPass(stage, masks, kind, logits, of_a_loss, root)
            program = _compile(one, chunk)
        return _frame(program, report, kind.kind_name)


def _untraceable_text(why: str) -> str:
    return (
        f"sweep compiles one program for all sites, and this call cannot be traced: {why}. Perturb "
        f"one site at a time: nni.perturbed(loss_fn)({{site: perturbation}}, ...)."
    )


# ------------------------------------------------------------------ the pass


@dataclasses.dataclass(frozen=True)
class _SweepPass:
    """One pass with one mask on, and its measures."""

    stage: StagedCall
    masks: SweepMasks
    perturbation: Perturbation
    logits: Logits
    of_a_loss: bool
    root: str

    @property
    def data(self) -> tuple[Value, ...]:
        return self.stage.inputs, self.stage.survey.consts, jax.tree.leaves(self.perturbation)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scalars: the loss, and those of aux."""
        return tuple(self._scalars([v.aval for v in self.stage.survey.jaxpr.outvars]))

    def _scalars(self, out: list[Value]) -> Params:
        return _scalars(self.stage.finish(out, update=False)) if self.of_a_loss else {}

    def run(self, is_on: ActiveMasks, data: tuple[Any, ...]) -> tuple[Value, Value, Value]:
        """The scalars of `names`, the result, and whether the call passed the mask that is on."""
        inputs, consts, leaves = data
        one = jax.tree.unflatten(jax.tree.structure(self.perturbation), leaves)
        survey = dataclasses.replace(self.stage.survey, consts=tuple(consts))
        perturb = self.masks.perturb(self.stage, one, is_on)
        keep = Keep(values=value_and_positions, parts=(RESULT,), counts=True)
        positions = takes_positions(one)
        plan = Plan(summarise=False, perturb=perturb, positions=positions, keep=keep)
        out, seen = evaluate(survey, inputs, plan=plan)
        scalars = [jnp.asarray(x) for x in self._scalars(out).values()]
        sites = {mark.site for mark in self._results}
        results = [
            [kept.value for kept in one.kept]
            for mark, _, one in survey.walk(seen)
            if one is not None and mark.part == RESULT and mark.site in sites
        ]
        if not self.of_a_loss:
            wheres = masks_by_key(pair for each in results for pair in each)
            own = [x for x in out[: self.stage.outputs] if is_number(x.dtype)]
            results = [[(x, wheres.get(mask_key(x))) for x in own]]
        return scalars, results, self.masks.reached(survey, seen, is_on)

    @property
    def _results(self) -> list[Mark]:
        """The marks on what the model returns."""
        found = [mark for mark in self.stage.survey.marks if mark.part == RESULT]
        return [mark for mark in found if mark.site == self.root] or found

    def _output(self, values: list[Value]) -> Value:
        """What the model returns, with `values` in place of its arrays."""
        if self.of_a_loss:
            return self._results[0].structure.unflatten(values)
        returned, rest = self.stage.returned, iter(values)
        avals = [v.aval for v in self.stage.survey.jaxpr.outvars[: self.stage.outputs]]
        arrays = [next(rest) if is_number(aval.dtype) else None for aval in avals]
        return returned.rebuild([None] * len(returned.nodes), arrays)

    def changes(self, clean: PyTree, results: Value) -> Params:
        """The change of the model's output from its output in the clean pass."""
        both = zip(itertools.chain(*clean), itertools.chain(*results), strict=True)
        pairs = [(x, y, where) for (x, where), (y, _) in both]
        found = {"output_change": relative_change_where(pairs)}
        if len(results) == 1 and (not self.of_a_loss or len(self._results) == 1):
            how = self.logits, self.stage.survey.jaxpr
            outputs = [self._output([x for x, *_ in one[0]]) for one in (clean, results)]
            pair = [logits_of(output, *how) for output in outputs]
            if pair[0] is not None:
                where = masks_by_key(pairs).get(mask_key(pair[0]))
                found["kl"] = kl_divergence(*pair, where=where)
                found["top1_changed"] = top1_changed(*pair, where=where)
        return found

    def program(self, is_on: ActiveMasks, is_first: Value, clean: object, data: PyTree) -> Value:
        """One chunk: a pass for each row of `is_on`.

        The first pass of the first chunk is the clean one; its results are passed to the other
        chunks.
        """
        if len(next(iter(is_on.values()))) == 1:  # some primitives have no batching rule
            made = self.run({site: mask[0] for site, mask in is_on.items()}, data)
            made = jax.tree.map(lambda x: jnp.asarray(x)[None], made)
        else:
            made = jax.vmap(self.run, in_axes=(0, None))(is_on, data)
        scalars, results, reached = made
        size = len(reached)

        def compared(clean: object, results: object, is_first: Value) -> tuple[Value, Value]:
            clean = jax.tree.map(lambda new, old: jnp.where(is_first, new[0], old), results, clean)
            changes = jax.vmap(self.changes, in_axes=(None, 0), axis_size=size)(clean, results)
            return clean, changes

        clean, changes = auto_sharded(compared, clean, results, is_first)
        return scalars, changes, reached, clean


def _scalars(value: object) -> Params:
    loss, aux = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not _is_scalar(loss):
        got: Any = loss
        what = f"{got.dtype}{list(got.shape)}" if is_array(got) else type(got).__name__
        raise TypeError(
            f"The loss function must return a real scalar, or (scalar, aux); it returned {what}."
        )
    out = {"loss": loss}
    for name, x in aux.items() if isinstance(aux, Mapping) else ():
        if _is_scalar(x):
            out[f"aux_{name}" if str(name) in _COLUMNS else str(name)] = x
    return out


def _is_scalar(x: Value) -> bool:
    if not is_array(x):
        return isinstance(x, (bool, int, float))
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return x.shape == () and any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


# ------------------------------------------------------------- in chunks


@dataclasses.dataclass(frozen=True)
class _SweepProgram:
    """A compiled program of `chunk` passes."""

    compiled: Any
    masks: SweepMasks
    names: tuple[str, ...]
    chunk: int
    clean: Value
    data: Value

    def chunks(self) -> Iterator[list[dict[str, float]]]:
        """The measures of the clean pass, then of each mask."""
        numbers = np.arange(NO_MASK, len(self.masks.names))
        clean, is_first = self.clean, True
        where = self.compiled.input_shardings[0][2]
        for start in range(0, len(numbers), self.chunk):
            part = numbers[start : start + self.chunk]
            filled = np.pad(part, (0, self.chunk - len(part)), constant_values=NO_MASK)
            is_on = self.masks.one_hot(filled)
            clean = jax.tree.map(jax.device_put, clean, where)
            with without_hooks(lambda hook: True):  # the program contains their hooks
                *found, clean = self.compiled(is_on, np.bool_(is_first), clean, self.data)
            scalars, changes, reached = jax.device_get(found)
            is_first = False
            yield [
                {name: float(x[i]) for name, x in zip(self.names, scalars, strict=True)}
                | {name: float(x[i]) for name, x in changes.items()}
                | {"reached": bool(reached[i])}
                for i in range(len(part))
            ]


def _compile(one: _SweepPass, chunk: int | None) -> _SweepProgram:
    """The program, with as many passes at once as were asked for or fit in memory."""
    data, count = one.data, len(one.masks.names) + 1
    alone = {site: mask[0] for site, mask in one.masks.one_hot(np.array([NO_MASK])).items()}
    jaxpr, (_, results, _) = jax.make_jaxpr(one.run, return_shape=True)(alone, data)
    check = functools.partial(auto_sharded, one.changes)
    jax.eval_shape(check, results, results)  # raises for bad logits, before compiling
    clean = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    arrays = [x for x in jax.tree.leaves(data) if isinstance(x, jax.Array)]
    device = next(iter(arrays[0].devices())) if arrays else jax.devices()[0]
    budget, asked = available_bytes(device) // 2, chunk
    if chunk is None:
        most = min(budget, CPU_CACHE_BYTES) if device.platform == "cpu" else budget
        chunk = _even_size(count, min(MAX_CHUNK, most // max(1, peak_bytes(jaxpr))))
    chunk = min(chunk, count)
    while True:
        is_on = one.masks.one_hot(np.full(chunk, NO_MASK))
        try:
            lowered = jax.jit(one.program).lower(is_on, np.bool_(True), clean, data)
        except Exception as error:
            if chunk > 1:
                why = "sweep vmaps the call over its sites"
                add_note(error, f"{why}. If the vmap fails, pass chunk=1, which avoids it.")
            raise
        compiled = lowered.compile()
        needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
        if asked is not None or chunk == 1 or needed <= budget:
            return _SweepProgram(compiled, one.masks, one.names, chunk, clean, data)
        chunk = _even_size(count, chunk * budget // needed)  # the estimate was too low


def _even_size(count: int, most: int) -> int:
    """The size that splits `count` passes into the fewest even chunks of at most `most`."""
    chunks = -(-count // max(1, most))
    return -(-count // chunks)


# ------------------------------------------------------------------- the frame


def _frame(program: _SweepProgram, report: Report, kind: str) -> pd.DataFrame:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    masks = program.masks
    (clean, *each), stopped = _measure(program, report)
    rows: list[Params] = []
    keys = {"site": masks.names, **({"unit": masks.units} if masks.units else {})}
    of_output = [clean[name] for name in ("output_change", "kl") if name in clean]
    undefined = "" if program.names or not np.isnan(of_output).all() else _NO_CHANGE
    for number, figures in enumerate(each):
        at = {key: of[number] for key, of in keys.items()}
        why = undefined if figures.pop("reached") else _NOT_REACHED
        change = {f"{n}_change": figures[n] - clean[n] for n in program.names}
        rows.append({**at, "why_not": why} if why else {**at, **figures, **change})
    rows += [{"site": site, "why_not": why} for site, why in masks.refused.items()]
    figures = [c for name in program.names for c in (name, f"{name}_change")]
    figures += ["output_change", "kl", "top1_changed"]
    types: Any = dict.fromkeys(figures, "float64") | ({"unit": "Int64"} if masks.units else {})
    columns = [*keys, *figures, "why_not"]
    frame: Any = pd.DataFrame(sorted(rows, key=_sort_key), columns=columns).astype(types)
    frame.attrs = {
        "clean": {name: clean[name] for name in program.names},
        "perturbation": kind,
        "chunk": program.chunk,
        "stopped": stopped,
        "unmeasured": list(dict.fromkeys(masks.names[len(each) :])),
    }
    return frame


def _measure(program: _SweepProgram, report: Report) -> tuple[list[dict[str, float]], bool]:
    """The measures, the clean pass first, and whether the sweep was stopped before the end."""
    measured: list[dict[str, float]] = []
    total = len(program.masks.names)
    try:
        for part in program.chunks():
            measured += part
            if report(len(measured) - 1, total) and len(measured) <= total:
                return measured, True
    except KeyboardInterrupt:
        if len(measured) < 2:
            raise
        return measured, True
    return measured, False


def _sort_key(row: Mapping[str, Value]) -> tuple[float, ...]:
    """Sort key: non-finite changes first, then the largest of the loss; unmeasured sites last."""
    if "why_not" in row:
        return (1.0,)
    sizes = (abs(row.get("loss_change", 0.0)), row["output_change"])
    return (0.0, *(-math.inf if math.isnan(size) else -size for size in sizes))
