"""Indexer: scores of all compressed entries for one query row, the best entries, and the candidate blocks.

    score_j = sum_h relu(qI_h . K_j) w_h            for visible j, -inf otherwise
    selection = the index_topk largest; among equal scores the lowest entry wins
    candidates = the candidate_topk_blocks best blocks by their largest score, the newest visible block forced in

Source: reference model.md 3.6.
"""

from __future__ import annotations

import numpy as np

KEY_TILE = 64  # entries scored by one product, so that its shape does not depend on the length of the cache
_SCORES_AT_ONCE = 1 << 22  # per-head scores held at a time


def key_tiles(entries: int, least: int = 1) -> int:
    """Tiles that hold `entries` entries, and at least `least` of them."""
    return -(-max(entries, least) // KEY_TILE)


def index_scores(q: np.ndarray, head_weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """q [rows, heads, di], head_weights [rows, heads], keys [tiles * 64, di] -> [rows, tiles * 64], nothing masked."""
    rows, heads, width = q.shape
    tiles = keys.reshape(-1, KEY_TILE, width).swapaxes(1, 2)  # [tiles, di, 64]
    out = np.empty((rows, tiles.shape[0], 1, KEY_TILE), q.dtype)
    step = max(1, _SCORES_AT_ONCE // (tiles.shape[0] * heads * KEY_TILE))
    for at in range(0, rows, step):
        rest = slice(at, at + step)
        per_head = np.matmul(q[rest, None], tiles)  # [rows, tiles, heads, 64]
        np.maximum(per_head, 0, out=per_head)
        np.matmul(head_weights[rest, None, None, :], per_head, out=out[rest])
    return out.reshape(rows, -1)


def mask_invisible(scores: np.ndarray, visible: np.ndarray) -> None:
    """In place: -inf from entry visible[row] on; scores [rows, entries], visible int [rows]."""
    scores[np.arange(scores.shape[1]) >= visible[:, None]] = -np.inf


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest of each row, ascending, lowest index among equals: [rows, n] -> int [rows, count].

    n must be at least count; indices whose score is -inf fill up where fewer are left.
    """
    rows, n = scores.shape
    if n == count:
        return np.broadcast_to(np.arange(n), scores.shape)
    threshold = np.partition(scores, n - count, axis=-1)[:, n - count, None]
    chosen = scores >= threshold
    if np.count_nonzero(chosen) > rows * count:  # some row has more equals at its threshold than places left
        equal = scores == threshold
        chosen &= ~equal
        missing = count - np.count_nonzero(chosen, axis=-1, keepdims=True)
        chosen |= equal & (np.cumsum(equal, axis=-1) <= missing)
    return np.nonzero(chosen)[1].reshape(rows, count)


def candidate_mask(scores: np.ndarray, visible: np.ndarray, block: int, blocks_kept: int) -> np.ndarray:
    """Entries inside the candidate blocks: masked scores [rows, entries], visible [rows] -> bool [rows, entries]."""
    rows, entries = scores.shape
    blocks = -(-entries // block)
    best = np.full((rows, blocks * block), -np.inf, scores.dtype)
    best[:, :entries] = scores
    best = best.reshape(rows, blocks, block).max(axis=-1)
    newest = (visible - 1) // block
    seen = visible > 0
    best[np.flatnonzero(seen), newest[seen]] = np.inf
    if blocks <= blocks_kept:
        kept = best > -np.inf
    else:
        kept = np.zeros((rows, blocks), bool)
        np.put_along_axis(kept, largest(best, blocks_kept), True, axis=-1)
        kept &= best > -np.inf
    return np.repeat(kept, block, axis=-1)[:, :entries]
