"""Generated models: trees of layers as data, the models they stand for, and the calls those make.

A `Spec` describes a model, `build` makes it, and `expected_calls` lists the sites that one call of
the model reaches, in order, by plain recursion over the spec and without the model. `TRANSFORMS`
are ways of calling it; two of them compose. All layers keep the shape `SHAPE`, so that any layers
fit together. Invariant: nothing here uses nnx_inspector.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import generated_layers as layers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from flax import nnx
from generated_layers import DEPTH, WIDTH

SHAPE = (2, 3, WIDTH)
"""The shape of every value between two layers: batch, time or space, features."""
CALL = "__call__"


@dataclasses.dataclass(frozen=True)
class Spec:
    """One module: its kind, and the modules inside."""

    kind: str
    inner: tuple[Spec, ...] = ()

    def __repr__(self) -> str:
        return f"spec({', '.join([repr(self.kind), *map(repr, self.inner)])})"

    @property
    def kinds(self) -> set[str]:
        return {self.kind}.union(*(one.kinds for one in self.inner))


def spec(kind: str, *inner: Spec) -> Spec:
    return Spec(kind, inner)


# -------------------------------------------------------------------- kinds


@dataclasses.dataclass(eq=False)
class Node:
    """One module instance: its submodules by path, and the calls that each of its methods makes.

    A call is written `part:method`; the default part is the module itself, the default method
    `__call__`. `@` marks calls within a transform, `*` stands for all parts in turn, `?` for a
    module that is not part of the model; `!name` is a value that the module sows or perturbs.
    `method#2` is another path through the same method.
    """

    parts: dict[str, Node] = dataclasses.field(default_factory=lambda: dict[str, Node]())
    calls: dict[str, str] = dataclasses.field(default_factory=lambda: dict[str, str]())


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer: how it is made from the layers inside it, and its node.

    Attributes:
        make: `(rngs, *inner) -> module`.
        node: `(*inner nodes) -> node`.
        arity: the least and the most layers inside.
        stacks: whether the layer inside is made `DEPTH` times, on a leading axis.
    """

    make: Callable[..., nnx.Module]
    node: Callable[..., Node] = lambda: Node()
    arity: tuple[int, int] = (0, 0)
    stacks: bool = False


def leaves(names: str, calls: str | None = None) -> Callable[[], Node]:
    """The node of a layer that calls its plain parts in this order."""
    return lambda: Node(
        {n: Node() for n in names.split()}, {CALL: names if calls is None else calls}
    )


def holding(cls: type, calls: str = "inner", **methods: str) -> Kind:
    """A module with one other in `inner`."""
    return Kind(
        lambda rngs, inner: cls(inner),
        lambda inner: Node({"inner": inner}, {CALL: calls, **methods}),
        (1, 1),
    )


def several(cls: type, path: Callable[[int], str], arity: tuple[int, int] = (1, 3)) -> Kind:
    """A module that calls any number of others one after the other."""
    return Kind(
        lambda rngs, *inner: cls(*inner),
        lambda *inner: Node({path(i): node for i, node in enumerate(inner)}, {CALL: "*"}),
        arity,
    )


def recurrent(cell: type, names: str) -> Kind:
    """`nnx.RNN` over a cell."""
    return Kind(
        lambda rngs: nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
        lambda: Node({"cell": leaves(names)()}, {CALL: "cell:initialize_carry @cell"}),
    )


def _residual(inner: Node) -> Node:
    return Node({"inner": inner}, {CALL: "inner"})


