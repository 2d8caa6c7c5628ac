"""The measures of an effect in NumPy and float64, by their formulas."""

from __future__ import annotations

import numpy as np


def relative_oracle(clean, perturbed):
    """`|perturbed - clean| / |clean|` over lists of arrays."""
    a = np.concatenate([np.ravel(x).astype(np.complex128) for x in clean])
    b = np.concatenate([np.ravel(x).astype(np.complex128) for x in perturbed])
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def kl_oracle(clean, perturbed):
    """The mean KL(clean || perturbed) of logits."""

    def log_softmax(x):
        x = np.asarray(x).astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(clean), log_softmax(perturbed)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def top1_oracle(clean, perturbed):
    """The fraction of rows whose likeliest class changed."""
    return float(np.mean(np.argmax(clean, -1) != np.argmax(perturbed, -1)))
