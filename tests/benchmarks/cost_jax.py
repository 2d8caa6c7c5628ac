"""The rows in JAX: the bare steps, ours, `nnx.capture`, Linen's `capture_intermediates`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_inspector as nni
from tests.benchmarks import nets, nets_linen
from tests.benchmarks.kernels import kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """One model of the table: how to make it in each framework, and the shape of its batch."""

    name: str
    maker: str
    sizes: tuple[Any, ...]
    batch: tuple[int, ...]
    tokens: int = 0
    stacked: bool = False
    half: bool = False
    """Parameters, and with them activations, are bfloat16."""

    def options(self) -> dict[str, Any]:
        """What only the transformers take."""
        return {"stacked": self.stacked} if self.tokens else {}

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """A batch and its labels, the same for every framework."""
        rng = np.random.default_rng(0)
        if self.tokens:
            tokens = rng.integers(0, self.tokens, self.batch).astype(np.int32)
            return tokens, tokens
        x = rng.normal(size=self.batch).astype(np.float32)
        return x, rng.integers(0, nets.CLASSES, self.batch[:1]).astype(np.int32)


@dataclasses.dataclass
class Row:
    """One line of the table.

    Attributes:
        against: the row whose figures are 1; its own for a bare step.
        call: runs it once and waits for the result.
        steps: how many steps that is.
        first_s: seconds from the function to the result of its first call, None likewise.
        compile_s: CPU seconds of tracing, lowering and compiling, None where it does not compile.
        kernels: how many the compiled program launches.
        memory: bytes of temporaries and outputs of the compiled program.
        result: bytes of what it returns besides the bare step's results.
        machine: what it ran on, "" for jax's device.
        times: seconds per step, one for each round.
    """

    label: str
    against: str
    call: Callable[[], Any]
    steps: int = 1
    first_s: float | None = None
    compile_s: float | None = None
    kernels: int | None = None
    memory: int | None = None
    result: int | None = None
    machine: str = ""
    times: list[float] = dataclasses.field(default_factory=lambda: list[float]())


def size_of(tree: Any) -> int:
    """Bytes of all the arrays of a pytree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))


def _row(label: str, against: str, f: Any, args: Sequence[Any], extra: Any = None) -> Row:
    """Compile `f` ahead of time; `extra` picks from its result what the bare step has not."""
    began, cpu = time.perf_counter(), time.process_time()
    compiled = f.lower(*args).compile()
    seconds = time.process_time() - cpu
    out = jax.block_until_ready(compiled(*args))
    first = time.perf_counter() - began
    used = compiled.memory_analysis()
    memory = used.temp_size_in_bytes + used.output_size_in_bytes
    result = 0 if extra is None else size_of(extra(out))
    call = lambda: jax.block_until_ready(compiled(*args))  # noqa: E731
    return Row(
        label,
        against,
        call,
        first_s=first,
        compile_s=seconds,
        kernels=kernels(compiled.as_text()),
        memory=memory,
        result=result,
    )


def _in_its_dtype(case: Case, tree: Any) -> Any:
    if not case.half:
        return tree
    half = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(half, tree)


def _descend(model: nnx.Module, grads: Any) -> None:
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads))


def model_of(case: Case) -> Any:
    """The model of a case in NNX."""
    made = getattr(nets, case.maker)(*case.sizes, **case.options(), rngs=nnx.Rngs(0))
    nnx.update(made, _in_its_dtype(case, nnx.state(made, nnx.Param)))
    return made


