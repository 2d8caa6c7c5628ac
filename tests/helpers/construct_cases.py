"""Every way in which a model may be called: the rows of the table that `constructs.py` writes.

A construct builds a function `run(model, x)`; the function that it makes for this (jitted, vmapped,
compiled) is made before the hooks or inside them. `forward` is the same network written with `jnp`,
with a probe where the site of interest returns. Does not use nnx_inspector.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import export
from jax.sharding import PartitionSpec

BEFORE, INSIDE = "before", "inside"
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)


def affine(layer: Any, x: Any) -> Any:
    return x @ layer.kernel[...] + layer.bias[...]


# ------------------------------------------------------------------- models


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def net_forward(model, x, probe):
    return affine(model.second, jnp.tanh(probe(affine(model.first, x))))


def members() -> Net:
    """Two Nets in one; each Variable has a leading axis."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Net(rngs)

    return make(nnx.Rngs(0))


def row(layer: nnx.Linear, i: int) -> Any:
    return types.SimpleNamespace(kernel=layer.kernel[...][i], bias=layer.bias[...][i])


def members_forward(model, x, probe):
    out = []
    for i in range(2):
        hidden = jnp.tanh(probe(affine(row(model.first, i), x)))
        out.append(affine(row(model.second, i), hidden))
    return jnp.stack(out)


class Layers(nnx.Module):
    """Three Linears in one stacked module."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.layers = make(rngs)


def layers_forward(model, x, probe):
    for i in range(3):
        x = jnp.tanh(probe(affine(row(model.layers, i), x)))
    return x


def loop_forward(model, x, probe):
    for _ in range(3):
        x = jnp.tanh(probe(affine(model.first, x)))
    return x


class Noisy(Net):
    """Has a stream of random numbers, which splitting needs; a rate of 0 keeps the values."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


def sequential() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), jnp.tanh, nnx.Linear(3, 3, rngs=rngs))


def sequential_forward(model, x, probe):
    return affine(model.layers[2], jnp.tanh(probe(affine(model.layers[0], x))))


class Grid(nnx.Module):
    """Modules in a list of lists."""

    def __init__(self, rngs: nnx.Rngs):
        pairs = [[nnx.Linear(3, 3, rngs=rngs) for _ in range(2)] for _ in range(2)]
        self.blocks = nnx.data(pairs)

    def __call__(self, x):
        for pair in self.blocks:
            for layer in pair:
                x = jnp.tanh(layer(x))
        return x


def grid_forward(model, x, probe):
    for i, pair in enumerate(model.blocks):
        for j, layer in enumerate(pair):
            x = affine(layer, x)
            x = jnp.tanh(probe(x) if (i, j) == (1, 0) else x)
    return x


class HoldsMethod(Net):
    """A bound method, of a submodule, stored when the model is made."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.apply_first = nnx.static(self.first.__call__)

    def __call__(self, x):
        return self.second(jnp.tanh(self.apply_first(x)))


class HoldsClosure(Net):
    """A closure over a submodule, stored when the model is made."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        first = self.first
        self.apply_first = nnx.static(lambda x: first(x))

    def __call__(self, x):
        return self.second(jnp.tanh(self.apply_first(x)))


class JitDecorated(Net):
    @nnx.jit
    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class RematDecorated(Net):
    @nnx.remat
    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class VmapDecorated(Net):
    @functools.partial(nnx.vmap, in_axes=(None, 0), out_axes=0)
    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, name="second")(jnp.tanh(linen.Dense(3, name="first")(x)))


def to_nnx() -> nnx.Module:
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)), X)


def to_nnx_forward(model, x, probe):
    of = lambda name: types.SimpleNamespace(**getattr(model, name))  # noqa: E731
    return affine(of("second"), jnp.tanh(probe(affine(of("first"), x))))


class InLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(Net, name="net")(x)


class Around(nnx.Module):
    """Every call makes the NNX module inside the Linen one anew; this module holds both."""

    def __init__(self, rngs: nnx.Rngs):
        self.outer = nnx.bridge.lazy_init(nnx.bridge.ToNNX(InLinen(), rngs=rngs), X)

    def __call__(self, x):
        return self.outer(x)


class Applied:
    """A Linen model and its variables: no NNX module that could be named."""

    def __init__(self) -> None:
        self.module = InLinen()
        self.variables = self.module.init(jax.random.key(0), X)

    def __call__(self, x):
        return self.module.apply(self.variables, x)


