"""`propagation`: the deviation of activations and gradients by depth at initialisation.

Invariant: each figure is that of one model in one pass, as `nni.value_and_grad` measures it, and
what has no gradient is NaN. Changes no model; draws nothing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.arrays import is_array
from nnx_inspector.hooks.sites import Only, require_module, site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.program.editing.position_masks import Where, where_of
from nnx_inspector.program.function import is_input
from nnx_inspector.recordings.tree_rows import site_of_parameter
from nnx_inspector.records.capture import value_and_grad
from nnx_inspector.records.propagation.result import Propagation
from nnx_inspector.records.record import Entry, Record
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import GraphDef, PyTree, Treedef, Value

Loss = Callable[..., jax.Array]


def propagation(
    make_model: Callable[..., nnx.Module],
    *args: object,
    widths: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    loss: Loss | None = None,
    only: Only = None,
    train: Callable[[nnx.Module], Callable[..., object]] | None = None,
    steps: int = 0,
    where: object = None,
) -> Propagation:
    """Measure how activations and gradients change with depth in models that were just made.

    At initialisation a signal should neither die out nor blow up on its way through the layers,
    forward or backward. What is healthy:

    - By depth: all layers within a factor of 10 of the first (Glorot and Bengio 2010, figures 6 and
      7). He et al. 2015 keep the deviation of a network of ReLUs constant with weights of variance
      2 / fan-in. By Schoenholz et al. 2017, networks whose signal changes by more than a factor of
      about 20 (six depth scales, e**3) are too deep to train.
    - By width, the coordinate check: under muP (Yang and Hu 2021) activations keep their size while
      a model trains, however wide it is, so their curves are flat. In the standard parametrisation
      they grow with the width after a few steps.

    Args:
        make_model: makes a model: `make_model(rngs=nnx.Rngs(seed))`, with `widths`
            `make_model(width=width, rngs=nnx.Rngs(seed))`. A class of modules will do. A function
            without a parameter `rngs` makes one model of each width.
        *args: what the model is called with, for example a batch.
        widths: the widths to compare, at least two of them for slopes.
        seeds: how many models are made of each width, or the seeds themselves.
        loss: `loss(model, *args)`, a scalar. By default the sum of the outputs, each times a
            standard normal number: so the gradient of the output has a deviation of 1.
        only: the sites to measure, see `nni.capture`; by default those whose modules hold
            parameters themselves.
        train: `train(model)` returns a function that trains the model by one step when it is called
            with `*args`. It is called `steps` times for each model.
        steps: after how many of its steps models are measured again.
        where: which positions count; see `nni.capture`. The loss is that of `loss`, which by
            default has all positions.

    Returns:
        A `Propagation`: `frame()`, `growth()`, `slopes()` and `figure()`.

    Raises:
        TypeError: `make_model` cannot be called so, or makes no module; the loss is not a scalar.
        ValueError: `steps` is given without `train`, no width or no seed is given, or the models
            have different sites.

    Example:
        >>> from flax import nnx
        >>> class Deep(nnx.Module):
        ...     def __init__(self, *, rngs):
        ...         init = nnx.initializers.he_normal()
        ...         self.layers = nnx.List(
        ...             [nnx.Linear(64, 64, kernel_init=init, rngs=rngs) for _ in range(8)]
        ...         )
        ...     def __call__(self, x):
        ...         for layer in self.layers:
        ...             x = nnx.relu(layer(x))
        ...         return x
        >>> found = propagation(Deep, jax.random.normal(jax.random.key(0), (32, 64)))
        >>> found.growth()[["forward", "backward"]].values.tolist()
        [['steady', 'steady']]
    """
    every = range(seeds) if isinstance(seeds, int) else tuple(seeds)
    sizes: tuple[int | None, ...] = (None,) if widths is None else tuple(widths)
    if not every or not sizes:
        raise ValueError(f"propagation needs a seed and a width, got {seeds=} and {widths=}.")
    if steps < 0 or (steps > 0) != (train is not None):
        raise ValueError(
            f"steps={steps} needs train=, a function of a model that returns what trains it by one "
            f"step, and train= needs steps=, 1 or more."
        )
    made, has_seeds = _model_maker(make_model, sizes[0])
    every = every if has_seeds else every[:1]
    measure = functools.partial(_measure_model, loss or _random_projection, only, where_of(where))
    found: dict[str, list[tuple[float, float]]] = {}
    for width in sizes:
        for seed in every:
            model = made(width, seed)
            step = None if train is None else train(model)
            for number in range(steps + 1):
                if number and step is not None:
                    step(*args)
                _add_deviations(found, measure(model, args), first=not found, width=width)
    shape = (len(found), len(sizes), len(every), steps + 1)
    figures = np.array([*found.values()], np.float64).reshape(*shape, 2)
    forward, backward = (np.moveaxis(figures[..., i], 0, -1) for i in (0, 1))
    return Propagation(
        sites=tuple(found),
        widths=sizes,
        seeds=tuple(every),
        steps=tuple(range(steps + 1)),
        forward=forward,
        backward=backward,
    )


def _model_maker(
    make_model: Callable[..., nnx.Module], first: int | None
) -> tuple[Callable[[int | None, int], nnx.Module], bool]:
    """A function of width and seed that makes a model, and whether models of two seeds differ."""
    signature = inspect.signature(make_model)

    def call_of(width: int | None, rngs: object, *, named: bool) -> inspect.BoundArguments | None:
        """The arguments, if it takes a width, by this name or the first, and `rngs` unless None."""
        given: dict[str, object] = {} if rngs is None else {"rngs": rngs}
        args = () if named or width is None else (width,)
        given |= {"width": width} if named and width is not None else {}
        try:
            found = signature.bind(*args, **given)
        except TypeError:
            return None
        return None if rngs is None and "rngs" in found.arguments else found

    def make(width: int | None, seed: int, *, has_seeds: bool, named: bool) -> nnx.Module:
        found = call_of(width, nnx.Rngs(seed) if has_seeds else None, named=named)
        assert found is not None
        model = make_model(*found.args, **found.kwargs)
        require_module(model)
        return model

    for has_seeds, named in itertools.product((True, False), (True, False)):
        if call_of(first, True if has_seeds else None, named=named):
            return functools.partial(make, has_seeds=has_seeds, named=named), has_seeds
    said = "rngs=nnx.Rngs(0)" if first is None else f"width={first}, rngs=nnx.Rngs(0)"
    raise TypeError(
        f"make_model is called as make_model({said}), or without rngs, but its parameters are "
        f"{signature}."
    )


def _add_deviations(
    found: dict[str, list[tuple[float, float]]],
    new: dict[str, tuple[float, float]],
    *,
    first: bool,
    width: int | None,
) -> None:
    if not first and found.keys() != new.keys():
        other = sorted(found.keys() ^ new.keys())[0]
        raise ValueError(
            f"The models have different sites (width {width}: {other!r}), so depths cannot be "
            f"compared. Let make_model change the width alone, or choose sites with only=."
        )
    for site, figures in new.items():
        found.setdefault(site, []).append(figures)


def _random_projection(model: Callable[..., PyTree], *args: object) -> jax.Array:
    leaves = [
        x
        for x in jax.tree.leaves(model(*args))
        if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    sums = (
        (x * jax.random.normal(key, x.shape, x.dtype)).sum()
        for key, x in zip(keys, leaves, strict=False)
    )
    return sum(sums, jnp.zeros(()))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _record(
    loss: Loss,
    only: Only,
    where: Where | None,
    graphdef: GraphDef,
    treedef: Treedef,
    others: tuple[tuple[type, object] | None, ...],
    state: PyTree,
    arrays: Sequence[Value],
) -> Record:
    model, given = nnx.merge(graphdef, state), iter(arrays)
    leaves = [next(given) if other is None else other[1] for other in others]
    args = jax.tree.unflatten(treedef, leaves)
    (_, record), _ = value_and_grad(loss, only=only, inputs=False, where=where)(model, *args)
    return record


def _measure_model(
    loss: Loss, only: Only, where: Where | None, model: nnx.Module, args: PyTree
) -> dict[str, tuple[float, float]]:
    """Site -> the deviation of what it returns, and of the gradient of that."""
    graphdef, state = nnx.split(model, graph=True)
    leaves, treedef = jax.tree.flatten(args)
    arrays = [x for x in leaves if is_input(x)]
    # with their types: True, 1 and 1.0 are equal, so jit would take one program for all of them
    others = tuple(None if is_input(x) else (type(x), x) for x in leaves)
    found = _record(loss, only, where, graphdef, treedef, others, state, arrays)
    record = jax.device_get(found)
    paths = [site_key(path) for path, v, _ in contents(model) if isinstance(v, nnx.Param)]
    holders = {site_of_parameter(path, record) for path in paths} if only is None else set(record)
    return {
        entry.key: (_deviation(entry.output), _deviation(entry.gradient))
        for site in record
        if site in holders
        for entry in _layers(record[site])
    }


def _layers(entry: Entry) -> Iterator[Entry]:
    """The layers of a stacked site, or the site itself."""
    yield from map(entry.row, range(entry.rows)) if entry.rows else (entry,)


def _deviation(found: object) -> float:
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Summary))
    return float(leaves[0].merged().std) if leaves else float("nan")