def nnx_rows(case: Case, chosen: str = "") -> list[Row]:
    """The rows of plain NNX, ours, and `nnx.capture`; bare ones, and those whose label holds the
    text `chosen`.
    """
    x, labels = (jnp.asarray(a) for a in case.data())
    model = functools.partial(model_of, case)

    def loss_fn(model: Any, x: Any, labels: Any) -> Any:
        return nets.cross_entropy(model(x), labels)

    def bare(model: Any, x: Any, labels: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, labels)
        _descend(model, grads)
        return loss

    def ours(**options: Any) -> Any:
        def step(model: Any, x: Any, labels: Any) -> Any:
            (loss, record), grads = nni.value_and_grad(loss_fn, **options)(model, x, labels)
            _descend(model, grads)
            return loss, record

        return nnx.jit(step)

    def forward(model: Any, x: Any) -> Any:
        return model(x)

    def captured(**options: Any) -> Any:
        return nnx.jit(lambda model, x: nni.capture(model, **options)(x))

    def everything(model: Any, x: Any) -> Any:
        sown = nnx.capture(forward, nnx.Intermediate, method_outputs=nnx.Intermediate)
        return sown(model, x)

    second = lambda out: out[1]  # noqa: E731
    # the first compilation of a process pays for starting the compiler
    nnx.jit(bare).lower(model(), x[:1], labels[:1]).compile()
    train, look = "train step", "forward pass"
    batch, few = (x, labels), {"inputs": False, "sample": 1}
    kept = "nnx.capture, all returned"
    every = [
        (train, train, nnx.jit(bare), batch),
        ("ours", train, ours(), batch),
        ("ours, inputs=False", train, ours(inputs=False), batch),
        ("ours, inputs=False, sample=1", train, ours(**few), batch),
        (look, look, nnx.jit(forward), (x,)),
        ("ours, forward", look, captured(), (x,)),
        ("ours, forward, inputs=False", look, captured(inputs=False), (x,)),
        ("ours, forward, inputs=False, sample=1", look, captured(**few), (x,)),
        (kept, look, nnx.jit(everything), (x,)),
    ]
    rows: list[Row] = []
    for label, against, f, arguments in every:
        if label != against and chosen not in label:
            continue
        extra = None if label == against else second
        try:
            row = _row(label, against, f, (model(), *arguments), extra)
        except Exception as error:  # flax's own limits are a result too
            if label != kept:
                raise
            row = failed(label, against, error)
        rows += [row, _with_histograms(row)] if label == kept and row.steps else [row]
    watched = "ours, watch(every=10)"
    if chosen in watched:
        try:
            rows += _watched(model, nnx.jit(bare), x, labels)
        except nni.InspectorError as error:  # the front end is not built
            rows.append(failed(watched, train, error))
    return rows


def failed(label: str, against: str, error: Exception) -> Row:
    """A row that could not be run, with the reason instead of figures."""
    reason = f"{type(error).__name__}"
    return Row(f"{label}: {reason}", against, lambda: None, steps=0)


def _with_histograms(row: Row) -> Row:
    def call() -> None:
        for leaf in jax.tree.leaves(row.call()[1]):
            np.histogram(np.asarray(leaf), bins=64)

    return dataclasses.replace(row, label="the same, np.histogram of each", call=call, times=[])


def _watched(make: Any, train_step: Any, x: Any, labels: Any) -> list[Row]:
    steps = 10
    batches = [(x, labels)] * steps
    plain, watched = make(), make()
    inspector = nni.Inspector(watched, x)

    def loop(model: Any, over: Any) -> None:
        loss = None
        for batch in over:
            loss = train_step(model, *batch)
        jax.block_until_ready(loss)

    name = "loop of train steps"
    return [
        Row(name, name, lambda: loop(plain, batches), steps),
        Row(
            "ours, watch(every=10)",
            name,
            lambda: loop(watched, inspector.watch(batches, every=10)),
            steps,
        ),
    ]


def linen_rows(case: Case) -> list[Row]:
    """The rows of Linen."""
    model = getattr(nets_linen, case.maker)(*case.sizes, **case.options())
    x, _ = (jnp.asarray(a) for a in case.data())
    variables = _in_its_dtype(case, model.init(jax.random.key(0), x))
    kept = [name for name in variables if name != "params"]

    def forward(variables: Any, x: Any) -> Any:
        return model.apply(variables, x, mutable=kept)

    def everything(variables: Any, x: Any) -> Any:
        mutable = [*kept, "intermediates"]
        return model.apply(variables, x, mutable=mutable, capture_intermediates=True)

    look = "Linen forward pass"
    return [
        _row(look, look, jax.jit(forward), (variables, x)),
        _row(
            "capture_intermediates, all returned",
            look,
            jax.jit(everything),
            (variables, x),
            lambda out: out[1]["intermediates"],
        ),
    ]