def applied_forward(model, x, probe):
    net = model.variables["params"]["net"]
    of = lambda name: types.SimpleNamespace(**net[name])  # noqa: E731
    return affine(of("second"), jnp.tanh(probe(affine(of("first"), x))))


def around_forward(model, x, probe):
    net = model.outer.net
    of = lambda name: types.SimpleNamespace(**net[name])  # noqa: E731
    return affine(of("second"), jnp.tanh(probe(affine(of("first"), x))))


# ---------------------------------------------------------------- constructs

Run = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Construct:
    """One row.

    Attributes:
        name: its name in the table.
        group: the heading above it.
        build: `model -> run(model, x)`; it makes its function when it is called.
        model: makes the model.
        forward: `(model, x, probe) -> y` in `jnp`; `probe` receives each output of the site.
        probe: the key of that site.
        part: the submodule at that site.
        sites: the keys of all sites that it calls.
        moments: whether the function can be made before the hooks, inside, or both.
        closes: the moments at which it calls the model it was built with, not its argument.
        writes: whether it writes to the model it closes over, as nnx.jit does.
        not_applicable: the cells without a meaning here, with the reason.
        quick: whether it is measured by default.
    """

    name: str
    group: str
    build: Callable[[Any], Run]
    model: Callable[[], Any] = lambda: Net(nnx.Rngs(0))
    forward: Callable[..., Any] = net_forward
    probe: str = "first"
    part: Callable[[Any], Any] = lambda model: model.first
    sites: frozenset[str] = frozenset({"", "first", "second"})
    moments: tuple[str, ...] = (BEFORE, INSIDE)
    closes: tuple[str, ...] = ()
    writes: bool = False
    not_applicable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quick: bool = False


def call(model, x):
    return model(x)


def squares(y):
    return 0.5 * (y**2).sum()


def loss_and_output(model, x):
    y = model(x)
    return squares(y), y


def always(run: Run) -> Callable[[Any], Run]:
    """A construct that makes nothing beforehand."""
    return lambda model: run


def once(make: Callable[[], Run]) -> Callable[[Any], Run]:
    """A construct that makes a function which takes the model."""
    return lambda model: make()


# ------------------------------------------------------------------ compiled


def split_and_merge(model):
    f = jax.jit(lambda graphdef, state, x: nnx.merge(graphdef, state)(x), static_argnums=0)
    return lambda m, x: f(*nnx.split(m), x)


def older_graphdef(model):
    graphdef, state = nnx.split(model)
    f = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return lambda m, x: f(state, x)


def jitted_closure(model):
    f = jax.jit(lambda x: model(x))
    return lambda m, x: f(x)


def cached_partial(model):
    f = nnx.cached_partial(nnx.jit(call), model)
    return lambda m, x: f(x)


def jit_partial(model):
    f = nnx.jit_partial(call, model, graph_updates=False)
    return lambda m, x: f(x)


def compiled_nnx(model):
    f = nnx.jit(call).lower(model, X).compile()
    return lambda m, x: f(m, x)


def compiled_jax(model):
    graphdef, state = nnx.split(model)
    f = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, X).compile()
    return lambda m, x: f(nnx.state(m), x)


def exported(model):
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)

    def pure(leaves, x):
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(x)

    f = export.export(jax.jit(pure))(leaves, X)
    return lambda m, x: f.call(jax.tree.leaves(nnx.state(m)), x)


# ----------------------------------------------------------- differentiation


def grad():
    f = nnx.grad(loss_and_output, has_aux=True)
    return lambda m, x: f(m, x)[::-1]


def value_and_grad():
    f = nnx.value_and_grad(loss_and_output, has_aux=True)

    def run(m, x):
        (_, y), grads = f(m, x)
        return y, grads

    return run


def vjp(m, x):
    y, pull = jax.vjp(lambda x: m(x), x)
    return y, pull(jnp.ones_like(y))[0]


def nnx_vjp(m, x):
    y, pull = nnx.vjp(call, m, x, graph_updates=False)
    return y, pull(jnp.ones_like(y))[1]


def jvp(m, x):
    return jax.jvp(lambda x: m(x), (x,), (jnp.ones_like(x),))


def nnx_jvp(m, x):
    tangents = jax.tree.map(jnp.zeros_like, m), jnp.ones_like(x)
    return nnx.jvp(call, (m, x), tangents, graph=False, graph_updates=False)


