"""Calls of jitted functions and of executables, heard and changed where jax makes them.

There is one place where jax is bent for this, however many listen: what is opened first and closed
last may be anyone. Invariant: a call that nobody chooses for runs as it would have run, in the same
caches. A call that jax makes in its fast path is not seen here at all: whoever wants to see a
program each time needs a key of its own in jit's caches (`configuration.hooks_key`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol

import jax
import jax.stages
import numpy as np
from flax.nnx import graphlib
from flax.nnx.transforms import compilation
from jax._src import config, core, dispatch, pjit
from jax._src.interpreters import mlir
from jax._src.sharding_impls import GSPMDSharding

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.jit import abstract
from nnx_inspector._compat.redirect import AddUndo, SharedPatch, copy_of, patch, redirect
from nnx_inspector.typing import Array, Function, Jaxpr, Kwargs, Params, PyTree, Value


@dataclasses.dataclass(frozen=True, eq=False)
class _ExecutableListener:
    """Who hears of executables, which were compiled ahead of time."""

    made: Callable[[Value], None]
    called: Callable[[Value], None]


def _patch_executables(add_undo: AddUndo) -> None:
    # `Compiled` runs its program without a trace and without jit's caches: nothing else is called
    # there that knows which program it is. A model may hold the bound method, so the functions are
    # redirected. Without this, a loop that calls such an executable would look idle. It can go when
    # jax tells listeners what it launches.
    cls = jax.stages.Compiled
    for method, name in ((cls.__init__, "made"), (cls.__call__, "called")):
        original = copy_of(method)

        def target(
            self: object, *args: object, _original: Any = original, _name: str = name, **kw: object
        ) -> Value:
            for one in _executables_patch.holders:
                getattr(one, _name)(self)
            return _original(self, *args, **kw)

        redirect(method, target, original, add_undo)


_executables_patch = SharedPatch(_patch_executables)


def patch_executables(
    made: Callable[[Value], None], called: Callable[[Value], None], add_undo: AddUndo
) -> None:
    """Call `made` and `called` when an ahead-of-time compiled executable is made or called;
    `add_undo` gets what undoes that.
    """
    one = _ExecutableListener(made, called)
    add_undo(functools.partial(_executables_patch.release, one))
    _executables_patch.acquire(one)


def executable_name(executable: Any) -> str:
    """The name of the function that an ahead-of-time compiled executable was compiled from."""
    name = executable._executable.unsafe_call.name  # "jit(step)"
    return name.removeprefix("jit(").removesuffix(")")


Change = Callable[[Any], tuple[Any, Sequence[Value], int] | None]


@dataclasses.dataclass(frozen=True)
class JitCall:
    """A call of a jitted function without its arrays, which suffices to compile it again."""

    function: Function
    options: Any
    args: tuple[Value, ...]
    kwargs: Kwargs
    nnx: Any

    def compiles_alike(self, other: JitCall) -> bool:
        """Whether another call would be compiled to the same program."""
        return self.function is other.function and _equal_trees(
            (self.args, self.kwargs), (other.args, other.kwargs)
        )

    def jitted(self) -> Function:
        """The jitted function, which shares its programs with the one that was called."""
        # `jax.jit(function)` would make a function with a cache of its own, and what is compiled
        # ahead there would be compiled again by the user's call.
        return pjit._cpp_pjit(self.function, self.options)

    def compile(self, change: Change = lambda _: None) -> None:
        """Trace and compile it in this thread's contexts; jax caches the program.

        Args:
            change: returns, for the program, the one to be compiled instead, values for its
                additional inputs, and the number of its additional outputs; or None.
        """
        jitted = types.SimpleNamespace(_fun=self.function, _jit_info=self.options)
        with contextlib.ExitStack() as stack:
            if self.nnx is not None:
                stack.enter_context(graphlib.update_context(self.nnx))
            traced: Any = pjit.jit_trace(jitted, *self.args, **self.kwargs)
            changed = change(traced.jaxpr)
            if changed is None:
                traced.lower().compile()
                return
            program, inputs, outputs = changed
            every = [*map(pjit.convert_to_metaty, inputs), *traced._meta_tys_flat]
            _compile(every, _params_for(traced._params, program, len(inputs), outputs))


_GPU_OPTIONS: Final = {"xla_gpu_graph_min_graph_size": 2**30}
"""Kernels are started one by one. XLA would record them in a CUDA graph, and renew its nodes before
each run, because the arrays have moved: 16 microseconds for a kernel, where a start takes 3 and
most kernels of a summary run for 5."""


def _params_for(params: Params, program: object, inputs: int, outputs: int) -> Params:
    """The parameters of a jit for another program, with more inputs and outputs."""
    options = dict(params["compiler_options_kvs"])
    if jax.default_backend() == "gpu":
        options = {**_GPU_OPTIONS, **options}
    changed = eqn_params.jit_with(params, program, inputs, outputs=outputs)
    return {**changed, "compiler_options_kvs": tuple(options.items())}


def _compile(types: Sequence[object], params: Params) -> None:
    """Lower and compile what a jit with these parameters runs; jax caches it."""
    how: Params = {"lowering_platforms": None, "pgle_profiler": None}
    lowering = mlir.LoweringParameters()
    # The one function through which a jit gets its executable; its cache is the one that the call
    # looks in. `jax.jit(...).lower(...).compile()` has another cache: the user's call would compile
    # the same program again. It can go when a program compiled ahead is found by later calls.
    pjit._resolve_and_lower(types, **params, **how, lowering_parameters=lowering).compile()


def _with_replicated_outputs(params: Params, whole: object, outputs: int) -> Params:
    """The parameters of a jit whose additional outputs have this sharding, if it is one."""
    if whole is None or not outputs:
        return params
    own = params["out_shardings"][: len(params["out_shardings"]) - outputs]
    return {**params, "out_shardings": (*own, *(whole,) * outputs)}


def _replicated_sharding(params: Params, arrays: Sequence[object]) -> Value:
    """The sharding with a whole copy on each device of a jit that runs on several, or None.

    jax leaves it to XLA where a result goes that has no sharding: it may then be in pieces that no
    process can read as a whole. A jit runs where the first of these says that it does.
    """
    if jax.device_count() == 1:
        return None
    committed = (x.sharding for x in arrays if isinstance(x, jax.Array) and x.committed)
    for one in itertools.chain(params["in_shardings"], committed, params["out_shardings"]):
        whole = _replicated(one)
        if whole is not None:
            return whole
    mesh = params["ctx_mesh"]
    if isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    program = params["jaxpr"]
    if program not in _inner_shardings:
        # as where jax asks for the devices of all
        bare: Any = jaxprs.open_jaxpr(program)[0]
        shardings = dispatch.get_intermediate_shardings(bare)
        every = (_replicated(one) for one, _ in shardings)
        _inner_shardings[program] = next((x for x in every if x is not None), None)
    return _inner_shardings[program]


_inner_shardings: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Program -> what `_replicated_sharding` returns because of a sharding in it."""


