"""Names of cache entries: keyed hashes of what an entry holds and of everything that changes its bytes.

    key(ns, tenant) = HMAC(fleet key, "names", ns, tenant)
    h_0     = HMAC(key, "root")
    h_i     = HMAC(key, "block", h_{i-1}, ids of block i)      block = 128 tokens, ids as little-endian u32
    name(p) = HMAC(key, "entry", h_{p // 128}, ids of the rest)
    segment = HMAC(key, "segment", SHA-256 of the rendered bytes up to a special token's end)

Each is cut to 20 bytes. A server of another namespace, another tenant or without the key cannot write a name down, so
equal names mean equal bytes. Names are what Redis and logs see; they tell nothing about the text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dsuf.kv.keys import authenticate, derive

NAME_BYTES = 20
BLOCK_TOKENS = 128
RESUME_TOKENS = 8192  # inside a long prompt or reply a point is saved as often
LAYOUT_VERSION = 1  # counts changes of cache page or snapshot that their sizes do not show


def namespace(
    *, checkpoint: bytes, backend: str, numerics: str, prefill: str, page_bytes: int, snapshot_bytes: int
) -> bytes:
    """32 bytes that differ whenever the same ids would give other cache bytes. `checkpoint` is its fingerprint."""
    parts = [
        b"dsuf-kv",
        str(LAYOUT_VERSION).encode(),
        checkpoint,
        *(text.encode() for text in (backend, numerics, prefill)),
        str(BLOCK_TOKENS).encode(),
        str(page_bytes).encode(),
        str(snapshot_bytes).encode(),
    ]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def ids_bytes(ids: np.ndarray | list[int]) -> bytes:
    """Token ids as little-endian u32."""
    return np.asarray(ids, dtype="<u4").tobytes()


def ids_array(data: bytes) -> np.ndarray:
    """The inverse of `ids_bytes`, uint32 [tokens]. Raises ValueError for bytes that are not whole ids."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


@dataclass(frozen=True)
class Names:
    """All names of one tenant under one namespace."""

    key: bytes

    @classmethod
    def of(cls, fleet_key: bytes, ns: bytes, tenant: str) -> Names:
        """Names of `tenant`, the configured name of an API key."""
        return cls(derive(fleet_key, "names", ns, tenant.encode()))

    @property
    def root(self) -> bytes:
        """The chain's beginning."""
        return self._cut(b"root")

    def chain(self, ids: np.ndarray, start: bytes | None = None) -> list[bytes]:
        """Names of the full blocks of `ids` uint32 [tokens]; `start` is the name of the block before them."""
        previous, found, data = start or self.root, [], ids_bytes(ids)
        width = 4 * BLOCK_TOKENS
        for at in range(0, len(data) - width + 1, width):
            previous = self._cut(b"block", previous, data[at : at + width])
            found.append(previous)
        return found

    def entry(self, block: bytes, rest: np.ndarray) -> bytes:
        """Name of the entry that ends `rest` (under 128 ids) after the block named `block` (the root for none)."""
        return self._cut(b"entry", block, ids_bytes(rest))

    def of_ids(self, ids: np.ndarray) -> bytes:
        """Name of the entry that holds exactly `ids`."""
        chain = self.chain(ids)
        return self.entry(chain[-1] if chain else self.root, ids[len(chain) * BLOCK_TOKENS :])

    def segment(self, digest: bytes) -> bytes:
        """Name under which an entry is found by the SHA-256 of rendered bytes."""
        return self._cut(b"segment", digest)

    def _cut(self, *parts: bytes) -> bytes:
        return authenticate(self.key, *parts)[:NAME_BYTES]