def custom_vjp():
    f = nnx.custom_vjp(lambda m, x: m(x), graph_updates=False)

    def forward(m, x):
        return m(x), (m, x)

    def backward(residuals, cotangent):
        m, x = residuals
        return nnx.vjp(call, m, x, graph_updates=False)[1](cotangent)

    f.defvjp(forward, backward)
    return lambda m, x: f(m, x)


# ----------------------------------------------------------------- mapped


def pmapped():
    f = nnx.pmap(call, in_axes=(None, 0))
    return lambda m, x: f(m, x[None])[0]


def jax_pmapped(model):
    f = jax.pmap(lambda graphdef, state, x: nnx.merge(graphdef, state)(x), in_axes=(None, None, 0),
                 static_broadcasted_argnums=0)  # fmt: skip
    return lambda m, x: f(*nnx.split(m), x[None])[0]


def mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def shard_mapped():
    data = PartitionSpec("data")
    f = nnx.shard_map(call, mesh=mesh(), in_specs=(PartitionSpec(), data), out_specs=data)
    return lambda m, x: f(m, x)


def jax_shard_mapped(model):
    data = PartitionSpec("data")

    def run(m, x):
        graphdef, state = nnx.split(m)
        merged = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
        specs = (PartitionSpec(), data)
        return jax.shard_map(merged, mesh=mesh(), in_specs=specs, out_specs=data)(state, x)

    return run


def split_rngs():
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    return nnx.split_rngs(splits=2)(nnx.vmap(call, in_axes=(axes, 0)))


# ----------------------------------------------------------- control flow


def scan():
    f = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return lambda m, x: f(x, m.layers)


def lax_scan(m, x):
    graphdef, state = nnx.split(m.layers)
    body = lambda x, state: (jnp.tanh(nnx.merge(graphdef, state)(x)), None)  # noqa: E731
    return jax.lax.scan(body, x, state)[0]


def cond(m, x):
    return nnx.cond(x.sum() < 1e9, call, lambda m, x: 2.0 * m(x), m, x)


def switch(m, x):
    other = lambda m, x: 2.0 * m(x)  # noqa: E731
    return nnx.switch(1, [other, call, other], m, x)


def while_loop(m, x):
    body = lambda c: (c[0], jnp.tanh(c[0](c[1])), c[2] + 1)  # noqa: E731
    return nnx.while_loop(lambda c: c[2] < 3, body, (m.first, x, 0))[1]


def fori_loop(m, x):
    return nnx.fori_loop(0, 3, lambda i, c: (c[0], jnp.tanh(c[0](c[1]))), (m.first, x))[1]


def lax_cond(m, x):
    return jax.lax.cond(x.sum() < 1e9, lambda x: m(x), lambda x: 2.0 * m(x), x)


def lax_while(m, x):
    body = lambda c: (jnp.tanh(m.first(c[0])), c[1] + 1)  # noqa: E731
    return jax.lax.while_loop(lambda c: c[1] < 3, body, (x, 0))[0]


def lax_fori(m, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(m.first(x)), x)


# -------------------------------------------------------- the model's own ways


def slices(m, x):
    for layer in m.layers[2:]:
        last = layer
    return last(nnx.Sequential(*m.layers[:2])(x))


def reference_to_call(model):
    taken = model.__call__
    return lambda m, x: taken(x)


def partial(model):
    f = functools.partial(call, model)
    return lambda m, x: f(x)


def partial_of_method(model):
    f = functools.partial(model.__call__)
    return lambda m, x: f(x)


def in_a_thread(m, x):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(m, x).result()


def clone(model):
    copied = nnx.clone(model)
    return lambda m, x: copied(x)


def view(model):
    seen = nnx.view(model)
    return lambda m, x: seen(x)


FEW = frozenset({"first"})
LOOP: dict[str, Any] = {"forward": loop_forward, "sites": FEW}
STACK: dict[str, Any] = {
    "model": lambda: Layers(nnx.Rngs(0)),
    "forward": layers_forward,
    "probe": "layers",
    "part": lambda m: m.layers,
    "sites": frozenset({"layers"}),
}
NOTHING_COMPUTED = dict.fromkeys(("output", "gradient", "watched"), "only shapes are computed")
NO_MODEL = dict.fromkeys(
    ("attributed", "instance", "output", "gradient", "watched"), "no NNX model to name"
)
INSIDE_ONLY = (INSIDE,)
"""For a construct that makes no function: both moments are the same."""

