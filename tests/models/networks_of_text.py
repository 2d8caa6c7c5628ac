"""Networks that read and write sequences: decoders with caches, recurrences, experts, adapters."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from network import Network, gauss, squares, whole

VOCABULARY, WIDTH = 5, 4


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 2
    head_dim: int = 2
    dtype: Any = jnp.float32


# ------------------------------------------------------- a decoder with caches as arguments


class LayerCache(nnx.Module):
    """The keys and values so far and their count: passed by the caller, written by the layer."""

    def __init__(self, cfg: Config, batch: int, length: int):
        shape = (batch, length, cfg.heads, cfg.head_dim)
        self.k, self.v = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))
        self.size = length
        self.at = nnx.Variable(jnp.zeros((), jnp.int32))


class Attention(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        inward = functools.partial(
            nnx.Einsum, "BTD,DNH->BTNH", (WIDTH, cfg.heads, cfg.head_dim), rngs=rngs
        )
        self.q, self.k, self.v = inward(), inward(), inward()
        self.o = nnx.Einsum("BTNH,NHD->BTD", (cfg.heads, cfg.head_dim, WIDTH), rngs=rngs)
        self.q_norm = nnx.RMSNorm(cfg.head_dim, rngs=rngs)
        self.scale = cfg.head_dim**-0.5

    @property
    def heads(self) -> int:
        return self.q.kernel.shape[1]

    def __call__(self, x: Any, cache: LayerCache | None, mask: Any) -> Any:
        q, k, v = self.q_norm(self.q(x)) * self.scale, self.k(x), self.v(x)
        if cache is not None:
            at = (0, cache.at[...], 0, 0)
            cache.k.set_value(jax.lax.dynamic_update_slice(cache.k[...], k, at))
            cache.v.set_value(jax.lax.dynamic_update_slice(cache.v[...], v, at))
            steps = jnp.arange(cache.size)
            mask = steps[None] <= cache.at[...] + jnp.arange(x.shape[1])[:, None]
            k, v = cache.k[...], cache.v[...]
            cache.at.set_value(cache.at[...] + x.shape[1])
        scores = jnp.where(mask, jnp.einsum("BTNH,BSNH->BNTS", q, k), -1e9)
        return self.o(jnp.einsum("BNTS,BSNH->BTNH", nnx.softmax(scores), v))


class Gated(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = (
            linear(WIDTH, width), linear(WIDTH, width), linear(width, WIDTH)
        )  # fmt: skip

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn, self.mlp = Attention(cfg, rngs=rngs), Gated(WIDTH, rngs=rngs)

    def __call__(self, x: Any, cache: LayerCache | None, mask: Any) -> Any:
        x = x + self.attn(self.norm1(x), cache, mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nnx.Module):
    """The config is a static attribute; the embedding is used twice but never called."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.config = cfg
        self.embedder = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(cfg, rngs=rngs) for _ in range(cfg.layers)])
        self.final = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any, *, cache: list[LayerCache] | None = None) -> Any:
        x = self.embedder.embedding[...][tokens]
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        for i, layer in enumerate(self.layers):
            x = layer(x, None if cache is None else cache[i], mask)
        return self.embedder.attend(self.final(x))

    def init_cache(self, batch: int, length: int) -> list[LayerCache]:
        return [LayerCache(self.config, batch, length) for _ in range(self.config.layers)]


def decoder_with_caches_as_arguments() -> Network:
    model = Decoder(Config(), rngs=nnx.Rngs(0))
    return Network(model, (whole(2, 3),), {"cache": model.init_cache(2, 5)})


def decoder_without_its_cache() -> Network:
    return Network(Decoder(Config(), rngs=nnx.Rngs(0)), (whole(2, 3),), {"cache": None})


class Output(NamedTuple):
    logits: Any
    cache: Any = None


