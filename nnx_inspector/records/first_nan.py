"""`first_nan`: the operation of a call, or of its backward pass, that makes the first NaN.

The call is traced again; see `nan_search` for the search. Invariant: the model
does not change, and a step costs nothing unless a search is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import unchecked_jit
from nnx_inspector.arrays import is_array
from nnx_inspector.errors import InspectorError, warn
from nnx_inspector.hooks.sites import Selection, site_key
from nnx_inspector.program.analysis.operation import Operation
from nnx_inspector.program.function import ModuleFunction, module_function
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.stage import StagedCall, stage_call
from nnx_inspector.records import nan_search as search
from nnx_inspector.records.backward import differentiated_argument, require_scalar
from nnx_inspector.records.donated import require_staged
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import PyTree, Value


def first_nan(f: object, *args: object, gradients: bool = False) -> Callable[..., Operation | None]:
    """Wrap `f` so that it returns the operation that makes the first NaN instead of its result.

    The search goes back from the outputs of the modules (then from the result) along values that
    have a NaN, so a NaN that a `where` leaves out is not counted. It enters jitted functions,
    remat, scans and while loops, and names the iteration. If the NaN comes from an infinity, the
    operation that made the infinity is named too. It runs the call about twice, in programs of its
    own, and changes nothing; callbacks of the call run again. Padding counts too, as a NaN spreads.

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.
        gradients: whether `f` is a loss function (it returns a scalar, or a scalar and more). The
            gradients with respect to each `nnx.Param` of its first argument are then searched too,
            after the forward pass.

    Returns:
        A function that returns an `Operation`, or None if there is no NaN. If the parameters or
        arguments have a NaN already, no operation makes it: the function warns and names them.

    Raises:
        TypeError: `f` is not a module and none of its arguments holds one, its result is not a
            loss, or its arguments were passed here instead of to the returned function.
        InspectorError: the call cannot be traced, or it holds references.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(jnp.log, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> found = nni.first_nan(model)(-jnp.ones((4, 2)))
        >>> found.name, found.operands[0].negative > 0
        ('log', True)
    """
    function = module_function(f, "first_nan")
    if args:
        raise TypeError(
            "first_nan(f) returns a function: pass it the arguments, as in first_nan(f)(model, x)."
        )

    def searched(*args: object, **kwargs: object) -> Operation | None:
        hooks = marking_hooks(Selection(None), inputs=True)
        with unchecked_jit(), stage_call(function, args, kwargs, hooks) as stage:
            if any(map(jit.is_tracer, stage.inputs)):
                raise InspectorError(
                    "first_nan reads the values of arrays: call it outside jit, grad and vmap, "
                    "with the arguments of the call that gave a NaN."
                )
            found = first_nan_of_stage(stage, function, args, gradients=gradients)
            if found is None:
                _warn_of_nan_before(stage)
            return found

    return searched


def _warn_of_nan_before(stage: StagedCall) -> None:
    """Warn if a parameter or an argument has a NaN before the call."""
    held: dict[str, PyTree] = {}
    for prefix, module in stage.roots.items():
        flat: PyTree = nnx.to_flat_state(nnx.state(module, graph=True))
        held |= {repr(site_key((*prefix, *path))): leaf for path, leaf in flat}
    held |= {f"argument {i + 1}": x for i, x in enumerate(stage.arrays)}
    for name, one in held.items():
        for x in jax.tree.leaves(one):
            if is_array(x) and _is_inexact(x) and jnp.isnan(x).any():
                text = type_text(x.dtype, x.shape)
                warn(
                    f"first_nan found no operation that makes a NaN: {name}, {text}, has one "
                    "before the call. Look for it in the step before, or in the data."
                )
                return


def first_nan_of_stage(
    stage: StagedCall, function: ModuleFunction, args: Sequence[object], *, gradients: bool
) -> Operation | None:
    require_staged(stage)
    jaxpr, consts = stage.survey.jaxpr, stage.survey.consts
    if stage.eager or "ref" in jaxprs.state_writes(jaxpr):
        raise InspectorError(
            "The call cannot be searched for the operation that makes a NaN: "
            + (stage.eager or "it writes to references")
            + ". Run it under jax.debug_nans(True), which stops there."
        )
    found = search.first_nan(jaxpr, consts, stage.inputs)
    if found is not None or not gradients:
        return found
    numbers = differentiated_argument(stage, function, args, 0, nnx.Param).inputs
    floats = {i: stage.inputs[i] for i in numbers if _is_inexact(stage.inputs[i])}

    def loss(chosen: dict[int, Value], inputs: list[Value]) -> PyTree:
        full = [chosen.get(i, x) for i, x in enumerate(inputs)]
        out, _ = stage.evaluate(full, plan=Plan(summarise=False))
        require_scalar(stage, out)
        return out[0]

    arguments = (floats, stage.inputs)
    inner, closed = jaxprs.open_jaxpr(jax.make_jaxpr(jax.grad(loss))(*arguments))
    return search.first_nan(inner, closed, jax.tree.leaves(arguments))


def _is_inexact(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