KINDS: dict[str, Kind] = {
    # Flax's layers
    "linear": Kind(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)),
    "linear_general": Kind(lambda rngs: nnx.LinearGeneral(WIDTH, WIDTH, rngs=rngs)),
    "einsum": Kind(lambda rngs: nnx.Einsum("...d,de->...e", (WIDTH, WIDTH), (WIDTH,), rngs=rngs)),
    "conv": Kind(lambda rngs: nnx.Conv(WIDTH, WIDTH, kernel_size=(2,), rngs=rngs)),
    "batch_norm": Kind(lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs)),
    "batch_norm_eval": Kind(lambda rngs: nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)),
    "layer_norm": Kind(lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs)),
    "rms_norm": Kind(lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs)),
    "group_norm": Kind(lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)),
    "dropout": Kind(lambda rngs: nnx.Dropout(0.3, rngs=rngs)),
    "dropout_off": Kind(lambda rngs: nnx.Dropout(0.3, deterministic=True)),
    "prelu": Kind(lambda rngs: nnx.PReLU()),
    "embed": Kind(lambda rngs: layers.Embedded(rngs), leaves("table", "table table:attend")),
    "attention": Kind(
        lambda rngs: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs),
        leaves("query key value out"),
    ),
    "lstm": recurrent(nnx.LSTMCell, "ii hi if_ hf ig hg io ho"),
    "lstm_optimized": recurrent(nnx.OptimizedLSTMCell, "dense_i dense_h"),
    "gru": recurrent(nnx.GRUCell, "dense_i dense_h"),
    "rnn": recurrent(nnx.SimpleCell, "dense_i dense_h"),
    "lora": Kind(
        lambda rngs, inner: nnx.LoRA(WIDTH, 2, WIDTH, base_module=inner, rngs=rngs),
        lambda inner: Node({"base_module": inner}, {CALL: "base_module"}),
        (1, 1),
    ),
    "lora_linear": Kind(
        lambda rngs: nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs), leaves("lora")
    ),
    "weight_norm": Kind(
        lambda rngs: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
        leaves("layer_instance"),
    ),
    "spectral_norm": Kind(
        lambda rngs: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
        leaves("layer_instance"),
    ),
    "sequential": Kind(
        lambda rngs, *inner: nnx.Sequential(*inner, jnp.tanh),
        lambda *inner: Node({f"layers/{i}": n for i, n in enumerate(inner)}, {CALL: "*"}),
        (1, 3),
    ),
    # the user's layers
    "holds": holding(layers.Holds),
    "residual": holding(layers.Residual),
    "inherits": holding(layers.Inherits),
    "supers": holding(layers.Supers),
    "supers_twice": holding(layers.SupersTwice),
    "remat_supers": holding(layers.RematSupers, "@inner"),
    "jit_call": holding(layers.JitCall, "@inner"),
    "remat_method": holding(layers.RematMethod, ":again", again="@inner"),
    "private": holding(layers.Private),
    "recursive": holding(layers.Recursive, "inner :__call__#2", **{"__call__#2": "inner"}),
    "inner_jit": holding(layers.InnerJit, "@inner"),
    "functional": holding(layers.Functional, "@inner"),
    "checkpoint": holding(layers.Checkpoint, "@inner"),
    "loop": holding(layers.Loop, "@inner"),
    "stacked": dataclasses.replace(holding(layers.Stacked, "@inner"), stacks=True),
    "ensemble": dataclasses.replace(holding(layers.Ensemble, "@inner"), stacks=True),
    "sows": holding(layers.Sows, "inner !features"),
    "perturbs": holding(layers.Perturbs, "inner !hidden"),
    "closure": holding(layers.Closure),
    "bound_method": holding(layers.BoundMethod),
    "makes": holding(layers.Makes, "inner ?"),
    "fails": holding(layers.Fails),
    "tree": Kind(
        lambda rngs, inner: layers.TreeCaller(layers.TreeOutput(inner)),
        lambda inner: Node({"inner": _residual(inner)}, {CALL: "inner"}),
        (1, 1),
    ),
    "methods": Kind(
        lambda rngs, encoder, decoder: layers.Methods(encoder, decoder),
        lambda encoder, decoder: Node(
            {"encoder": encoder, "decoder": decoder},
            {CALL: ":encode :decode", "encode": "encoder", "decode": "decoder"},
        ),
        (2, 2),
    ),
    "cond": Kind(
        lambda rngs, positive, negative: layers.Cond(positive, negative),
        lambda positive, negative: Node(
            {"positive": positive, "negative": negative}, {CALL: "@positive @negative"}
        ),
        (2, 2),
    ),
    "twice": Kind(
        lambda rngs, inner: layers.Twice(inner),
        lambda inner: Node({"z": inner, "a": inner}, {CALL: "z a"}),
        (1, 1),
    ),
    "between": Kind(
        lambda rngs, inner: layers.Between(inner),
        lambda inner: Node(
            {"left": _residual(inner), "right": _residual(inner)}, {CALL: "right left"}
        ),
        (1, 1),
    ),
    "chain": several(layers.Chain, lambda i: f"blocks/{i}"),
    "heads": several(layers.Heads, lambda i: f"heads/h{i}"),
    "grid": several(layers.Grid, lambda i: f"rows/1/{i - 1}" if i else "rows/0/0"),
    "plain_grid": several(
        layers.PlainGrid, lambda i: f"rows/rest/{i - 1}" if i else "rows/first/0"
    ),
    "frozen": holding(layers.Frozen),
    "sealed": holding(layers.Sealed),
    "slots": holding(layers.Slots),
    "noise": Kind(lambda rngs: layers.Noise(rngs)),
    "counts": Kind(lambda rngs: layers.Counts()),
}