class Reader(nnx.Module):
    """Passes the caches on: the call returns modules."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.decoder = Decoder(Config(layers=1), rngs=rngs)

    def __call__(self, tokens: Any, cache: Any) -> Output:
        return Output(self.decoder(tokens, cache=cache), cache)


def decoder_that_returns_its_caches() -> Network:
    model = Reader(rngs=nnx.Rngs(0))
    loss = lambda m, tokens, cache: squares(m(tokens, cache).logits)  # noqa: E731
    return Network(model, (whole(2, 3), model.decoder.init_cache(2, 4)), loss=loss)


# --------------------------------------------------------------- caches of the layers' own


class Generator(nnx.Module):
    """Flax's attention in decode mode: one token per call."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, token: Any) -> Any:
        x = self.embed(token)
        return self.embed.attend(self.norm(x + self.attn(x)))


def attention_that_decodes() -> Network:
    model = Generator(rngs=nnx.Rngs(0))
    model.attn.init_cache((2, 4, WIDTH))
    return Network(model, (whole(2, 1),))


class Lazy(nnx.Module):
    """The cache is empty until the first call fills it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.Cache(None)

    def __call__(self, x: Any) -> Any:
        y = self.proj(x)
        earlier = self.seen.get_value()
        self.seen.set_value(y if earlier is None else earlier + y)
        return y if earlier is None else earlier + y


def cache_that_is_none_at_first() -> Network:
    return Network(Lazy(rngs=nnx.Rngs(0)), (gauss(2, WIDTH),))


# ----------------------------------------------------------------------------- recurrences


class Seq2Seq(nnx.Module):
    """One LSTM reads, and another one writes from its carry."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, 3, rngs=rngs)
        self.encoder = nnx.RNN(nnx.LSTMCell(3, WIDTH, rngs=rngs), return_carry=True, rngs=rngs)
        self.decoder = nnx.RNN(nnx.LSTMCell(3, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def encode(self, source: Any, lengths: Any = None) -> Any:
        return self.encoder(self.embed(source), seq_lengths=lengths)[0]

    def __call__(self, source: Any, target: Any, lengths: Any = None) -> dict[str, Any]:
        carry = self.encode(source, lengths)
        logits = self.head(self.decoder(self.embed(target), initial_carry=carry))
        return {"logits": logits, "ids": logits.argmax(-1)}


def seq2seq_of_lstms() -> Network:
    model = Seq2Seq(rngs=nnx.Rngs(0))
    return Network(model, (whole(2, 3), whole(2, 2)), {"lengths": jnp.array([2, 3])})


class Tagger(nnx.Module):
    """Both directions, then a linear-chain CRF whose partition function is a scan."""

    def __init__(self, *, rngs: nnx.Rngs, tags: int = 3):
        self.both = nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(3, 2, rngs=rngs), rngs=rngs),
            nnx.RNN(nnx.GRUCell(3, 2, rngs=rngs), rngs=rngs),
        )
        self.emit = nnx.Linear(4, tags, rngs=rngs)
        self.transitions = nnx.Param(gauss(tags, tags, seed=3))

    def log_likelihood(self, x: Any, tags: Any) -> Any:
        scores, between = self.emit(self.both(x)), self.transitions[...]
        chosen = jnp.take_along_axis(scores, tags[..., None], -1)[..., 0].sum(-1)
        chosen += between[tags[:, :-1], tags[:, 1:]].sum(-1)

        def forward(alpha: Any, emitted: Any) -> Any:
            alpha = nnx.logsumexp(alpha[:, :, None] + between, axis=1) + emitted
            return alpha, None

        alpha, _ = jax.lax.scan(forward, scores[:, 0], scores[:, 1:].swapaxes(0, 1))
        return chosen - nnx.logsumexp(alpha, axis=-1)

    def __call__(self, x: Any) -> Any:
        return self.emit(self.both(x)).argmax(-1)


def tagger_with_a_crf() -> Network:
    def loss(model: Tagger, x: Any) -> Any:
        return -model.log_likelihood(x, whole(2, 3, below=3)).mean()

    return Network(Tagger(rngs=nnx.Rngs(0)), (gauss(2, 3, 3),), loss=loss)


