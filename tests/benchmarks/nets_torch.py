"""The models of `nets` in PyTorch, and what is hung on them there: hooks with `torch.histc`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tests.benchmarks.nets import CLASSES


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(x).reshape(batch, length, self.heads, 3 * size).chunk(3, dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        keep = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
        scores = scores.masked_fill(~keep, -1e9)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return self.out(mixed.reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers with a gelu between them."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and a feed-forward network, each normed before and added."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), FeedForward(width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens to class scores. There is no scan in PyTorch: `stacked` makes no difference."""

    def __init__(self, width: int, layers: int, vocabulary: int, stacked: bool = False):
        super().__init__()
        heads = max(width // 64, 1)
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two normed convolutions added to what came in."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    """Stages of residual blocks, each at half the resolution and twice the width."""

    def __init__(self, width: int, stages: int, blocks: int):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(*[Residual(width << i) for _ in range(blocks)]) for i in range(stages)
        )
        self.widen = nn.ModuleList(
            nn.Conv2d(width << i, width << (i + 1), 3, stride=2, padding=1)
            for i in range(stages - 1)
        )
        self.head = nn.Linear(width << (stages - 1), CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.stem(x.movedim(-1, 1))
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i < len(self.widen):
                x = self.widen[i](x)
        return self.head(x.mean(dim=(2, 3)))


class MLP(nn.Module):
    """Linear layers with a relu after each but the last."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        sizes = [width] * layers + [CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class Hooks:
    """Mean, standard deviation, extremes and 64 bins of every output (and gradient of it)."""

    def __init__(self, model: nn.Module, *, gradients: bool):
        self.found: list[Any] = []
        self.handles = [m.register_forward_hook(self._forward) for m in model.modules()]
        if gradients:
            self.handles += [m.register_full_backward_hook(self._back) for m in model.modules()]

    def _forward(self, module: Any, args: Any, out: Any) -> None:
        self._see(out)

    def _back(self, module: Any, grad_input: Any, grad_output: Any) -> None:
        self._see(grad_output[0])

    def _see(self, x: Any) -> None:
        if x is None:
            return
        x = x.detach()
        low, high = torch.aminmax(x)
        counts = torch.histc(x.float(), 64, float(low), float(high))
        self.found.append((counts, x.mean(), x.std(), low, high))

    def take(self) -> list[Any]:
        """What was found since the last call."""
        found, self.found = self.found, []
        return found

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