SHARES = {"twice", "between"}
"""Kinds in which one module has two names, which NNX's tree mode rejects."""
GROWS = {"sows", "perturbs"}
"""Kinds that add a Variable when they are called."""
CLOSES_OVER = {"closure", "bound_method"}
"""Kinds that hold a function over a module: NNX copies the module but not the closure."""
TRACES = {
    "lstm", "lstm_optimized", "gru", "rnn", "remat_supers", "jit_call", "remat_method",
    "inner_jit", "functional", "checkpoint", "loop", "stacked", "ensemble", "cond",
}  # fmt: skip
"""Kinds that compile something even if they are called outside jit."""


def build(one: Spec, rngs: nnx.Rngs) -> nnx.Module:
    """The model that a spec describes."""
    kind = KINDS[one.kind]

    def make(rngs: nnx.Rngs) -> tuple[nnx.Module, ...]:
        return tuple(build(inner, rngs) for inner in one.inner)

    return kind.make(rngs, *(stack(make, rngs) if kind.stacks else make(rngs)))


def stack(make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> Any:
    """The result of `make`, `DEPTH` times on a leading axis."""
    split = nnx.split_rngs(splits=DEPTH)
    return split(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)


# ----------------------------------------------------------- expected calls


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, or one sown value.

    Attributes:
        site: the site's key; None without a path.
        traced: whether it is within one of the model's own transforms.
        sown: whether it is a value.
    """

    site: str | None
    traced: bool
    sown: bool = False


def layout(one: Spec) -> Node:
    return KINDS[one.kind].node(*(layout(inner) for inner in one.inner))


def expected_calls(one: Spec) -> list[Call]:
    """The events of one call of the model, in the order in which calls begin."""
    root = layout(one)
    paths: dict[Node, str] = {}
    _name(root, (), paths)
    return list(_calls(root, CALL, False, paths))


def submodule_paths(one: Spec) -> list[str]:
    """The path of every module, including the root."""
    paths: dict[Node, str] = {}
    _name(layout(one), (), paths)
    return sorted(paths.values())


def _name(node: Node, path: tuple[str, ...], paths: dict[Node, str]) -> None:
    """Give each module the first of its paths; attributes are sorted by name."""
    if node in paths:
        return
    paths[node] = "/".join(path)
    for name in sorted(node.parts, key=lambda n: n.split("/")):
        _name(node.parts[name], (*path, name), paths)


def _calls(node: Node, way: str, traced: bool, paths: dict[Node, str]) -> Iterator[Call]:
    method = way.partition("#")[0]
    yield Call(paths[node] + ("" if method == CALL else f":{method}"), traced)
    for word in node.calls.get(way, "").split():
        within = traced or word.startswith("@")
        part, _, method = word.removeprefix("@").partition(":")
        if part == "?":
            yield Call(None, within)
            continue
        if part.startswith("!"):
            yield Call("/".join(filter(None, (paths[node], part[1:]))), within, sown=True)
            continue
        for name in node.parts if part == "*" else (part,):
            yield from _calls(node.parts[name] if name else node, method or CALL, within, paths)


# --------------------------------------------------------------- transforms

Run = Callable[[Any, jax.Array], jax.Array]
"""Calls a model on an array of `SHAPE` and returns one."""


def _by_jax(transform: Callable[..., Any]) -> Callable[[Run], Run]:
    """A transform of jax, between a split and a merge."""

    def transformed(run: Run) -> Run:
        def pure(graphdef: Any, state: Any, x: Any) -> Any:
            model = nnx.merge(graphdef, state)
            y = run(model, x)
            return y, nnx.state(model)

        whole = transform(pure)

        def functional(model: Any, x: Any) -> Any:
            y, state = whole(*nnx.split(model), x)
            nnx.update(model, state)
            return y

        return functional

    return transformed


def _grad(run: Run) -> Run:
    """Returns the gradient of the input, plus the gradients of the parameters."""

    def loss(model: Any, x: Any) -> Any:
        return (run(model, x) ** 2).sum()

    def graded(model: Any, x: Any) -> Any:
        of_model, of_x = nnx.grad(loss, argnums=(0, 1))(model, x)
        return of_x + sum(g.sum() for g in jax.tree.leaves(of_model))

    return graded


def _value_and_grad(run: Run) -> Run:
    def loss(model: Any, x: Any) -> Any:
        y = run(model, x)
        return (y**2).sum(), y

    def graded(model: Any, x: Any) -> Any:
        (value, y), grads = nnx.value_and_grad(loss, has_aux=True)(model, x)
        return y + value + sum(g.sum() for g in jax.tree.leaves(grads))

    return graded


def _scan(run: Run) -> Run:
    """Over steps, with the model in the carry."""

    def step(carry: Any, _: Any) -> Any:
        model, x = carry
        return model, 0.5 * run(model, x)

    def scanned(model: Any, x: Any) -> Any:
        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan((model, x), jnp.arange(DEPTH))[1]

    return scanned


def _while(run: Run) -> Run:
    def body(carry: Any) -> Any:
        model, x, i = carry
        return model, 0.5 * run(model, x), i + 1

    return lambda model, x: nnx.while_loop(lambda c: c[2] < DEPTH, body, (model, x, 0))[1]


def _cond(run: Run) -> Run:
    return lambda model, x: nnx.cond(x[0, 0, 0] > 0, run, lambda _, x: 0.5 * x, model, x)


def _vmap(run: Run) -> Run:
    """Over the members of a stack."""
    return lambda models, x: nnx.vmap(run, in_axes=(0, None))(models, x).mean(axis=0)


TRANSFORMS: dict[str, Callable[[Run], Run]] = {
    "nnx.jit": nnx.jit,
    "jax.jit": _by_jax(functools.partial(jax.jit, static_argnums=0)),
    "nnx.jit(graph=False)": functools.partial(nnx.jit, graph=False),
    "nnx.grad": _grad,
    "nnx.value_and_grad": _value_and_grad,
    "nnx.scan": _scan,
    "nnx.vmap": _vmap,
    "nnx.remat": nnx.remat,
    "jax.checkpoint": _by_jax(functools.partial(jax.checkpoint, static_argnums=0)),
    "nnx.cond": _cond,
    "nnx.while_loop": _while,
}
"""Composes transforms from the inside out; the outermost is called."""


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def transformed(names: tuple[str, ...], run: Run = call) -> Run:
    """`run` within the named transforms, the first outermost."""
    for name in reversed(names):
        run = TRANSFORMS[name](run)
    return run


def make(one: Spec, transforms: tuple[str, ...], seed: int = 0) -> Any:
    """The model, or a stack of models for a transform over members."""
    rngs = nnx.Rngs(seed)
    if "nnx.vmap" in transforms:
        return stack(lambda rngs: build(one, rngs), rngs)
    return build(one, rngs)


# --------------------------------------------------------------- generating

_CONTAINERS = sorted(name for name, kind in KINDS.items() if kind.arity[1] and name != "fails")
_LEAVES = sorted(name for name, kind in KINDS.items() if not kind.arity[1])


@st.composite
def _containers(draw: Any, inner: st.SearchStrategy[Spec]) -> Spec:
    name = draw(st.sampled_from(_CONTAINERS))
    low, high = KINDS[name].arity
    return Spec(name, tuple(draw(st.lists(inner, min_size=low, max_size=high))))


def _possible(one: Spec, above: frozenset[str] = frozenset()) -> bool:
    """Whether NNX itself can call the model outside any transform."""
    if above & TRACES and one.kind in GROWS | CLOSES_OVER:
        return False
    if KINDS[one.kind].stacks and not _has_arrays(one):
        return False
    return all(_possible(inner, above | {one.kind}) for inner in one.inner)


def _has_arrays(one: Spec) -> bool:
    return any(name in _LEAVES and name != "dropout_off" for name in one.kinds)


def fits(one: Spec, transforms: tuple[str, ...]) -> bool:
    """Whether NNX itself can call the model within these transforms."""
    found = set(transforms)
    if len(found) < len(transforms) and "nnx.vmap" in found:
        return False
    if found and one.kinds & CLOSES_OVER:
        return False
    if found & {"nnx.scan", "nnx.cond", "nnx.while_loop"} and one.kinds & GROWS:
        return False
    if "nnx.jit(graph=False)" in found and one.kinds & SHARES:
        return False
    if found & {"nnx.grad", "nnx.value_and_grad"} and (
        "loop" in one.kinds or "nnx.while_loop" in found
    ):
        return False
    return "nnx.vmap" not in found or _has_arrays(one)


SPECS = st.recursive(st.sampled_from(_LEAVES).map(spec), _containers, max_leaves=4).filter(
    _possible
)
CALLS = st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=2).map(tuple)
"""A way of calling a model: eagerly, in a transform, or in two nested ones."""


@st.composite
def cases(draw: Any) -> tuple[Spec, tuple[str, ...]]:
    """A model and a way of calling it that NNX itself supports."""
    one, transforms = draw(SPECS), draw(CALLS)
    hypothesis.assume(fits(one, transforms))
    return one, transforms