class StateSpace(nnx.Module):
    """A diagonal complex recurrence by an associative scan, as in S5 and Mamba."""

    def __init__(self, *, rngs: nnx.Rngs, states: int = 3):
        self.log_rate = nnx.Param(gauss(states, seed=1))
        self.angle = nnx.Param(gauss(states, seed=2))
        self.b = nnx.Param(gauss(states, WIDTH, 2, seed=3))
        self.c = nnx.Param(gauss(WIDTH, states, 2, seed=4))
        self.step = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (2,), padding="CAUSAL", feature_group_count=WIDTH,
                             rngs=rngs)  # fmt: skip

    def __call__(self, u: Any) -> Any:
        u = nnx.silu(self.conv(u))
        dt = nnx.softplus(self.step(u))
        rate = -jnp.exp(self.log_rate[...]) + 1j * self.angle[...]
        b, c = (jax.lax.complex(p[..., 0], p[..., 1]) for p in (self.b[...], self.c[...]))
        decay = jnp.exp(rate * dt)
        driven = jnp.einsum("btd,sd->bts", u.astype(b.dtype), b) * dt

        def joined(one: Any, two: Any) -> Any:
            return two[0] * one[0], two[0] * one[1] + two[1]

        _, states = jax.lax.associative_scan(joined, (decay, driven), axis=1)
        return 2 * jnp.einsum("bts,ds->btd", states, c).real


