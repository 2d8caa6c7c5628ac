"""Names for the types of jax and flax in signatures, as `numpy.typing` and `jax.typing` have them.

The names mean something to a type checker and to a reader only. When the code runs each of them is
`Any`, so that a file which uses one imports neither jax nor flax.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    import jax
    import jax.core
    import numpy as np
    from flax import nnx
    from jax.extend import core
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Float, Int, Num, UInt32

    class Atom(Protocol):
        """A variable or a literal of a program. Only a literal has a value; see `is_literal`."""

        @property
        def aval(self) -> Aval: ...

        @property
        def val(self) -> Any: ...

    class Equation(Protocol):
        """What jax's `JaxprEqn` and `eager.EagerEquation` have."""

        @property
        def primitive(self) -> Primitive: ...

        @property
        def params(self) -> Params: ...

        @property
        def invars(self) -> Sequence[Atom]: ...

        @property
        def outvars(self) -> Sequence[Atom]: ...

        @property
        def effects(self) -> Any: ...

        @property
        def ctx(self) -> Any: ...

        @property
        def source_info(self) -> Any: ...

        def replace(self, **changed: Any) -> Equation: ...

    class OpenJaxpr(Protocol):
        """A program without its constants: what `open_jaxpr` gives."""

        @property
        def eqns(self) -> Sequence[Equation]: ...

        @property
        def invars(self) -> Sequence[Atom]: ...

        @property
        def constvars(self) -> Sequence[Atom]: ...

        @property
        def outvars(self) -> Sequence[Atom]: ...

        @property
        def effects(self) -> Any: ...

        @property
        def debug_info(self) -> Any: ...

        def replace(self, **changed: Any) -> OpenJaxpr: ...

    # jax 0.12 merged ClosedJaxpr into Jaxpr; `open_jaxpr` takes both.
    Jaxpr: TypeAlias = OpenJaxpr | core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
    Var: TypeAlias = Atom
    Primitive: TypeAlias = core.Primitive
    Aval: TypeAlias = jax.core.ShapedArray

    # With the axes of an array, as jaxtyping writes them: Float[Array, "batch units"].
    Array: TypeAlias = jax.Array
    AnyArray: TypeAlias = jax.Array | np.ndarray
    GraphDef: TypeAlias = nnx.GraphDef[Any]
    Variable: TypeAlias = nnx.Variable[Any]
else:
    Jaxpr = OpenJaxpr = Equation = Var = Atom = Primitive = Aval = Any
    Array = AnyArray = DTypeLike = GraphDef = Variable = Any
    Bool = Float = Int = Num = UInt32 = Any

PyTree: TypeAlias = Any
"""Nested containers with arrays or other values in them. Python's types cannot say this."""

Treedef: TypeAlias = Any
"""The structure of a pytree."""

Value: TypeAlias = Any
"""What a program computes with: an array, a tracer, an array of PRNG keys, a reference or a token.
jax has no common class of them."""
Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, or of a primitive that is bound."""
Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a user's call."""
Kwargs: TypeAlias = dict[str, Any]
"""The arguments by name of a user's call."""
Function: TypeAlias = Callable[..., PyTree]
"""A function of arrays, or of pytrees of arrays, such as one of the user's."""
Owner: TypeAlias = Hashable
"""Whose marks they are: a program may hold marks of several."""