PLAIN, COMPILED, GRADIENTS = "As it stands", "Compiled", "Differentiated"
MAPPED, FLOW = "Mapped over axes and devices", "Control flow"
OWN, BRIDGE = "What the model or its caller holds", "Linen"


def row_of(name: str, group: str, build: Callable[[Any], Run], **options: Any) -> Construct:
    """A construct with only one moment."""
    return Construct(name, group, build, moments=INSIDE_ONLY, **options)


def plain_jit(model):
    return nnx.jit(call)


def held(cls: type) -> dict[str, Any]:
    return {"model": lambda: cls(nnx.Rngs(0)), "closes": (BEFORE, INSIDE)}


def decorated(cls: type) -> dict[str, Any]:
    return {"model": lambda: cls(nnx.Rngs(0))}


TWO = dict(model=sequential, forward=sequential_forward, probe="layers/0",
           part=lambda m: m.layers[0])  # fmt: skip
GRID = dict(model=lambda: Grid(nnx.Rngs(0)), forward=grid_forward, probe="blocks/1/0",
            part=lambda m: m.blocks[1][0],
            sites=frozenset(["", *(f"blocks/{i}/{j}" for i in (0, 1) for j in (0, 1))])
            )  # fmt: skip
MEMBERS = dict(model=members, forward=members_forward)
NOISY = dict(model=lambda: Noisy(nnx.Rngs(0)),
             sites=frozenset({"", "first", "second", "dropout"}))  # fmt: skip
NO_PART: Any = lambda model: None  # noqa: E731