class Mamba(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.mixers = nnx.List([StateSpace(rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            x = x + mixer(norm(x))
        return x


def state_space_by_an_associative_scan() -> Network:
    return Network(Mamba(rngs=nnx.Rngs(0)), (gauss(2, 4, WIDTH),))


class Mixing(NamedTuple):
    """The state that a layer carries from one chunk to the next."""

    last: Any
    numerator: Any
    denominator: Any


class TimeMix(nnx.Module):
    """The RWKV layer: takes the state as an argument and returns it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.mu = nnx.Param(jnp.full((WIDTH,), 0.5))
        self.decay = nnx.Param(-jnp.ones((WIDTH,)))
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.k, self.v, self.r, self.out = linear(), linear(), linear(), linear()

    def __call__(self, x: Any, state: Mixing) -> tuple[Any, Mixing]:
        shifted = jnp.concatenate([state.last[:, None], x[:, :-1]], 1)
        mixed = x * self.mu + shifted * (1 - self.mu[...])
        k, v, r = jnp.exp(self.k(mixed)), self.v(mixed), nnx.sigmoid(self.r(x))
        keep = jnp.exp(-jnp.exp(self.decay[...]))

        def step(carry: Any, inputs: Any) -> Any:
            (a, b), (k, v) = carry, inputs
            a, b = keep * a + k * v, keep * b + k
            return (a, b), a / (b + 1e-6)

        over = (k.swapaxes(0, 1), v.swapaxes(0, 1))
        (a, b), mixed = jax.lax.scan(step, (state.numerator, state.denominator), over)
        return self.out(r * mixed.swapaxes(0, 1)), Mixing(x[:, -1], a, b)


class Rwkv(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([TimeMix(rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any, states: list[Mixing]) -> tuple[Any, list[Mixing]]:
        left = []
        for block, state in zip(self.blocks, states, strict=True):
            y, state = block(self.norm(x), state)
            left.append(state)
            x = x + y
        return x, left


def recurrence_whose_state_is_a_named_tuple() -> Network:
    zeros = [Mixing(*[jnp.zeros((2, WIDTH))] * 3) for _ in range(2)]
    return Network(Rwkv(rngs=nnx.Rngs(0)), (gauss(2, 3, WIDTH), zeros))


# ------------------------------------------------------------------------ experts, adapters


class Load(nnx.Variable):
    """How often each expert was chosen: neither a parameter nor a BatchStat."""


class Router(nnx.Module):
    def __init__(self, experts: int, top: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        self.load = Load(jnp.zeros((experts,), jnp.int32))
        self.top = top

    def __call__(self, x: Any) -> tuple[Any, Any]:
        weights, chosen = jax.lax.top_k(nnx.softmax(self.gate(x)), self.top)
        self.load[...] += jnp.bincount(chosen.ravel(), length=self.load.shape[0])
        return weights / weights.sum(-1, keepdims=True), chosen


class Experts(nnx.Module):
    """Each array holds all experts, which einsum runs."""

    def __init__(self, experts: int, *, rngs: nnx.Rngs):
        self.router = Router(experts, 2, rngs=rngs)
        self.up = nnx.Param(0.5 * gauss(experts, WIDTH, 3, seed=5))
        self.down = nnx.Param(0.5 * gauss(experts, 3, WIDTH, seed=6))
        self.shared = Gated(3, rngs=rngs)

    def __call__(self, x: Any) -> tuple[Any, dict[str, Any]]:
        weights, chosen = self.router(x)
        sent = jnp.einsum("btk,btke->bte", weights, nnx.one_hot(chosen, self.up.shape[0]))
        hidden = nnx.gelu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        y = jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], sent)
        balance = (sent.mean((0, 1)) ** 2).sum()
        return x + y + self.shared(x), {"balance": balance, "chosen": chosen, "dropped": None}


def mixture_of_experts_with_a_router() -> Network:
    return Network(Experts(3, rngs=nnx.Rngs(0)), (gauss(2, 3, WIDTH),))


class Adapted(nnx.Module):
    """Flax's LoRA around one layer, and a custom wrapper around another."""

    def __init__(self, *, rngs: nnx.Rngs):
        first, second = nnx.Linear(WIDTH, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)
        self.first = nnx.LoRA(WIDTH, 1, 3, base_module=first, b_initializer=nnx.initializers.ones,
                              rngs=rngs)  # fmt: skip
        self.second = nnx.LoRALinear(3, 2, lora_rank=1, rngs=rngs)
        self.third = second

    def __call__(self, x: Any) -> Any:
        y = nnx.tanh(self.first(x))
        return self.second(y) + self.third(y)


def adapters_on_a_frozen_base() -> Network:
    return Network(Adapted(rngs=nnx.Rngs(0)), (gauss(3, WIDTH),), wrt=nnx.LoRAParam)


# ----------------------------------------------------------- stacked layers with own caches


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Cache(jnp.zeros((2, WIDTH)))

    def __call__(self, x: Any, mode: str, positions: Any = None) -> Any:
        y = self.mlp(self.norm(x if positions is None else x + positions))
        if mode == "train":
            y = self.drop(y)
        else:
            self.last[...] = 0.5 * self.last + y
        return x + y


class Stack(nnx.Module):
    """Equal layers made under vmap, run under scan and remat; a string chooses the mode."""

    def __init__(self, *, rngs: nnx.Rngs, depth: int = 3):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.layers = made(rngs)

    def __call__(self, x: Any, *, model_mode: str, decoder_positions: Any = None) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x: Any, layer: Block) -> Any:
            return layer(x, model_mode, decoder_positions)

        return through(x, self.layers)


def stack_under_scan_and_remat_in_training() -> Network:
    return Network(Stack(rngs=nnx.Rngs(0)), (gauss(2, WIDTH),), {"model_mode": "train"})


def stack_under_scan_that_fills_its_caches() -> Network:
    kwargs = {"model_mode": "prefill", "decoder_positions": gauss(2, WIDTH, seed=9)}
    return Network(Stack(rngs=nnx.Rngs(0)), (gauss(2, WIDTH),), kwargs)


TEXT: list[Callable[[], Network]] = [
    decoder_with_caches_as_arguments,
    decoder_without_its_cache,
    decoder_that_returns_its_caches,
    attention_that_decodes,
    cache_that_is_none_at_first,
    seq2seq_of_lstms,
    tagger_with_a_crf,
    state_space_by_an_associative_scan,
    recurrence_whose_state_is_a_named_tuple,
    mixture_of_experts_with_a_router,
    adapters_on_a_frozen_base,
    stack_under_scan_and_remat_in_training,
    stack_under_scan_that_fills_its_caches,
]
