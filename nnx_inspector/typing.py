"""Names for the types of jax and flax in signatures, as `numpy.typing` and `jax.typing` have them.

The names mean something to a type checker and to a reader only. When the code runs each of them is
`Any`, so that a file which uses one imports neither jax nor flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import jax.core
    import numpy as np
    from flax import nnx
    from jax.extend import core
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Float, Int, Num, UInt32

    # The classes of a program. jax 0.12 merged ClosedJaxpr into Jaxpr; `open_jaxpr` takes both.
    Jaxpr: TypeAlias = core.Jaxpr | core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
    Equation: TypeAlias = core.JaxprEqn
    Var: TypeAlias = core.Var
    Atom: TypeAlias = core.Var | core.Literal
    Primitive: TypeAlias = core.Primitive
    Aval: TypeAlias = jax.core.ShapedArray

    # With the axes of an array, as jaxtyping writes them: Float[Array, "batch units"].
    Array: TypeAlias = jax.Array
    AnyArray: TypeAlias = jax.Array | np.ndarray
    GraphDef: TypeAlias = nnx.GraphDef[Any]
else:
    Jaxpr = Equation = Var = Atom = Primitive = Aval = Any
    Array = AnyArray = DTypeLike = GraphDef = Any
    Bool = Float = Int = Num = UInt32 = Any

PyTree: TypeAlias = Any
"""Nested containers with arrays or other values in them. Python's types cannot say this."""

Value: TypeAlias = Any
"""What a program computes with: an array, a tracer, an array of PRNG keys, a reference or a token.
jax has no common class of them."""
Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, or of a primitive that is bound."""
Kwargs: TypeAlias = dict[str, Any]
"""The arguments by name of a user's call."""
