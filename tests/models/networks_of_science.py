"""Networks of graphs, fields and flows: sums over edges, spectra, solvers, inverses, densities."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from network import Network, gauss, squares, whole

WIDTH = 3


# -------------------------------------------------------------------------------- graphs


class Graph(NamedTuple):
    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    globals: Any = None


def a_graph() -> Graph:
    ends = jnp.array([0, 1, 2, 3, 0]), jnp.array([1, 2, 3, 0, 2])
    return Graph(gauss(4, WIDTH), gauss(5, 2, seed=1), *ends)


class MessagePassing(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.message = nnx.Linear(2 * WIDTH + 2, WIDTH, rngs=rngs)
        self.update = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, graph: Graph) -> Graph:
        sent = graph.nodes[graph.senders], graph.nodes[graph.receivers], graph.edges
        messages = nnx.relu(self.message(jnp.concatenate(sent, -1)))
        total = jax.ops.segment_sum(messages, graph.receivers, graph.nodes.shape[0])
        nodes, _ = self.update(graph.nodes, total)
        return graph._replace(nodes=nodes)


class GraphNet(nnx.Module):
    """Takes and returns a graph; fields that are no longer used are None."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([MessagePassing(rngs=rngs) for _ in range(2)])
        self.readout = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, graph: Graph) -> Graph:
        for layer in self.layers:
            graph = layer(graph)
        return graph._replace(edges=None, globals=self.readout(graph.nodes.mean(0)))


def message_passing_on_a_named_tuple() -> Network:
    return Network(GraphNet(rngs=nnx.Rngs(0)), (a_graph(),))


@flax.struct.dataclass
class Batch:
    nodes: jax.Array
    adjacency: jax.Array
    valid: jax.Array | None = None
    split: str = flax.struct.field(pytree_node=False, default="train")


class GraphAttention(nnx.Module):
    def __init__(self, heads: int, *, rngs: nnx.Rngs):
        self.proj = nnx.LinearGeneral(WIDTH, (heads, 2), rngs=rngs)
        self.a = nnx.Param(gauss(2, heads, 2, seed=2))
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, batch: Batch) -> Batch:
        h = self.proj(batch.nodes)
        to, of = (jnp.einsum("nhd,hd->nh", h, a) for a in self.a[...])
        scores = nnx.leaky_relu(to[:, None] + of[None])
        allowed = batch.adjacency if batch.valid is None else batch.adjacency & batch.valid
        p = nnx.softmax(jnp.where(allowed[..., None], scores, -1e9), axis=1)
        if batch.split == "train":
            p = self.drop(p)
        return batch.replace(nodes=jnp.einsum("nmh,mhd->nhd", p, h).mean(1))


def graph_attention_on_a_dataclass() -> Network:
    batch = Batch(gauss(4, WIDTH), whole(4, 4, below=2) > 0)
    return Network(GraphAttention(2, rngs=nnx.Rngs(0)), (batch,))