def _replicated(sharding: object) -> Value:
    """A whole copy on each of the devices of a sharding, if it has several and knows them."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = sharding.mesh
        if not isinstance(mesh, jax.sharding.Mesh) or mesh.size == 1:
            return None
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if len(sharding.device_set) == 1:
        return None
    devices: Any = sharding
    return GSPMDSharding.get_replicated(devices._internal_device_list)


def _equal_trees(a: object, b: object) -> bool:
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    return a[1] == b[1] and all(
        type(x) is type(y) and x == y for x, y in zip(a[0], b[0], strict=True)
    )


class JitListener(Protocol):
    """A function called for each jitted call; it must not raise.

    `program` is the same object for calls that differ only in their arrays and in `variant`. Calls
    equal in both share a compilation. `made()` returns the call.
    """

    def __call__(
        self, program: object, variant: Hashable, made: Callable[[], JitCall], /
    ) -> None: ...


_jit_impl: Final = pjit.jit_p.impl
"""jax's own: the one that `launch` puts there would ask once more what runs."""


@dataclasses.dataclass(frozen=True, eq=False)
class PendingProgram:
    """The program of a jit that is about to run.

    Attributes:
        params: the parameters of the jit's equation.
        arrays: the inputs of its program.
        tree: that of its results; None for a list of arrays.
        start: what runs a jit with such parameters, and changed ones.
    """

    params: Params
    arrays: Sequence[Value]
    tree: PyTree = None
    start: Function = _jit_impl

    def run(
        self, program: Jaxpr, inputs: Sequence[Array], outputs: int = 0
    ) -> tuple[PyTree, list[Value]]:
        """The results of another program, which takes `inputs` before the arrays of this one, and
        its additional outputs, which follow the results.

        Each device of the program has all of an additional output, and so does each process.
        """
        # jax does this where it binds a jit. It refuses tracers that have leaked, with an error
        # that names their origin.
        core.check_eval_args([*inputs, *self.arrays])
        changed = _params_for(self.params, program, len(inputs), outputs)
        whole = _replicated_sharding(self.params, self.arrays) if outputs else None
        changed = _with_replicated_outputs(changed, whole, outputs)
        found = list(self.start(*inputs, *self.arrays, **changed))
        count = len(found) - outputs
        own = found[:count]
        return own if self.tree is None else jax.tree.unflatten(self.tree, own), found[count:]

    def compiles(self, program: object, inputs: Sequence[object], outputs: int) -> bool:
        """Whether jax can compile a program for `run`; it is not compiled once more if it can."""
        changed = _params_for(self.params, program, len(inputs), outputs)
        try:
            _compile(list(map(pjit.convert_to_metaty, [*inputs, *self.arrays])), changed)
        except jax.errors.JaxRuntimeError:
            return False
        return True


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PendingJitCall(PendingProgram):
    """A jitted call that is about to run, with the arrays that its program gets. `JitListener`
    explains `program` and `made`.
    """

    program: Jaxpr
    function: Function
    made: Callable[[], JitCall]
    args: tuple[Value, ...]
    kwargs: Kwargs
    _own: Callable[[], PyTree]

    def run_for_fast_path(self, program: Jaxpr, inputs: Sequence[Array]) -> FastPathResult:
        """As `run`; in jax's fast path the program gets the same `inputs` again."""
        params = _params_for(self.params, program, len(inputs), 0)
        # What C++ needs to run the program by itself the next time: the executable, and the
        # arguments that it adds. Without it, each unmeasured step would come through Python, 2 ms
        # for 300 arrays.
        leaves, compiled, profiler, constants = pjit._pjit_call_impl_python(
            *inputs, *self.arrays, **params
        )
        tree = self.tree
        before = [*constants, *inputs]  # jax passes a program's constants before its arguments
        out = jax.tree.unflatten(tree, leaves)
        return FastPathResult((out, leaves, tree, self.arrays, program, compiled, profiler, before))

    def run_own(self) -> FastPathResult:
        """What jax makes of the call in the contexts that are open here, for its fast path. The
        results are `with_own_graphdefs`.
        """
        _, leaves, _, *rest = self._own()
        tree = self.tree
        return FastPathResult((jax.tree.unflatten(tree, leaves), leaves, tree, *rest))

    def with_own_graphdefs(self, out: object) -> Value:
        """The results of the same function traced elsewhere, with the graphdefs of this program.

        Modules come out of a program with the tags of the layers that were open in its trace.
        """
        return jax.tree.unflatten(self.tree, jax.tree.leaves(out))

    def compiler(self) -> Callable[..., None]:
        """What compiles a program for `run` with such inputs and so many additional outputs, in a
        thread's contexts. It traces nothing, and keeps no array.
        """
        types = list(map(pjit.convert_to_metaty, self.arrays))
        before, whole = self.params, _replicated_sharding(self.params, self.arrays)

        def compile_it(program: Jaxpr, inputs: Sequence[Array], outputs: int = 0) -> None:
            every = [*map(pjit.convert_to_metaty, inputs), *types]
            _compile(
                every,
                _with_replicated_outputs(
                    _params_for(before, program, len(inputs), outputs), whole, outputs
                ),
            )

        return compile_it