CONSTRUCTS = [
    row_of("eager", PLAIN, always(call), quick=True),
    row_of("`nnx.eval_shape`", PLAIN, always(lambda m, x: nnx.eval_shape(call, m, x)),
           not_applicable=NOTHING_COMPUTED),
    row_of("`jax.eval_shape`", PLAIN, always(lambda m, x: jax.eval_shape(lambda x: m(x), x)),
           not_applicable=NOTHING_COMPUTED),
    row_of("another thread calls the model", PLAIN, always(in_a_thread), closes=(INSIDE,),
           writes=True, quick=True),
    Construct("`nnx.jit`", COMPILED, plain_jit, quick=True),
    Construct("`nnx.jit(graph=False)`, tree mode", COMPILED,
              once(lambda: nnx.jit(call, graph=False, graph_updates=False)), quick=True),
    Construct("`nnx.jit(graph_updates=False)`", COMPILED,
              once(lambda: nnx.jit(call, graph_updates=False))),
    Construct("`jax.jit`, `nnx.split` at each call, `nnx.merge` within", COMPILED, split_and_merge),
    Construct("`jax.jit`, a graphdef that was split earlier", COMPILED, older_graphdef,
              closes=(BEFORE,), quick=True),
    Construct("`jax.jit` that closes over the model", COMPILED, jitted_closure, closes=(BEFORE,),
              quick=True),
    Construct("`jax.jit` with the module as argument", COMPILED, once(lambda: jax.jit(call))),
    Construct("`nnx.cached_partial`", COMPILED, cached_partial, closes=(BEFORE,), writes=True,
              quick=True),
    Construct("`nnx.jit_partial`", COMPILED, jit_partial, closes=(BEFORE,)),
    Construct("`nnx.jit(...).lower(...).compile()`", COMPILED, compiled_nnx, quick=True),
    Construct("`jax.jit(...).lower(...).compile()`", COMPILED, compiled_jax),
    Construct("`jax.export`", COMPILED, exported, quick=True),
    Construct("`nnx.grad`", GRADIENTS, once(grad), quick=True),
    Construct("`nnx.value_and_grad`", GRADIENTS, once(value_and_grad)),
    row_of("`nnx.vjp`", GRADIENTS, always(nnx_vjp)),
    row_of("`nnx.jvp`", GRADIENTS, always(nnx_jvp)),
    row_of("`jax.vjp`", GRADIENTS, always(vjp)),
    row_of("`jax.jvp`", GRADIENTS, always(jvp), quick=True),
    Construct("`nnx.custom_vjp`", GRADIENTS, once(custom_vjp), quick=True),
    Construct("`nnx.remat`", GRADIENTS, once(lambda: nnx.remat(call)), quick=True),
    row_of("`jax.checkpoint`", GRADIENTS,
           always(lambda m, x: jax.checkpoint(lambda x: m(x))(x))),
    Construct("`nnx.vmap` over the batch", MAPPED, once(lambda: nnx.vmap(call, in_axes=(None, 0))),
              quick=True),
    Construct("`nnx.vmap` over stacked members", MAPPED,
              once(lambda: nnx.vmap(call, in_axes=(0, None))), **MEMBERS),
    Construct("`nnx.split_rngs` and `nnx.vmap`", MAPPED, once(split_rngs), **NOISY),
    row_of("`jax.vmap`", MAPPED, always(lambda m, x: jax.vmap(m)(x))),
    Construct("`nnx.pmap`", MAPPED, once(pmapped)),
    Construct("`jax.pmap`", MAPPED, jax_pmapped),
    Construct("`nnx.shard_map`", MAPPED, once(shard_mapped)),
    row_of("`jax.shard_map`", MAPPED, jax_shard_mapped, quick=True),
    Construct("`nnx.scan` over layers", FLOW, once(scan), quick=True, **STACK),
    row_of("`jax.lax.scan`, split and merged", FLOW, always(lax_scan), **STACK),
    row_of("`nnx.cond`", FLOW, always(cond), quick=True),
    row_of("`nnx.switch`", FLOW, always(switch)),
    row_of("`nnx.while_loop`", FLOW, always(while_loop), quick=True, **LOOP),
    row_of("`nnx.fori_loop`", FLOW, always(fori_loop), **LOOP),
    row_of("`jax.lax.cond`", FLOW, always(lax_cond)),
    row_of("`jax.lax.while_loop`", FLOW, always(lax_while), **LOOP),
    row_of("`jax.lax.fori_loop`", FLOW, always(lax_fori), **LOOP),
    Construct("`nnx.Sequential`", OWN, plain_jit, sites=frozenset({"", "layers/0", "layers/2"}),
              **TWO),
    Construct("slices of an `nnx.Sequential`", OWN, once(lambda: nnx.jit(slices)),
              sites=frozenset({"layers/0", "layers/2"}), quick=True, **TWO),
    Construct("modules in lists of lists", OWN, plain_jit, **GRID),
    row_of("a bound method that the model holds", OWN, always(call), **held(HoldsMethod)),
    Construct("a bound method that the model holds, under `nnx.jit`", OWN, plain_jit, writes=True,
              **held(HoldsMethod)),
    row_of("a closure that the model holds", OWN, always(call), **held(HoldsClosure)),
    Construct("a closure that the model holds, under `nnx.jit`", OWN, plain_jit, writes=True,
              **held(HoldsClosure)),
    Construct("a reference to a method", OWN, reference_to_call, closes=(BEFORE,), quick=True),
    Construct("`functools.partial` of a function", OWN, partial, closes=(BEFORE,)),
    Construct("`functools.partial` of a method", OWN, partial_of_method, closes=(BEFORE,)),
    row_of("a method decorated by `nnx.jit`", OWN, always(call), quick=True,
           **decorated(JitDecorated)),
    row_of("a method decorated by `nnx.remat`", OWN, always(call), **decorated(RematDecorated)),
    row_of("a method decorated by `nnx.vmap`", OWN, always(call), **decorated(VmapDecorated)),
    Construct("`nnx.clone` of the model", OWN, clone, closes=(BEFORE,), quick=True),
    Construct("`nnx.view` of the model", OWN, view, closes=(BEFORE,)),
    Construct("Linen modules inside `nnx.bridge.ToNNX`", BRIDGE, plain_jit, model=to_nnx,
              forward=to_nnx_forward, part=NO_PART, quick=True),
    Construct("NNX modules inside Linen inside `nnx.bridge.ToNNX`", BRIDGE, plain_jit,
              model=lambda: Around(nnx.Rngs(0)), forward=around_forward, probe="outer/net/first",
              part=NO_PART,
              sites=frozenset({"", "outer", "outer/net", "outer/net/first", "outer/net/second"})),
    row_of("NNX modules inside a Linen `apply`", BRIDGE, always(call), model=Applied,
           forward=applied_forward, part=NO_PART, not_applicable=NO_MODEL, quick=True),
]  # fmt: skip