class SetBlock(nnx.Module):
    """Pooling by the attention of a learned seed; takes a mask or None."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.seed = nnx.Param(gauss(1, 4, seed=6))
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.rff = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None, activation: Any = nnx.relu) -> Any:
        seeds = jnp.broadcast_to(self.seed[...], (x.shape[0], 1, 4))
        return activation(self.rff(self.attn(seeds, x, mask=mask)[:, 0]))


def set_transformer_with_a_callable() -> Network:
    return Network(SetBlock(rngs=nnx.Rngs(0)), (gauss(2, 3, 4), None, jnp.tanh))


# ------------------------------------------------------------------------ fields and time


class Spectral(nnx.Module):
    def __init__(self, modes: int, *, rngs: nnx.Rngs):
        parts = nnx.initializers.normal(0.5)(rngs.params(), (2, modes, WIDTH, WIDTH))
        self.kernel = nnx.Param(jax.lax.complex(*parts))

    def __call__(self, x: Any) -> Any:
        found = jnp.fft.rfft(x, axis=1)[:, : self.kernel.shape[0]]
        return jnp.fft.irfft(
            jnp.einsum("bmi,mio->bmo", found, self.kernel[...]), x.shape[1], axis=1
        )


class Lift(nnx.Module):
    """Returns complex numbers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.phase = nnx.Linear(1, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.exp(1j * self.phase(x))


class Fno(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.lift = Lift(rngs=rngs)
        self.spectral = Spectral(2, rngs=rngs)
        self.local = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.lift(x)
        x = x.real + x.imag
        return nnx.gelu(self.spectral(x) + self.local(x))


def fourier_operator_with_complex_weights() -> Network:
    return Network(Fno(rngs=nnx.Rngs(0)), (gauss(2, 6, 1),))


class Field(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(WIDTH + 1, 4, rngs=rngs)
        self.out = nnx.Linear(4, WIDTH, rngs=rngs)

    def __call__(self, t: Any, y: Any) -> Any:
        return self.out(nnx.tanh(self.hidden(jnp.concatenate([y, jnp.full((len(y), 1), t)], -1))))


class NeuralOde(nnx.Module):
    """Runge-Kutta steps in a scan of jax that closes over the field."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.field = Field(rngs=rngs)

    def __call__(self, y: Any, times: Any) -> Any:
        def step(y: Any, span: Any) -> Any:
            t, h = span
            middle = y + h / 2 * self.field(t, y)
            y = y + h * self.field(t + h / 2, middle)
            return y, y

        return jax.lax.scan(step, y, (times[:-1], jnp.diff(times)))[1]


def neural_ode_in_a_scan() -> Network:
    return Network(NeuralOde(rngs=nnx.Rngs(0)), (gauss(2, WIDTH), jnp.array([0.0, 0.5, 1.0])))


class Equilibrium(nnx.Module):
    """Iterates to a fixed point in a while loop, then makes one step that is differentiated."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.inlet = nnx.Linear(2, WIDTH, rngs=rngs)
        init = nnx.initializers.normal(0.1)
        self.cell = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.inlet(x)

        def unfinished(carry: Any) -> Any:
            _, _, change, turns = carry
            return (change > 1e-2) & (turns < 8)

        def turn(carry: Any) -> Any:
            cell, z, _, turns = carry
            new = jnp.tanh(cell(z) + x)
            return cell, new, jnp.abs(new - z).max(), turns + 1

        start = (self.cell, jnp.zeros_like(x), jnp.inf, 0)
        z = jax.lax.stop_gradient(nnx.while_loop(unfinished, turn, start)[1])
        return jnp.tanh(self.cell(z) + x)


def equilibrium_by_a_while_loop() -> Network:
    def loss(model: Equilibrium, x: Any) -> Any:
        h = model.inlet(x)
        return squares(jnp.tanh(model.cell(h) + h))  # jax does not differentiate a while loop

    return Network(Equilibrium(rngs=nnx.Rngs(0)), (gauss(2, 2),), loss=loss)


class Pinn(nnx.Module):
    """The derivatives with respect to the input are part of the result."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.net = nnx.Sequential(
            nnx.Linear(2, 4, rngs=rngs), nnx.tanh, nnx.Linear(4, 1, rngs=rngs)
        )
        self.diffusivity = nnx.Param(jnp.array(0.1))

    def u(self, point: Any) -> Any:
        return self.net(point)[0]

    def __call__(self, points: Any) -> dict[str, Any]:
        first = jax.vmap(jax.grad(self.u))(points)
        second = jax.vmap(jax.hessian(self.u))(points)
        residual = first[:, 1] - self.diffusivity[...] * second[:, 0, 0]
        return {"u": jax.vmap(self.u)(points), "residual": residual}


def physics_with_derivatives_by_the_input() -> Network:
    return Network(Pinn(rngs=nnx.Rngs(0)), (gauss(3, 2),))


class Kernel(nnx.Module):
    """Has only scalars and no layers; takes a function as an argument."""

    def __init__(self):
        self.length, self.noise = nnx.Param(jnp.array(0.3)), nnx.Param(jnp.array(-1.0))

    def __call__(self, x: Any, y: Any, *, covariance: Callable[[Any], Any]) -> tuple[Any, Any]:
        distances = jnp.square((x[:, None] - x[None]) / jnp.exp(self.length[...])).sum(-1)
        k = covariance(distances) + jnp.exp(self.noise[...]) * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(k)
        alpha = jax.scipy.linalg.cho_solve((factor, True), y)
        return k @ alpha, 0.5 * y @ alpha + jnp.log(jnp.diag(factor)).sum()


def gaussian_process_of_scalars() -> Network:
    kwargs = {"covariance": lambda d: jnp.exp(-d / 2)}
    loss = lambda m, *args, **kwargs: m(*args, **kwargs)[1]  # noqa: E731
    return Network(Kernel(), (gauss(3, 2), gauss(3, seed=2)), kwargs, loss)


# ------------------------------------------------------------------------ distributions


class Coupling(nnx.Module):
    def __init__(self, flip: bool, *, rngs: nnx.Rngs):
        self.net = nnx.Linear(1, 2, rngs=rngs)
        self.flip = flip

    def parts(self, x: Any) -> tuple[Any, Any, Any]:
        kept, moved = (x[:, 1:], x[:, :1]) if self.flip else (x[:, :1], x[:, 1:])
        return kept, moved, self.net(kept)

    def joined(self, kept: Any, moved: Any) -> Any:
        return jnp.concatenate([moved, kept] if self.flip else [kept, moved], -1)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        kept, moved, p = self.parts(x)
        return self.joined(kept, moved * jnp.exp(jnp.tanh(p[:, :1])) + p[:, 1:]), jnp.tanh(p[:, 0])

    def inverse(self, y: Any) -> Any:
        kept, moved, p = self.parts(y)
        return self.joined(kept, (moved - p[:, 1:]) * jnp.exp(-jnp.tanh(p[:, :1])))


class Flow(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.bijectors = nnx.List([Coupling(bool(i % 2), rngs=rngs) for i in range(3)])
        self.rngs = rngs

    def __call__(self, x: Any) -> tuple[Any, Any]:
        total = jnp.zeros(len(x))
        for bijector in self.bijectors:
            x, log_det = bijector(x)
            total += log_det
        return x, total

    def log_prob(self, x: Any) -> Any:
        z, log_det = self(x)
        return -0.5 * jnp.square(z).sum(-1) + log_det

    def sample(self, count: int) -> Any:
        x = jax.random.normal(self.rngs.sample(), (count, 2))
        for bijector in reversed(self.bijectors):
            x = bijector.inverse(x)
        return x


def normalizing_flow_with_inverses() -> Network:
    def loss(model: Flow, x: Any) -> Any:
        return -model.log_prob(x).mean() + 0.1 * jnp.square(model.sample(2)).mean()

    return Network(Flow(rngs=nnx.Rngs(0, sample=1)), (gauss(3, 2),), loss=loss)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixture:
    weights: Any
    means: Any
    scales: Any

    def log_prob(self, y: Any) -> Any:
        each = -0.5 * jnp.square((y[:, None] - self.means) / self.scales) - jnp.log(self.scales)
        return nnx.logsumexp(each + jnp.log(self.weights), axis=-1)


class Density(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.body, self.head = nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 9, rngs=rngs)

    def __call__(self, x: Any) -> Mixture:
        a, b, c = jnp.split(self.head(nnx.tanh(self.body(x))), 3, -1)
        return Mixture(nnx.softmax(a), b, nnx.softplus(c) + 0.1)


def mixture_density() -> Network:
    loss = lambda m, x: -m(x).log_prob(x[:, 0]).mean()  # noqa: E731
    return Network(Density(rngs=nnx.Rngs(0)), (gauss(3, 2),), loss=loss)


class Hyper(nnx.Module):
    """Computes the weights of another layer, which is not a module."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(3, 2, rngs=rngs)
        self.weights = nnx.Linear(2, 2 * WIDTH + WIDTH, rngs=rngs)

    def __call__(self, x: Any, task: Any) -> Any:
        made = self.weights(self.embed(task))
        return x @ made[: 2 * WIDTH].reshape(2, WIDTH) + made[2 * WIDTH :]


class Merged(nnx.Module):
    """Holds a split layer, and merges it in the call."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Linear(2, 1, rngs=rngs)
        self.graphdef, state = nnx.split(nnx.Linear(2, WIDTH, rngs=rngs))
        self.state = nnx.data(state)

    def __call__(self, x: Any) -> Any:
        return nnx.merge(self.graphdef, self.state)(x) * self.scale(x)


def hypernetwork() -> Network:
    return Network(Hyper(rngs=nnx.Rngs(0)), (gauss(2, 2), jnp.array(1)))


SCIENCE: list[Callable[[], Network]] = [
    message_passing_on_a_named_tuple,
    graph_attention_on_a_dataclass,
    set_transformer_with_a_callable,
    fourier_operator_with_complex_weights,
    neural_ode_in_a_scan,
    equilibrium_by_a_while_loop,
    physics_with_derivatives_by_the_input,
    gaussian_process_of_scalars,
    normalizing_flow_with_inverses,
    mixture_density,
    hypernetwork,
]