@dataclasses.dataclass(frozen=True, eq=False)
class FastPathResult:
    """The result of a jitted call, with all that jax needs to run it in its fast path next time."""

    result: tuple[Value, ...]


class JitChooser(Protocol):
    """A function called for each jitted call that is about to run; it must not raise.

    If it returns a function, what that returns is the result of the call, or `FastPathResult`.
    """

    def __call__(self, call: PendingJitCall, /) -> Callable[[], PyTree] | None: ...


class _ThreadCall(threading.local):
    """The call that a thread is about to run: its parameters, and how it was made."""

    params: Any = None
    made: Callable[[], JitCall] | None = None
    infer: Callable[[], tuple[Any, Any]] | None = None


_call = _ThreadCall()


@dataclasses.dataclass(frozen=True, eq=False)
class _MissHooks:
    """Who hears of jitted calls, and chooses for them."""

    listener: JitListener | None
    choose: JitChooser
    prepare: Callable[[], None]


def _patch_misses(add_undo: AddUndo) -> None:
    # jax calls a jitted function in C++ as long as its cache has an executable for the types of
    # the arguments and the settings. If not, the C++ code calls `cache_miss`, which calls these two
    # by their names in the module: the first finds or traces the program, the second runs it and
    # returns what the cache then keeps. A result without an executable is not kept, so that a
    # chosen call comes here again. There is no public hook at a launch. Without this nothing could
    # run another program than the user's. It can go when jax lets a program be replaced after it
    # was traced.
    infer_before, run_before = pjit._infer_params, pjit._run_python_pjit

    def infer_params(fun: Function, options: Any, args: tuple[Value, ...], kwargs: Kwargs) -> Value:
        if core.trace_state_clean():
            for one in _misses_patch.holders:
                one.prepare()
        params, arrays = infer_before(fun, options, args, kwargs)
        if core.trace_state_clean():
            made = functools.partial(_jit_call, fun, options, args, kwargs)
            listeners = [x.listener for x in _misses_patch.holders if x.listener is not None]
            if listeners:
                placed = tuple(
                    x.sharding if isinstance(x, jax.Array) and x.committed else None for x in arrays
                )
                for listener in listeners:
                    listener(params.params["jaxpr"], (options, placed), made)
            _call.params, _call.made = params, made
            _call.infer = functools.partial(infer_before, fun, options, args, kwargs)
        return params, arrays

    def run_chosen(
        params: Any,
        arrays: Sequence[Value],
        fun: Function,
        args: tuple[Value, ...],
        kwargs: Kwargs,
    ) -> Value:
        of, made, infer = _call.params, _call.made, _call.infer
        _call.params = _call.made = _call.infer = None
        program, instead = params.params["jaxpr"], None
        # jax may have found the same parameters for a call that was only lowered
        if of is params and made is not None and infer is not None and core.trace_state_clean():
            own = lambda: run_before(*infer(), fun, args, kwargs)  # noqa: E731
            call = PendingJitCall(
                params.params,
                arrays,
                params.out_tree,
                # `bind` would look at each array once more
                pjit.jit_p.bind if config.debug_key_reuse.value else _jit_impl,
                program=program,
                function=fun,
                made=made,
                args=args,
                kwargs=kwargs,
                _own=own,
            )
            choices = (one.choose(call) for one in reversed(_misses_patch.holders))
            instead = next((x for x in choices if x is not None), None)
        if instead is None:
            return run_before(params, arrays, fun, args, kwargs)
        found = instead()
        if isinstance(found, FastPathResult):
            return found.result
        # without an executable, jax comes here again the next time
        return found, None, None, arrays, program, None, None, []

    patch(pjit, "_infer_params", infer_params, add_undo)
    patch(pjit, "_run_python_pjit", run_chosen, add_undo)


