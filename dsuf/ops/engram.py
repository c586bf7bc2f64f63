"""Engram: n-gram hash rows of a token, and the gate by which their value enters the residual streams.

    t_s = class id of token p-s; before the sequence start and from a blocked token backwards, the pad class (sticky)
    h_1 = t_0 m_0, h_{i+1} = h_i xor t_i m_i;  row of (n-gram size i+1, head) = h_{i+1} mod prime + offset
    dot_j  = sum_d X_jd (q k)_jd key_jd / (rms(X_j) rms(key_j) sqrt(D))
    gate_j = sigmoid(sign(dot_j) sqrt(max(|dot_j|, 1e-6)));   X_j <- X_j + gate_j val

Source: reference model.md 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsuf.layout import BLOCKED
from dsuf.ops.norm import root_mean_square
from dsuf.spec import Spec

_SMALLEST_DOT = 1e-6


@dataclass(frozen=True)
class EngramHash:
    """Hash constants of one Engram layer: multipliers int64 [ngram], primes and offsets int64 [ngram - 1, heads]."""

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray


def hashes(spec: Spec) -> tuple[EngramHash, ...]:
    """The constants of every Engram layer, in layer order."""
    out = []
    for layer, primes in zip(spec.engram_layer_ids, primes_of(spec), strict=True):
        starts = np.concatenate([[0], np.cumsum(primes.ravel())[:-1]]).reshape(primes.shape)
        out.append(EngramHash(multipliers(spec, layer), primes, starts))
    return tuple(out)


def multipliers(spec: Spec, layer: int) -> np.ndarray:
    """Odd multipliers int64 [ngram] of a layer; a product with a class id stays below 2^63."""
    bound = (2**63 - 1) // spec.engram_compressed_vocab_size // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, spec.engram_max_ngram_size, np.int64)
    return 2 * drawn + 1


def primes_of(spec: Spec) -> list[np.ndarray]:
    """Bucket sizes int64 [ngram - 1, heads] of each layer: primes from engram_vocab_size on, none used twice."""
    used: set[int] = set()
    layers = []
    for _ in spec.engram_layer_ids:
        rows = []
        for _ in range(spec.engram_max_ngram_size - 1):
            candidate, row = spec.engram_vocab_size - 1, []
            while len(row) < spec.engram_n_heads:
                candidate += 1
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    row.append(candidate)
            rows.append(row)
        layers.append(np.array(rows, np.int64))
    return layers


def _is_prime(number: int) -> bool:
    """Trial division; the bucket sizes are at most some millions."""
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    divisors = np.arange(3, int(number**0.5) + 1, 2)
    return bool((number % divisors).all())


def ngram_classes(classes: np.ndarray, ngram: int, pad_class: int) -> np.ndarray:
    """Class ids [ngram - 1 + rows], history first, BLOCKED where nothing may look through -> t int64 [rows, ngram]."""
    rows = classes.shape[0] - ngram + 1
    t = np.empty((rows, ngram), np.int64)
    blocked = np.zeros(rows, bool)
    for back in range(ngram):
        ids = classes[ngram - 1 - back : ngram - 1 - back + rows]
        blocked |= ids == BLOCKED
        t[:, back] = np.where(blocked, pad_class, ids)
    return t


def table_rows(t: np.ndarray, constants: EngramHash) -> np.ndarray:
    """t int64 [rows, ngram] -> table rows int64 [rows, (ngram - 1) * heads]."""
    mixed = t[:, 0] * constants.multipliers[0]
    columns = []
    for i in range(1, t.shape[1]):
        mixed = mixed ^ (t[:, i] * constants.multipliers[i])
        columns.append(mixed[:, None] % constants.primes[i - 1] + constants.offsets[i - 1])
    return np.concatenate(columns, axis=1)


def gate(streams: np.ndarray, keys: np.ndarray, qk_weight: np.ndarray, eps: float) -> np.ndarray:
    """X and keys [rows, n, D], qk_weight [n, D] (q_weight * k_weight) -> gate [rows, n, 1]."""
    dot = np.vecdot(streams * qk_weight, keys)[..., None]
    dot /= root_mean_square(streams, eps)
    dot /= root_mean_square(keys, eps)
    dot *= streams.shape[-1] ** -0.5
    root = np.sqrt(np.maximum(np.abs(dot), _SMALLEST_DOT))
    return 1 / (1 + np.exp(-np.copysign(root, dot)))
