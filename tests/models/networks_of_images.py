"""Networks for images: patches, diffusion, codes, towers, detectors, every normalisation."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from network import Network, gauss, whole

WIDTH = 4


exact_gelu = functools.partial(nnx.gelu, approximate=False)


def pooled(x: Any) -> Any:
    return x.mean((1, 2))


class Attend(nnx.Module):
    """A transformer block, for one set of tokens or across two sets."""

    def __init__(self, *, rngs: nnx.Rngs, **more: Any):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs, **more) for _ in range(2))
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs, **more)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 6, rngs=rngs, **more),
            exact_gelu,
            nnx.Linear(6, WIDTH, rngs=rngs, **more),
        )

    def __call__(self, x: Any, other: Any = None, *, mask: Any = None) -> Any:
        x = x + self.attn(self.norm1(x), other, mask=mask)
        return x + self.mlp(self.norm2(x))


class Vit(nnx.Module):
    """A class token, register tokens, and a mask token that evaluation does not use."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.patch = nnx.Conv(1, WIDTH, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(gauss(1, 1, WIDTH, seed=1))
        self.registers = nnx.Param(gauss(1, 2, WIDTH, seed=2))
        self.mask_token = nnx.Param(jnp.zeros((WIDTH,)))
        self.blocks = nnx.List([Attend(rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head: nnx.Linear | None = nnx.Linear(WIDTH, 3, rngs=rngs)

    def tokens(self, x: Any, mask: Any) -> Any:
        x = self.patch(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        if mask is not None:
            x = jnp.where(mask[..., None], self.mask_token[...], x)
        first = [jnp.tile(p[...], (x.shape[0], 1, 1)) for p in (self.cls_token, self.registers)]
        return jnp.concatenate([*first, x], 1)

    def __call__(self, x: Any, mask: Any = None, *, head: bool = True) -> dict[str, Any]:
        x = self.tokens(x, mask)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x[:, 0]) if head and self.head is not None else None
        return {"cls": x[:, 0], "patches": x[:, 3:], "logits": logits}


def vit_with_tokens() -> Network:
    return Network(Vit(rngs=nnx.Rngs(0)), (gauss(2, 4, 4, 1),))


def vit_with_a_mask_and_no_head() -> Network:
    model = Vit(rngs=nnx.Rngs(0))
    model.head = None
    return Network(model, (gauss(2, 4, 4, 1), whole(2, 4, below=2) > 0), {"head": False})


class Modulated(nnx.Module):
    """The DiT block: scale, shift and gate are computed from the time."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.ada = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, c: Any) -> Any:
        shift, scale, gate = jnp.split(self.ada(nnx.silu(c))[:, None], 3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class Dit(nnx.Module):
    """Flow matching: the model's own stream drops labels; a call may be in training mode."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.labels = nnx.Embed(4, WIDTH, rngs=rngs)
        self.time = nnx.Sequential(nnx.Linear(2, WIDTH, rngs=rngs), nnx.silu)
        self.blocks = nnx.List([Modulated(rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, WIDTH, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x: Any, t: Any, labels: Any, *, train: bool = False) -> Any:
        if train:
            dropped = jax.random.bernoulli(self.rngs.labels(), 0.5, labels.shape)
            labels = jnp.where(dropped, 3, labels)
        c = self.time(jnp.stack([jnp.sin(t), jnp.cos(t)], -1)) + self.labels(labels)
        for block in self.blocks:
            x = nnx.remat(Modulated.__call__)(block, x, c)
        return self.out(x)

    def loss(self, x: Any, labels: Any) -> Any:
        t = jax.random.uniform(self.rngs.noise(), (x.shape[0],))
        noise = jax.random.normal(self.rngs.noise(), x.shape)
        at = t[:, None, None]
        velocity = self((1 - at) * noise + at * x, t, labels, train=True)
        return jnp.square(velocity - (x - noise)).mean()


def dit_in_flow_matching() -> Network:
    args = (gauss(2, 3, WIDTH), jnp.array([0.1, 0.7]), whole(2, below=3))

    def loss(model: Dit, x: Any, t: Any, labels: Any) -> Any:
        return model.loss(x, labels)

    return Network(Dit(rngs=nnx.Rngs(0, labels=1, noise=2)), args, loss=loss)


class Unet(nnx.Module):
    """Skips are in a list; the down and up parts are pairs of modules in lists of lists."""

    def __init__(self, *, rngs: nnx.Rngs):
        widths = (2, 4)
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        norm = functools.partial(nnx.GroupNorm, num_groups=2, rngs=rngs)
        self.stem = conv(1, 2)
        self.downs = nnx.List([
            nnx.List([conv(w, w), norm(w), conv(w, 2 * w, strides=2)])
            for w in widths
        ])  # fmt: skip
        self.middle = conv(8, 8)
        self.ups = nnx.List([
            nnx.List([nnx.ConvTranspose(2 * w, w, (2, 2), strides=2, rngs=rngs), conv(2 * w, w)])
            for w in reversed(widths)
        ])  # fmt: skip
        self.out = conv(2, 1)

    def __call__(self, x: Any) -> Any:
        x, skips = self.stem(x), []
        for conv, norm, down in self.downs:
            x = nnx.silu(norm(conv(x)))
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, conv in self.ups:
            x = conv(jnp.concatenate([up(x), skips.pop()], -1))
        return self.out(nnx.silu(x))


def unet_with_skips() -> Network:
    return Network(Unet(rngs=nnx.Rngs(0)), (gauss(2, 4, 4, 1),))


class Codes(nnx.Variable):
    """A codebook whose entries follow the vectors assigned to them."""


@flax.struct.dataclass
class Quantised:
    z: jax.Array
    ids: jax.Array
    loss: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="vq")


class Quantiser(nnx.Module):
    def __init__(self, codes: int = 3):
        self.codebook = Codes(gauss(codes, WIDTH, seed=4))
        self.counts = Codes(jnp.ones((codes,)))
        self.training = True

    def __call__(self, z: Any) -> Quantised:
        distances = jnp.square(z[..., None, :] - self.codebook[...]).sum(-1)
        ids = distances.argmin(-1)
        hard = nnx.one_hot(ids.reshape(-1), self.counts.shape[0])
        q = self.codebook[...][ids]
        if self.training:
            flat = jax.lax.stop_gradient(z).reshape(-1, WIDTH)
            self.counts[...] = 0.9 * self.counts + 0.1 * hard.sum(0)
            self.codebook[...] = 0.9 * self.codebook + 0.1 * (hard.T @ flat) / self.counts[:, None]
        loss = jnp.square(z - jax.lax.stop_gradient(q)).mean()
        return Quantised(z + jax.lax.stop_gradient(q - z), ids, loss)


class Vqvae(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.encoder = nnx.Conv(1, WIDTH, (2, 2), strides=2, rngs=rngs)
        self.quantiser = Quantiser()
        self.decoder = nnx.ConvTranspose(WIDTH, 1, (2, 2), strides=2, rngs=rngs)

    def __call__(self, x: Any) -> tuple[Any, Quantised]:
        found = self.quantiser(self.encoder(x))
        return self.decoder(found.z), found


def vqvae_whose_codes_move() -> Network:
    def loss(model: Vqvae, x: Any) -> Any:
        y, found = model(x)
        return jnp.square(y - x).mean() + 0.25 * found.loss

    return Network(Vqvae(rngs=nnx.Rngs(0)), (gauss(2, 4, 4, 1),), loss=loss)


class Clip(nnx.Module):
    """Two towers with methods of their own, a temperature without axes."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.vision = nnx.Sequential(nnx.Conv(1, 2, (2, 2), rngs=rngs), nnx.relu, pooled)
        self.text = nnx.Embed(5, WIDTH, rngs=rngs)
        self.to_vision = nnx.Linear(2, 3, use_bias=False, rngs=rngs)
        self.to_text = nnx.Linear(WIDTH, 3, use_bias=False, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.array(1.5))

    def encode_image(self, x: Any) -> Any:
        y = self.to_vision(self.vision(x))
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    def encode_text(self, ids: Any) -> Any:
        y = self.to_text(self.text(ids)[:, -1])
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    def __call__(self, images: Any, ids: Any) -> tuple[Any, Any]:
        logits = (
            jnp.exp(self.logit_scale[...]) * self.encode_image(images) @ self.encode_text(ids).T
        )
        return logits, logits.T


def clip_of_two_towers() -> Network:
    def loss(model: Clip, images: Any, ids: Any) -> Any:
        each = (optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(2)).mean()
                for x in model(images, ids))  # fmt: skip
        return sum(each) / 2

    return Network(Clip(rngs=nnx.Rngs(0)), (gauss(2, 3, 3, 1), whole(2, 3)), loss=loss)


class Detector(nnx.Module):
    """A pyramid: returns dicts of lists with NumPy anchors, names and numbers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.levels = nnx.List(
            [nnx.Conv(1 + i, 2 + i, (2, 2), strides=2, rngs=rngs) for i in range(2)]
        )
        self.heads = nnx.Dict(
            boxes=nnx.List([nnx.Conv(2 + i, 4, (1, 1), rngs=rngs) for i in range(2)]),
            scores=nnx.List([nnx.Conv(2 + i, 2, (1, 1), rngs=rngs) for i in range(2)]),
        )
        self.anchors = np.array([[1.0, 2.0, 2.0, 1.0]], np.float32)

    def __call__(self, x: Any) -> dict[str, Any]:
        found: dict[str, Any] = {name: [] for name in ("boxes", "scores")}
        for i, level in enumerate(self.levels):
            x = nnx.relu(level(x))
            for name in found:
                found[name].append(self.heads[name][i](x))
        found["boxes"] = [b * self.anchors for b in found["boxes"]]
        return {
            **found,
            "labels": ("cat", "dog"),
            "stride": 4,
            "anchors": self.anchors,
            "nothing": None,
        }


def detector_with_a_tree_of_outputs() -> Network:
    return Network(Detector(rngs=nnx.Rngs(0)), (gauss(2, 4, 4, 1),))


class Capsules(nnx.Module):
    """Routing by agreement, in a loop of a fixed number of turns."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.primary = nnx.Linear(3, 6, rngs=rngs)
        self.votes = nnx.Param(0.3 * gauss(3, 2, 2, 4, seed=7))

    def __call__(self, x: Any) -> Any:
        u = self.primary(x).reshape(-1, 3, 2)
        votes = jnp.einsum("bid,ijdo->bijo", u, self.votes[...])

        def squashed(s: Any) -> Any:
            square = jnp.square(s).sum(-1, keepdims=True)
            return s * jnp.sqrt(square + 1e-6) / (1 + square)

        def turn(_: Any, logits: Any) -> Any:
            v = squashed((nnx.softmax(logits, 2)[..., None] * votes).sum(1))
            return logits + jnp.einsum("bijo,bjo->bij", votes, v)

        logits = jax.lax.fori_loop(0, 2, turn, jnp.zeros(votes.shape[:3]))
        return jnp.linalg.norm(
            squashed((nnx.softmax(logits, 2)[..., None] * votes).sum(1)), axis=-1
        )


def capsules_with_routing() -> Network:
    return Network(Capsules(rngs=nnx.Rngs(0)), (gauss(2, 3),))


class Siamese(nnx.Module):
    """One tower, called for each of a pair and once for both."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.tower = nnx.Sequential(
            nnx.Linear(3, WIDTH, rngs=rngs), nnx.tanh, nnx.Linear(WIDTH, 2, rngs=rngs)
        )

    def __call__(self, pair: tuple[Any, Any]) -> Any:
        a, b = (self.tower(x) for x in pair)
        return jnp.square(a - b).sum(-1) + self.tower(jnp.concatenate(pair)).mean()


def siamese_pair() -> Network:
    return Network(Siamese(rngs=nnx.Rngs(0)), ((gauss(2, 3), gauss(4, 3, seed=2)[:2]),))


class Critic(nnx.Module):
    """Wrapped layers: the spectral norm keeps state, the weight norm has its own kernel."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.SpectralNorm(nnx.Linear(3, WIDTH, rngs=rngs), rngs=rngs)
        self.second = nnx.WeightNorm(nnx.Linear(WIDTH, 2, rngs=rngs), rngs=rngs)
        self.norm = nnx.InstanceNorm(2, rngs=rngs)

    def __call__(self, x: Any, update: bool = True) -> Any:
        x = nnx.leaky_relu(self.first(x, update_stats=update))
        return self.norm(self.second(x))


def critic_with_normalised_weights() -> Network:
    # what is normalised has a mean square of one, whatever the parameters: its gradient is rounding
    far = gauss(2, 3, 2, seed=2)
    x, loss = gauss(2, 3, 3), lambda m, *args: jnp.square(m(*args) - far).mean()
    return Network(Critic(rngs=nnx.Rngs(0)), (x,), loss=loss)


class Separable(nnx.Module):
    """Grouped convolutions, a squeeze, BatchNorm, and a branch that is dropped as a whole."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.depth = nnx.Conv(
            width, width, (3, 3), feature_group_count=width, use_bias=False, rngs=rngs
        )
        self.bn = nnx.BatchNorm(width, rngs=rngs)
        self.squeeze = nnx.Sequential(
            nnx.Linear(width, 2, rngs=rngs), nnx.silu,
            nnx.Linear(2, width, rngs=rngs), nnx.sigmoid,
        )  # fmt: skip
        self.point = nnx.Conv(width, width, (1, 1), rngs=rngs)
        self.drop = nnx.Dropout(0.5, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = nnx.hard_swish(self.bn(self.depth(x)))
        y = y * self.squeeze(y.mean((1, 2)))[:, None, None]
        return x + self.drop(self.point(y))


def separable_convolutions_in_training() -> Network:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*[Separable(2, rngs=rngs) for _ in range(2)], pooled)
    model.train()
    return Network(model, (gauss(3, 3, 3, 2),))


class CausalConv(nnx.Module, pytree=False):
    """Keeps earlier frames in a plain list, as video decoders do, not in a pytree."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.convs = [nnx.Conv(2, 2, (2,), padding="VALID", rngs=rngs) for _ in range(2)]
        self.gain = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any, earlier: list[Any] | None = None) -> tuple[Any, list[Any]]:
        kept = []
        for i, conv in enumerate(self.convs):
            before = jnp.zeros_like(x[:, :1]) if earlier is None else earlier[i]
            kept.append(x[:, -1:])
            x = nnx.elu(conv(jnp.concatenate([before, x], 1)))
        return x * self.gain, kept


def modules_in_a_plain_list() -> Network:
    return Network(
        CausalConv(rngs=nnx.Rngs(0)), (gauss(2, 3, 2),), {"earlier": [jnp.ones((2, 1, 2))] * 2}
    )


class Masked(nnx.Module):
    """A masked autoencoder in bfloat16 with a float32 head; it draws the visible patches."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.block = Attend(rngs=rngs, dtype=jnp.bfloat16)
        self.mask_token = nnx.Param(gauss(WIDTH, seed=3))
        self.head = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: Any) -> dict[str, Any]:
        order = jnp.argsort(jax.random.uniform(self.rngs.mask(), x.shape[:2]))
        seen = jnp.take_along_axis(x, order[:, :2, None], 1)
        y = self.block(seen.astype(jnp.bfloat16)).astype(jnp.float32)
        rest = jnp.broadcast_to(self.mask_token[...], (x.shape[0], x.shape[1] - 2, WIDTH))
        back = jnp.argsort(order)
        full = jnp.take_along_axis(jnp.concatenate([y, rest], 1), back[..., None], 1)
        return {"patches": self.head(full), "mask": back >= 2, "order": order}


def masked_autoencoder_in_two_precisions() -> Network:
    return Network(Masked(rngs=nnx.Rngs(0, mask=1)), (gauss(2, 4, WIDTH),))


class Perceiver(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.latents = nnx.Param(gauss(2, WIDTH, seed=8))
        self.cross, self.own = Attend(rngs=rngs), Attend(rngs=rngs)
        self.turns = 2

    def __call__(self, x: Any, *, valid: Any = None) -> Any:
        mask = None if valid is None else valid[:, None, None, :]
        z = jnp.broadcast_to(self.latents[...], (x.shape[0], 2, WIDTH))
        for _ in range(self.turns):
            z = self.own(self.cross(z, x, mask=mask))
        return z.mean(1)


def perceiver_with_shared_turns() -> Network:
    valid = jnp.array([[True, True, False], [True, True, True]])
    return Network(Perceiver(rngs=nnx.Rngs(0)), (gauss(2, 3, WIDTH),), {"valid": valid})


class Distilled(nnx.Module):
    """Student and teacher: a method updates the teacher, and each call its centre."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.student = nnx.Sequential(
            nnx.Linear(3, WIDTH, rngs=rngs), nnx.gelu, nnx.Linear(WIDTH, 3, rngs=rngs)
        )
        self.teacher = nnx.clone(self.student)
        self.centre = nnx.BatchStat(jnp.zeros(3))

    def __call__(self, one: Any, two: Any) -> Any:
        target = jax.lax.stop_gradient(self.teacher(two))
        self.centre[...] = 0.9 * self.centre + 0.1 * target.mean(0)
        return nnx.softmax(target - self.centre), nnx.log_softmax(self.student(one))

    def follow(self) -> None:
        mine, theirs = nnx.state(self.student), nnx.state(self.teacher)
        nnx.update(self.teacher, jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, mine, theirs))


def teacher_that_follows_its_student() -> Network:
    def loss(model: Distilled, one: Any, two: Any) -> Any:
        target, found = model(one, two)
        model.follow()
        return -(target * found).sum(-1).mean()

    args = (gauss(2, 3), gauss(2, 3, seed=5))
    of_student = nnx.All(nnx.Param, nnx.PathContains("student"))
    return Network(Distilled(rngs=nnx.Rngs(0)), args, loss=loss, wrt=of_student)


IMAGES: list[Callable[[], Network]] = [
    vit_with_tokens,
    vit_with_a_mask_and_no_head,
    dit_in_flow_matching,
    unet_with_skips,
    vqvae_whose_codes_move,
    clip_of_two_towers,
    detector_with_a_tree_of_outputs,
    capsules_with_routing,
    siamese_pair,
    critic_with_normalised_weights,
    separable_convolutions_in_training,
    modules_in_a_plain_list,
    masked_autoencoder_in_two_precisions,
    perceiver_with_shared_turns,
    teacher_that_follows_its_student,
]