_misses_patch = SharedPatch(_patch_misses)


def patch_jit_misses(
    listener: JitListener | None = None,
    choose: JitChooser = lambda *_: None,
    prepare: Callable[[], None] = lambda: None,
    add_undo: AddUndo = lambda undo: None,
) -> Callable[[], None]:
    """Call `listener` for each jitted call that jax does not handle in its fast path, `prepare`
    before it is traced, and `choose` before it runs. Of several that choose, the newest is asked
    first.

    Any thread's calls are heard, except those within a trace. Returns an undo function, which
    `add_undo` gets before anything is changed.
    """
    one = _MissHooks(listener, choose, prepare)

    def undo() -> None:
        _misses_patch.release(one)
        vars(_call).clear()  # a call that was lowered and not run

    add_undo(undo)
    _misses_patch.acquire(one)
    return undo


def _jit_call(fun: Function, options: Any, args: tuple[Value, ...], kwargs: Kwargs) -> JitCall:
    static = {*options.static_argnums}
    named = {*options.static_argnames}
    return JitCall(
        fun,
        options,
        tuple(x if i in static else _abstract(x) for i, x in enumerate(args)),
        {k: x if k in named else _abstract(x) for k, x in kwargs.items()},
        fun.ctxtag if isinstance(fun, compilation.JitFn) else None,
    )


def _abstract(tree: PyTree) -> Value:
    def one(x: object) -> Value:
        return abstract(x) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(one, tree)
